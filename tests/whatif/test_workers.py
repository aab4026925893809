"""Work in other processes: the same answers, and what happens if one fails or dies."""

import os
import signal
import time

import pytest

from batcher.errors import BatchdecodeError, InvariantError
from batcher.planning import workers
from batcher.planning.workers import WorkerProcesses


def answer(shared, task, on_part):
    time.sleep(0.01 * (task % 3))  # so that they are not done in order
    return shared + task


def fail(shared, task, on_part):
    if task == 2:
        raise shared("no such thing")
    return task


def die(shared, task, on_part):
    os.kill(os.getpid(), signal.SIGKILL)


def tell(shared, task, on_part):
    workers.PART_INTERVAL = shared
    time.sleep(shared)
    on_part(0.25)
    on_part(0.5)  # too soon to be told
    return task


@pytest.mark.parametrize("num_jobs", [1, 2])
def test_a_task_tells_now_and_then_how_much_of_it_is_done(num_jobs, monkeypatch):
    monkeypatch.setattr(workers, "PART_INTERVAL", 0.05)
    parts = []
    with WorkerProcesses(tell, 0.05, num_jobs) as started:
        started.answers(range(2), parts.append)
    assert parts[0] == 0.25
    assert parts[-1] == 2.0
    assert 0.5 not in [part % 1 for part in parts] or num_jobs == 2


@pytest.mark.parametrize("num_jobs", [1, 2])
def test_every_task_is_answered_once(num_jobs):
    with WorkerProcesses(answer, 100, num_jobs) as started:
        assert started.answers(range(10)) == [100 + task for task in range(10)]


@pytest.mark.parametrize(
    ("work", "shared", "error", "message"),
    [
        (fail, BatchdecodeError, BatchdecodeError, "no such"),
        (fail, ValueError, InvariantError, "in fail"),  # with its place
        (die, None, BatchdecodeError, "was killed"),
    ],
)
def test_what_goes_wrong_in_a_process_is_raised_here(work, shared, error, message):
    with WorkerProcesses(work, shared, 2) as started, pytest.raises(error, match=message):
        started.answers(range(4))


def test_none_is_left_when_it_ends_early():
    with WorkerProcesses(answer, 0, 2) as started:
        started.answers(range(2))
        processes = list(started._processes)
        assert all(process.is_alive() for process in processes)
    assert not any(process.is_alive() for process in processes)
