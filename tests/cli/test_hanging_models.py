"""A run whose model hangs or breaks ends with all that was written, and how to go on."""

import json
import signal
from contextlib import contextmanager

import pytest
from examples import rest_heavy
from process import batchdecode, lines_of, start, wait_for

COMMON = """
import asyncio, ctypes, pathlib, time
def note(name):
    pathlib.Path(name).touch()

class LLM:
    vocab_size = 4
    def get_stop_token_id(self):
        return 0
    def next_token_logits(self, prev_token_ids):
        return self.hang() if len(prev_token_ids) > 2 else [0, 0, 1, 0]

class Async(LLM):
    async def next_token_logits(self, prev_token_ids):
        answer = super().next_token_logits(prev_token_ids)
        return await answer if asyncio.iscoroutine(answer) else answer
    async def hang(self):
        note("hanging")
        try:
            await asyncio.sleep(600)
        finally:
            note("cancelled")

class Stubborn(Async):
    async def hang(self):
        note("hanging")
        while True:
            try:
                await asyncio.sleep(600)
            except asyncio.CancelledError:
                note("cancelled")

class InThread(LLM):
    def hang(self):
        note("hanging")
        time.sleep(600)

def function(hang):
    def model(prefixes):
        if any(len(prefix) > 2 for prefix in prefixes):
            note("hanging")
            hang()
        return [2 for _ in prefixes]
    return model

def swallow():
    while True:
        try:
            time.sleep(600)
        except BaseException:
            pass

def deadlock():
    mutex, lock = ctypes.create_string_buffer(64), ctypes.CDLL(None).pthread_mutex_lock
    lock(mutex)
    lock(mutex)  # this is no code of Python's, and comes back for no signal

def interrupt():
    raise KeyboardInterrupt

swallowing, deadlocked, interrupting = map(function, (swallow, deadlock, interrupt))
"""
ARGUMENTS = ["run", "in", "-o", "out", "--trace", "trace", "-b", "2", "--model"]
REQUESTS = lines_of({"id": "short", "prompt": [1], "max_tokens": 1}, {"id": "long", "prompt": [1]})


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "models.py").write_text(COMMON)
    (tmp_path / "in").write_bytes(REQUESTS)
    return tmp_path


@contextmanager
def hanging(folder, model):
    """The process of a run whose model hangs now, after one result."""
    with start(*ARGUMENTS, f"models:{model}", cwd=folder) as process:
        try:
            wait_for((folder / "hanging").exists)
            yield process
        finally:
            process.kill()


def test_a_run_that_is_broken_off_in_its_first_step_tells_of_what_had_arrived(folder):
    requests = [{"id": name, "prompt": [1, 2, 3]} for name in "ab"]
    (folder / "in").write_bytes(lines_of(*requests, {"id": "later", "prompt": [1]}))
    with hanging(folder, "Async") as process:
        process.send_signal(signal.SIGINT)
        _, stderr = process.communicate(timeout=20)
    assert process.returncode == 130
    assert b"2 unfinished" in stderr
    assert b"no requests" not in stderr
    events = [json.loads(line) for line in (folder / "trace").read_bytes().splitlines()]
    assert [(e["event"], e.get("id")) for e in events[1:]] == [("arrive", "a"), ("arrive", "b")]
    assert (folder / "out").read_bytes() == b""


def check_left(folder, model, stderr):
    """Check what a run has left that ended after its first result."""
    [result] = map(json.loads, (folder / "out").read_bytes().splitlines())
    assert result["id"] == "short"
    events = [json.loads(line) for line in (folder / "trace").read_bytes().splitlines()]
    assert [e["id"] for e in events if e["event"] == "finish"] == ["short"]
    assert events[-1]["event"] != "end"
    assert "1 result went to out\n" in stderr
    assert f"continue with: batchdecode {' '.join(ARGUMENTS)} models:{model} --resume" in stderr
    assert not json.loads((folder / "out.run.json").read_bytes())["finished"]
    assert "Traceback" not in stderr


@pytest.mark.parametrize(
    ("model", "number"), [("Stubborn", signal.SIGTERM), ("InThread", signal.SIGINT)]
)
def test_calls_of_an_llm_are_given_up_at_the_first_signal(folder, model, number):
    with hanging(folder, model) as process:
        process.send_signal(number)
        stderr = process.communicate(timeout=30)[1].decode()
    assert process.returncode == 128 + number
    assert f"stopped by {number.name}; 1 result" in stderr
    assert "waiting" not in stderr
    check_left(folder, model, stderr)
    assert (folder / "cancelled").exists() == (model in {"Async", "Stubborn"})


@pytest.mark.parametrize(
    ("model", "number"),
    rest_heavy(1, [("deadlocked", signal.SIGTERM), ("swallowing", signal.SIGINT)]),
)
def test_a_step_that_hangs_is_named_at_the_first_signal_and_left_at_the_second(
    folder, model, number
):
    with hanging(folder, model) as process:
        process.send_signal(number)
        said = process.stderr.readline().decode()
        process.send_signal(signal.SIGINT)
        stderr = process.communicate(timeout=30)[1].decode()
    assert said == (
        f"{number.name}: the run stops when the model has computed step 2; "
        "a second signal stops it at once\n"
    )
    assert process.returncode == 128 + number
    assert f"stopped by {number.name}; 1 result" in stderr
    check_left(folder, model, stderr)


