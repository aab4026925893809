"""Workers as actors of a real Ray on this machine: `pip install -e ".[ray,test]"` brings it."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "cli"))

from killing_model import MODEL
from process import COMMAND, ENVIRONMENT, lines_of, workload

pytestmark = pytest.mark.timeout(300)


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "killing.py").write_text(MODEL)
    (tmp_path / "requests.jsonl").write_bytes(lines_of(*workload(40)))
    return tmp_path


def command_in(folder, *arguments):
    """Start the command in a folder, whose modules it finds."""
    path = os.pathsep.join([ENVIRONMENT["PYTHONPATH"], str(folder)])
    return subprocess.Popen(
        [*COMMAND, "run", "requests.jsonl", "-b", "2", *arguments],
        cwd=folder,
        env=ENVIRONMENT | {"PYTHONPATH": path},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def results_of(lines):
    found = [json.loads(line) for line in lines.splitlines()]
    kept = [{k: v for k, v in each.items() if k not in {"slot", "steps"}} for each in found]
    return sorted(map(json.dumps, kept))


def alone(folder, *arguments):
    out, told = command_in(folder, *arguments, "-q").communicate()
    assert not told
    return results_of(out)


def actors():
    """The ids of the processes of actors that run."""
    shown = subprocess.run(["ps", "-eo", "pid=,args="], capture_output=True, text=True, check=True)
    rows = [line.split(None, 1) for line in shown.stdout.splitlines()]
    return [int(pid) for pid, args in rows if "ray::ActorWorker" in args]


def test_the_results_are_those_of_one_engine(folder):
    out, told = command_in(folder, "--workers", "2", "--on", "ray").communicate()
    assert results_of(out) == alone(folder)
    assert "2 workers · 4 slots".encode() in told


def test_a_killed_actor_is_replaced(folder):
    model = ("--model", "killing:sleepy")
    running = command_in(folder, *model, "--workers", "2", "--on", "ray")
    deadline = time.monotonic() + 60
    while not (found := actors()) and time.monotonic() < deadline:
        time.sleep(0.05)
    time.sleep(1)
    os.kill(found[0], signal.SIGKILL)
    out, told = running.communicate()
    assert results_of(out) == alone(folder, *model)
    assert b"1 worker replaced" in told


def test_a_poison_request_fails_alone(folder):
    model = ("--model", "killing:fatal", "--workers", "2", "--on", "ray")
    running = command_in(folder, *model)
    out, told = running.communicate()
    results = [json.loads(line) for line in out.splitlines()]
    failed = [each["error"]["code"] for each in results if each["finish_reason"] == "error"]
    assert (running.returncode, len(results), failed) == (1, 40, ["worker-died"])
    assert b"5 workers replaced" in told


def test_a_killed_driver_leaves_no_actor_and_goes_on(folder):
    model = ("--model", "killing:sleepy", "-o", "out.jsonl")
    running = command_in(folder, *model, "--workers", "2", "--on", "ray")
    deadline = time.monotonic() + 60
    while not actors() and time.monotonic() < deadline:
        time.sleep(0.05)
    time.sleep(1)
    running.kill()
    running.communicate()
    while actors() and time.monotonic() < deadline:
        time.sleep(0.2)
    assert not actors()
    again = command_in(folder, *model, "--workers", "3", "--on", "ray", "--resume", "-q")
    _, told = again.communicate()
    assert again.returncode == 0, told
    assert results_of((folder / "out.jsonl").read_bytes()) == alone(folder, *model[:2])


def test_a_cluster_that_is_not_there_is_told(folder):
    running = command_in(folder, "--workers", "2", "--on", "ray:127.0.0.1:1")
    _, told = running.communicate()
    assert running.returncode == 2
    assert b"there is no cluster of Ray" in told
