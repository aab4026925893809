"""What a model forks ends where it would come back: it never decodes, or writes results, itself."""

import pytest
from process import batchdecode, lines_of, start

MODELS = """
import os, sys

def left(prefixes):
    if len(prefixes[0]) == 2 and os.fork() == 0:
        print("forked")
        sys.exit(3)
    return [5] * len(prefixes)

def raised(prefixes):
    if os.fork() == 0:
        raise ValueError("in a child")
    print("status", os.waitstatus_to_exitcode(os.wait()[1]))
    return [5] * len(prefixes)

def returned(prefixes):
    os.fork()
    return [5] * len(prefixes)

class Tokenizer:
    token_bytes = [bytes([token]) for token in range(256)]
    def encode(self, text):
        os.fork()
        return list(text.encode())

class Model:
    name, settings, gives, vocab_size, eos_token_id = "forking", {}, "tokens", 256, None
    tokenizer = Tokenizer()
    def allocate(self, num_slots):
        os.fork()
        self.num_slots = num_slots
    def release(self, slot):
        os.fork()
    def forward(self, batch):
        import numpy
        from batcher.models.base import ModelOutput
        os.fork()
        return ModelOutput(numpy.full(self.num_slots, 5), {})

class LLM:
    vocab_size = 256
    def get_stop_token_id(self):
        return 0
    def next_token_logits(self, prev_token_ids):
        os.fork()
        return [*range(256)]

class AsyncLLM(LLM):
    async def next_token_logits(self, prev_token_ids):
        os.fork()
        return [*range(256)]

if "LOADING" in os.environ:
    os.fork()
"""


@pytest.fixture(autouse=True)
def decode(tmp_path):
    (tmp_path / "forking.py").write_text(MODELS)
    requests = [{"id": i, "prompt": f"{i}", "max_tokens": 3} for i in "ab"]
    (tmp_path / "in").write_bytes(lines_of(*requests))
    return lambda name, **environment: batchdecode(
        "run", "in", "-q", "--model", f"forking:{name}", cwd=tmp_path, **environment
    )


@pytest.mark.parametrize("name", ["left", "returned", "Model", "LLM", "AsyncLLM"])
def test_a_child_process_of_a_model_does_not_go_on_with_the_run(decode, name):
    done = decode(name)
    assert done.returncode == 0
    assert len(done.stdout.splitlines()) == 2
    assert done.stderr.count("forked") == (name == "left")


def test_nor_does_one_that_was_forked_while_the_model_was_loaded(decode):
    assert len(decode("left", LOADING="1").stdout.splitlines()) == 2


def test_what_a_child_process_raises_is_its_own(tmp_path):
    process = start("run", "in", "-q", "--model", "forking:raised", cwd=tmp_path)
    stderr = process.communicate()[1].decode()
    assert process.returncode == 0
    assert stderr.count("ValueError: in a child\n") == stderr.count("status 1\n") == 3
