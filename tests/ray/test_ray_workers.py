"""Workers as actors of a real Ray on this machine: `pip install -e ".[ray,test]"` brings it."""

import json
import time

import pytest
from nodes import Nodes
from running import ROOT, actors, alone, command_in, fill, kill, results_of, wait_for

pytestmark = pytest.mark.timeout(300)
GATHERING = """
import glob, os, time

def gathering(prefixes):
    open(f"here-{os.getpid()}", "w").close()
    while len(glob.glob("here-*")) < 64:
        time.sleep(0.2)
    return [1 + sum(prefix) % 90 for prefix in prefixes]
"""


@pytest.fixture
def folder(tmp_path):
    return fill(tmp_path)


def test_the_results_are_those_of_one_engine(folder):
    out, told = command_in(folder, "--workers", "2", "--on", "ray").communicate()
    assert results_of(out) == alone(folder)
    assert "2 workers · 4 slots".encode() in told


def test_replicas_of_a_checkpoint_give_the_results_of_one(folder):
    pytest.importorskip("tokenizers", reason="it is of the extra `models`")
    model = ("--model", ROOT / "samples" / "tiny.gguf")
    out, told = command_in(folder, *model, "--workers", "2", "--on", "ray", "-q").communicate()
    assert not told
    assert results_of(out) == alone(folder, *model)


@pytest.mark.parametrize("num_workers", [1, 8])
def test_there_may_be_more_workers_than_processors(folder, num_workers):
    running = command_in(folder, "--workers", num_workers, "--on", "ray", "-q")
    out, told = running.communicate()
    assert not told
    assert results_of(out) == alone(folder)


@pytest.mark.heavy
@pytest.mark.timeout(900)
def test_sixty_four_workers_give_the_results_of_one_engine(tmp_path):
    folder, model = fill(tmp_path, 2_000), ("--model", "gathering:gathering")
    (folder / "gathering.py").write_text(GATHERING)
    with Nodes(num_cpus=64) as nodes:
        command = ("--workers", 64, *nodes.on, "-o", "out.jsonl", "-q")
        running = command_in(folder, *model, *command)
        assert not running.communicate()[1]
    written = (folder / "out.jsonl").read_bytes()
    slots = {json.loads(line)["slot"] // 2 for line in written.splitlines()}
    assert slots == set(range(64))
    assert results_of(written) == alone(folder, "--model", "killing:sleepy", "-b", 64)


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
    assert b"error: cannot connect to a cluster of Ray at 127.0.0.1:1: " in told
