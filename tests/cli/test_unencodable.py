"""A prompt that the model's tokenizer cannot encode is the error of its line alone."""

import json

import pytest
from process import batchdecode, lines_of

MODEL = """
from batcher import ByteTokenizer

class Letters(ByteTokenizer):
    def encode(self, text):
        return ["abc".index(letter) for letter in text]

def model(prefixes):
    return [sum(prefix) % 3 for prefix in prefixes]

model.tokenizer, model.vocab_size = Letters(), 256
"""
LINES = lines_of(
    {"id": "good", "prompt": "abc", "max_tokens": 2},
    '{"id": "bad", "prompt": "axe"}',
    '{"id": "worse", "prompt": [{"text": "a"}, {"text": "?"}]}',
    '{"custom_id": "row", "method": "POST", "url": "/v1/completions", "body": {"prompt": "z"}}',
    {"id": "ids", "prompt": [1], "max_tokens": 1},
)
REASON = "cannot be encoded: the tokenizer raised ValueError: substring not found"
PLACES = [("bad", 2, 25, "prompt"), ("worse", 3, 52, "prompt[1].text"), ("row", 4, 85, "prompt")]


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "letters.py").write_text(MODEL)
    (tmp_path / "in.jsonl").write_bytes(LINES)
    return tmp_path


def told(stderr):
    return [line for line in stderr.splitlines() if REASON in line]


def test_a_file_with_such_a_prompt_is_refused_before_the_first_step_as_check_does(folder):
    run = batchdecode("run", "in.jsonl", "--model", "letters:model", cwd=folder)
    check = batchdecode("check", "in.jsonl", "--model", "letters:model", cwd=folder)
    assert run.returncode == check.returncode == 2
    assert not run.stdout
    assert "3 invalid of 5 lines; nothing decoded. --keep-going to skip them." in run.stderr
    assert len(told(run.stderr)) == 3
    assert told(run.stderr) == told(check.stderr)
    for _, line, column, _ in PLACES:
        assert f"in.jsonl:{line}:{column}" in run.stderr
        assert f"in.jsonl:{line}:{column}" in check.stderr
    assert b"3 of 5 lines" in check.stdout


@pytest.mark.parametrize("is_piped", [False, True])
def test_with_keep_going_it_is_an_error_result_at_its_place(folder, is_piped):
    source = ["-"] if is_piped else ["in.jsonl"]
    arguments = ["run", *source, "--model", "letters:model", "--keep-going", "-q"]
    done = batchdecode(*arguments, cwd=folder, stdin=LINES if is_piped else b"")
    assert done.returncode == 1
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    rows = {row.get("custom_id", row["id"]): row for row in rows}
    assert rows["good"]["finish_reason"] == rows["ids"]["finish_reason"] == "length"
    for request_id, line, column, field in PLACES:
        row = rows[request_id]
        if request_id == "row":
            assert REASON in row["error"]["message"]
            continue
        error = row["error"]
        assert (error["code"], error["line"], error["column"]) == ("invalid-value", line, column)
        assert error["field"] == field
        assert error["message"] == f"`{field}` {REASON}"


def test_on_a_pipe_the_reading_stops_there_and_what_runs_is_finished(folder):
    done = batchdecode("run", "--model", "letters:model", "-q", cwd=folder, stdin=LINES)
    assert done.returncode == 2
    assert [json.loads(line)["id"] for line in done.stdout.splitlines()] == ["good"]
    assert len(told(done.stderr)) == 1
    assert "1 invalid of 2 lines; reading stopped there" in done.stderr
