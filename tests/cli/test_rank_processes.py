"""Commands with --tensor-parallel: the same bytes, and no process is left however one ends."""

import json
import os
import signal
from contextlib import contextmanager

import pytest
from process import COMMAND, ROOT, batchdecode, lines_of, start, wait_for, workload
from processes import are_gone, children_of

TINY = ROOT / "samples" / "tiny.gguf"
REQUESTS = ROOT / "samples" / "tiny.jsonl"
PARALLEL = ["--model", TINY, "--tensor-parallel", 2]


@contextmanager
def running(folder):
    """Start a long run in a session of its own; yield it with its ranks as soon as it decodes."""
    requests = [request | {"prompt": [9, 9]} for request in workload(6000, max_tokens=90)]
    (folder / "in").write_bytes(lines_of(*requests))
    process = start(
        "run", "in", *PARALLEL, "-o", "out", cwd=folder, command=COMMAND, start_new_session=True
    )
    out = folder / "out"
    wait_for(lambda: out.exists() and out.stat().st_size)
    children = children_of(process.pid)
    ranks = [pid for pid, told in children.items() if "spawn_main" in told]
    assert len(ranks) == 2
    yield process, ranks
    assert are_gone(children)
    assert not [name for name in os.listdir("/dev/shm") if str(process.pid) in name]  # noqa: S108, PTH208 - where shared memory is


def test_nothing_is_left_of_a_run_that_is_killed(tmp_path):
    with running(tmp_path) as (process, _):
        process.kill()
        assert process.communicate(timeout=30) == (b"", b"")


@pytest.mark.heavy
@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_for_all_processes_lets_the_step_finish(number, status, tmp_path):
    with running(tmp_path) as (process, _):
        os.killpg(process.pid, number)
        errors = process.communicate(timeout=30)[1].decode()
    assert process.returncode == status
    assert f"stopped by {number.name}" in errors
    assert "--tensor-parallel 2 -o out --resume" in errors
    assert '"error"' not in (tmp_path / "out").read_text()


@pytest.mark.heavy
def test_a_rank_that_is_killed_ends_a_run_that_can_be_resumed(tmp_path):
    with running(tmp_path) as (process, ranks):
        os.kill(ranks[0], signal.SIGKILL)
        errors = process.communicate(timeout=30)[1].decode()
    assert process.returncode == 1
    assert "error: rank 0 of 2 was killed by signal 9, perhaps out of memory; " in errors
    assert '"error"' not in (tmp_path / "out").read_text()


def told(*arguments):
    done = batchdecode("run", REQUESTS, "--model", TINY, *arguments)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.heavy
def test_verify_proves_it():
    done = batchdecode("verify", REQUESTS, *PARALLEL, "--settings", 8, "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["is_proven"]


def resumed(folder, first, then):
    row = {"id": "a", "prompt": [9], "max_tokens": 3}
    (folder / "in").write_bytes(lines_of(row))
    run = ["run", "in", "-o", "out", "--model", TINY]
    assert batchdecode(*run, *first, "--force", cwd=folder).returncode == 0
    return batchdecode(*run, *then, "--resume", cwd=folder)


@pytest.mark.heavy
@pytest.mark.parametrize("weights", ["fp32", "q8"])
def test_a_run_may_be_resumed_by_more_processes(tmp_path, weights):
    options = ["--weights", weights]
    assert resumed(tmp_path, options, [*PARALLEL, *options]).returncode == 0
