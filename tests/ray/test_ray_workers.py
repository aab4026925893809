"""Workers as actors of a real Ray on this machine: `pip install -e ".[ray,test]"` brings it."""

import time

import pytest
from running import ROOT, actors, alone, command_in, fill, kill, results_of, wait_for

pytestmark = pytest.mark.timeout(300)


@pytest.fixture
def folder(tmp_path):
    return fill(tmp_path)


TINY = ("--model", ROOT / "samples" / "tiny.gguf")


@pytest.mark.parametrize(
    ("num_workers", "more"), [(2, ()), (1, ("-q",)), (8, ("-q",)), (2, (*TINY, "-q"))]
)
def test_the_results_are_those_of_one_engine(folder, num_workers, more):
    if "--model" in more:
        pytest.importorskip("tokenizers", reason="it is of the extra `models`")
    out, told = command_in(folder, "--workers", num_workers, "--on", "ray", *more).communicate()
    assert results_of(out) == alone(folder, *more[:-1])
    assert (told == b"") if more else ("2 workers · 4 slots".encode() in told)


def test_a_killed_actor_is_replaced(folder):
    model = ("--model", "killing:sleepy")
    running = command_in(folder, *model, "--workers", "2", "--on", "ray")
    found = wait_for(actors)
    time.sleep(1)
    kill(found[0])
    out, told = running.communicate()
    assert results_of(out) == alone(folder, *model)
    assert b"1 worker replaced" in told


def test_a_cluster_that_is_not_there_is_told(folder):
    running = command_in(folder, "--workers", "2", "--on", "ray:127.0.0.1:1")
    _, told = running.communicate()
    assert running.returncode == 2
    assert b"error: cannot connect to a Ray cluster at 127.0.0.1:1: " in told
