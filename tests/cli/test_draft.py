"""`batchdecode draft diagnose`: what it prints, and what it cannot look at."""

import json
from pathlib import Path

import pytest
from process import batchdecode, lines_of

TINY = Path(__file__).parents[2] / "samples" / "tiny.gguf"
REQUESTS = lines_of(
    {"prompt": "Tell me a story", "temperature": 0.7, "max_tokens": 30, "top_k": 40},
    {"prompt": "The old river", "temperature": 0.7, "max_tokens": 12, "n": 3, "arrival_time": 9},
    {"prompt": "no", "regex": "a+", "max_tokens": 4},
    {"prompt": "", "max_tokens": 0},
)


def diagnose(folder, *arguments, stdin=REQUESTS):
    return batchdecode("draft", "diagnose", "-", *arguments, cwd=folder, stdin=stdin)


def test_a_diagnosis_as_json(tmp_path):
    done = diagnose(tmp_path, "--draft", "simulated", "--tokens", 9, "--json")
    assert done.returncode == 0
    answer = json.loads(done.stdout)
    assert (answer["num_rows"], answer["num_positions"], answer["cause"]) == (2, 18, "none")
    assert answer["overlap"] == pytest.approx(1)
    assert len(answer["by_position"]) == 9
    causes = [check["cause"] for check in answer["checks"]]
    assert causes == ["tokenizer", "cache", "temperature", "positions"]


def test_a_diagnosis_names_the_fault_last(tmp_path):
    fields = '{"temperature": 2.0}'
    done = diagnose(tmp_path, "--draft", "simulated", "--draft-fields", fields)
    lines = done.stdout.decode().splitlines()
    assert lines[0] == "<stdin>: 2 requests, 42 positions"
    assert lines[-1] == "temperature: sample the draft at the temperature of the target"
    [line] = [line for line in lines if "FAULT" in line and "is 0.7" in line]
    assert line.split() == [
        *("temperature", "1.000", "FAULT", "temperature", "is", "0.7", "for", "the", "target,"),
        *("2.0", "for", "the", "draft"),
    ]
    done = diagnose(tmp_path, "--draft", str(TINY), "--json")
    assert done.returncode == 0
    assert json.loads(done.stdout)["cause"] == "tokenizer"