def test_a_step_that_hangs_is_left_at_once_for_a_quit(folder):
    with hanging(folder, "deadlocked") as process:
        process.send_signal(signal.SIGQUIT)
        stderr = process.communicate(timeout=30)[1].decode()
    assert process.returncode == 128 + signal.SIGQUIT
    check_left(folder, "deadlocked", stderr)


def test_a_model_that_interrupts_ends_the_run_as_a_signal_does(folder):
    done = batchdecode(*ARGUMENTS, "models:interrupting", cwd=folder)
    assert done.returncode == 130
    assert "stopped by a KeyboardInterrupt that the model raised; 1 result" in done.stderr
    check_left(folder, "interrupting", done.stderr)


BROKEN = """
import numpy as np
from batcher import ByteTokenizer, ModelOutput

class Broken:
    name, settings = "broken:Broken", {}
    vocab_size, eos_token_id, tokenizer = 256, None, ByteTokenizer()
    def allocate(self, num_slots):
        self.num_slots, self.num_released = num_slots, 0
    def forward(self, batch):
        return ModelOutput(np.full(self.num_slots, 65))
    def release(self, slot):
        self.num_released += 1
        if self.num_released == 2:
            raise OSError("the cache is gone")
"""


@pytest.mark.parametrize("is_quiet", [False, True])
def test_a_model_that_raises_in_release_ends_it_too(folder, is_quiet):
    (folder / "broken.py").write_text(BROKEN)
    requests = [{"id": str(number), "prompt": [1], "max_tokens": number} for number in (1, 2, 3)]
    (folder / "in").write_bytes(lines_of(*requests))
    quiet = ["-q"] if is_quiet else []
    arguments = [*ARGUMENTS, "broken:Broken", "--keep-order", *quiet]
    process = start(*arguments, cwd=folder)
    stderr = process.communicate(timeout=30)[1].decode()
    assert process.returncode == 1
    assert "error: broken:Broken cannot release slot 1: OSError: the cache is gone" in stderr
    assert "(broken.py, line 15); 1 result went to out\n" in stderr
    assert f"continue with: batchdecode {' '.join(arguments)} --resume" in stderr
    assert ("Traceback" in stderr) == (not is_quiet)
    assert stderr.count("OSError: the cache is gone (broken.py, line 15)\n") == is_quiet
    assert [json.loads(line)["id"] for line in (folder / "out").read_bytes().splitlines()] == ["1"]
    assert b'"finish"' in (folder / "trace").read_bytes()


def test_a_policy_that_raises_ends_it_too(folder):
    (folder / "order.py").write_text("def rank(request):\n    return 1 / (request.id != 'worse')\n")
    requests = [{"id": "good", "prompt": [1], "max_tokens": 1}, {"id": "worse", "prompt": [1]}]
    requests[1]["arrival_time"] = 5
    (folder / "in").write_bytes(lines_of(*requests))
    arguments = ["run", "in", "-o", "out", "--trace", "trace", "--policy", "order:rank", "-q"]
    done = batchdecode(*arguments, cwd=folder)
    assert done.returncode == 1
    assert "error: the policy order:rank raised ZeroDivisionError: " in done.stderr
    assert "(order.py, line 2); 1 result went to out\n" in done.stderr
    assert f"continue with: batchdecode {' '.join(arguments)} --resume" in done.stderr
    assert b'"finish"' in (folder / "trace").read_bytes()


SLEEPING = """
import asyncio

class LLM:
    vocab_size = 4

    def get_stop_token_id(self):
        return 0

    async def next_token_logits(self, prev_token_ids):
        if prev_token_ids[0] == 1:
            await asyncio.sleep(60)
        return [0, 0, 1, 0]
"""


def test_the_row_of_a_call_that_hangs_fails_and_the_others_go_on(tmp_path):
    (tmp_path / "slow.py").write_text(SLEEPING)
    (tmp_path / "config.yaml").write_text("llm:\n  call_timeout: 0.2\n")
    limit = ["--config", "config.yaml"]
    requests = lines_of(*({"prompt": [token], "max_tokens": 2} for token in (1, 2, 3)))
    done = batchdecode("run", "--model", "slow:LLM", "-q", *limit, cwd=tmp_path, stdin=requests)
    assert done.returncode == 1
    slow, *others = map(json.loads, done.stdout.splitlines())
    assert slow["error"]["code"] == "call-timeout"
    assert slow["error"]["message"] == "step 0: slow:LLM timed out after 0.2 s"
    assert [result["tokens"] for result in others] == [[2, 2], [2, 2]]


def test_a_row_that_took_too_long_is_decoded_again_with_more_time(tmp_path):
    llm = SLEEPING.replace("sleep(60)", "sleep(0.3)")
    (tmp_path / "slow.py").write_text(llm)
    (tmp_path / "in").write_bytes(lines_of({"prompt": [1], "max_tokens": 1}))
    command = ["run", "in", "-o", "out", "--model", "slow:LLM", "-q", "--call-timeout"]
    assert batchdecode(*command, "0.1", cwd=tmp_path).returncode == 1
    again = batchdecode(*command, "30", "--resume", "--retry-failed", cwd=tmp_path)
    assert (again.returncode, again.stderr) == (0, "")
    [result] = map(json.loads, (tmp_path / "out").read_bytes().splitlines())
    assert result["tokens"] == [2]
