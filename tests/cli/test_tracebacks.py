"""What a model raises is shown once, from its own code on, and counted."""

import logging
import re
import subprocess

import pytest
from process import lines_of, start

from batcher import decode

MODELS = """
import json

def fails(prefixes):
    return deeper(prefixes)

def deeper(prefixes):
    raise ValueError("odd \\x1b[31m" if prefixes else "")

def both(prefixes):
    return json.loads("{") if len(prefixes[0]) % 2 else deeper(prefixes)

class LLM:
    vocab_size = 4
    def get_stop_token_id(self):
        return 0
    def next_token_logits(self, prev_token_ids):
        raise TypeError("three")

class Unmade:
    def __init__(self):
        self.missing
"""
REQUESTS = lines_of(*({"prompt": [1] * n, "max_tokens": 1} for n in range(1, 10)))


@pytest.fixture
def run(tmp_path):
    (tmp_path / "mine.py").write_text(MODELS)

    def run(model, *arguments):
        command = ["run", "--model", f"mine:{model}", "-b", "1", *arguments]
        with start(*command, cwd=tmp_path, stdin=subprocess.PIPE) as process:
            _, stderr = process.communicate(REQUESTS, timeout=60)
        return process.returncode, stderr.decode()

    return run


def test_each_kind_shows_its_traceback_once(run):
    status, stderr = run("fails")
    assert status == 1
    assert stderr.count("Traceback (most recent call last):") == 1
    assert re.search(r'File ".*mine\.py", line 5, in fails\n', stderr)
    assert re.search(r'File ".*mine\.py", line 8, in deeper\n', stderr)
    assert "batcher/models" not in stderr
    assert "\x1b" not in stderr
    assert "... and 8 more like it\n" in stderr
    _, stderr = run("both")
    assert stderr.count("Traceback (most recent call last):") == 2
    assert "... and 4 more like it: JSONDecodeError at mine.py, line 11\n" in stderr
    assert "... and 3 more like it: ValueError at mine.py, line 8\n" in stderr


@pytest.mark.parametrize("model", ["fails", "LLM"])
def test_quietly_it_is_a_line(run, model):
    _, stderr = run(model, "-q")
    first, more, *_ = stderr.splitlines()
    raised = {"fails": r"ValueError: odd \x1b[31m (mine.py, line 8)"}
    assert first == raised.get(model, "TypeError: three (mine.py, line 18)")
    assert more == "... and 8 more like it"
    assert "Traceback" not in stderr


@pytest.mark.parametrize("quiet", [[], ["-q"]])
def test_what_cannot_be_loaded_shows_where(run, quiet):
    status, stderr = run("Unmade", *quiet)
    assert status == 2
    message = "error: cannot make a Unmade: AttributeError: 'Unmade' object has no attribute "
    assert f"{message}'missing' (mine.py, line 22)\n" in stderr
    assert ("Traceback" in stderr) == (not quiet)


def test_in_python_it_is_logged(caplog):
    def model(_):
        raise ValueError("mine")

    with caplog.at_level(logging.ERROR, "batcher"):
        decode([{"prompt": "a"}], model=model)
    [record] = caplog.records
    assert record.name == "batcher"
    assert "ValueError: mine" in record.getMessage()
