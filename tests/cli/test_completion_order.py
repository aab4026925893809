"""Results come in completion order, requests that need no slot among them, for every policy."""

import json

import pytest
from process import batchdecode

POLICIES = ["fcfs", "sjf"]


def requests_of(*requests):
    rows = (
        {"id": name, "prompt": "x", "max_tokens": n, "arrival_time": at, "ignore_eos": True}
        for name, n, at in requests
    )
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def finished(data, tmp_path, *arguments):
    """(id, the step it finished in) of each result, the same from a pipe and from a file."""
    (tmp_path / "in.jsonl").write_bytes(data)
    piped = batchdecode("run", "-q", *arguments, cwd=tmp_path, stdin=data)
    filed = batchdecode("run", "in.jsonl", "-q", *arguments, cwd=tmp_path)
    assert piped.stdout == filed.stdout
    return [
        (result["id"], result["steps"]["finished"])
        for result in map(json.loads, filed.stdout.splitlines())
    ]


@pytest.mark.parametrize("policy", POLICIES)
def test_one_that_arrives_later_ends_at_its_arrival(tmp_path, policy):
    data = requests_of(("a", 5, 0), ("z", 0, 2), ("b", 1, 3))
    done = finished(data, tmp_path, "-b", "1", "--policy", policy)
    assert done == [("z", 2), ("a", 4), ("b", 5)]


def test_behind_others_that_wait_it_ends_in_its_turn(tmp_path):
    data = requests_of(("a", 3, 0), ("b", 2, 0), ("y", 0, 0), ("c", 2, 0), ("z", 0, 1), ("d", 1, 9))
    done = finished(data, tmp_path, "-b", "1")
    assert done == [("a", 2), ("y", 3), ("b", 4), ("z", 5), ("c", 6), ("d", 7)]


def test_what_was_read_ahead_is_not_complete_when_the_run_gives_up(tmp_path):
    data = b'{"id":"a"}\n' + requests_of(("b", 1, 0))
    done = batchdecode("run", "-q", "--max-errors", "1", cwd=tmp_path, stdin=data)
    assert [json.loads(line)["id"] for line in done.stdout.splitlines()] == ["a"]
    assert done.returncode == 1
