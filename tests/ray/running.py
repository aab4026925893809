"""The command with workers on Ray, in a folder with requests and models, and what it leaves."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "cli"))

from killing_model import MODEL
from process import COMMAND, ENVIRONMENT, ROOT, lines_of, workload

os.environ |= {"RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0"}
# What runs on the machines of a cluster finds the code as the command does.
os.environ["PYTHONPATH"] = str(ROOT)

SEEING = """
import os, time

import ray

def seeing(prefixes):
    machine = ray.get_runtime_context().get_node_id()
    open(f"seen-{machine}-{os.environ.get('CUDA_VISIBLE_DEVICES')}", "w").close()
    time.sleep(0.02)
    return [1 + sum(prefix) % 90 for prefix in prefixes]
"""


def fill(folder, num_requests=40):
    (folder / "killing.py").write_text(MODEL)
    (folder / "seeing.py").write_text(SEEING)
    (folder / "requests.jsonl").write_bytes(lines_of(*workload(num_requests)))
    return folder


def seen_in(folder):
    """Return what workers with the model `seeing` have seen: machines, and GPUs as CUDA does."""
    found = [path.name.split("-", 2)[1:] for path in folder.glob("seen-*")]
    return {machine for machine, _ in found}, sorted(gpus for _, gpus in found)


def command_in(folder, *arguments, command=COMMAND, **environment):
    """Start the command in a folder, whose modules it finds."""
    path = os.pathsep.join([ENVIRONMENT["PYTHONPATH"], str(folder)])
    ray = {name: value for name, value in os.environ.items() if name.startswith("RAY_")}
    return subprocess.Popen(
        [*command, "run", "requests.jsonl", "-b", "2", *map(str, arguments)],
        cwd=folder,
        env=ENVIRONMENT | {"PYTHONPATH": path} | ray | environment,
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
    shown = subprocess.run(["ps", "-eo", "pid=,args="], capture_output=True, text=True, check=True)
    rows = [line.split(None, 1) for line in shown.stdout.splitlines()]
    return [int(pid) for pid, args in rows if "ray::ActorWorker" in args]


def wait_for(what, seconds=150):
    until = time.monotonic() + seconds
    while not (found := what()) and time.monotonic() < until:
        time.sleep(0.1)
    return found


def kill(pid):
    os.kill(pid, signal.SIGKILL)
