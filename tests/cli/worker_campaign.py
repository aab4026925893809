"""Kills random workers of one run at random moments, and compares what it writes with one process.

`PYTHONPATH=tests python tests/cli/worker_campaign.py --kills 100` tells whether the results are
complete, nothing is there twice, and all is the same but for `slot` and `steps`.

Rule: only a worker that has decoded something is killed.  Three in a row that die while they start
end a run, as they should, and on a busy machine that is where random kills would find them.
"""

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from process import COMMAND, ENVIRONMENT, lines_of, start, workload

MODEL = """
import os, time

def slow(prefixes):
    open(f"decodes-{os.getpid()}", "w").close()
    time.sleep(0.002)
    return [1 + sum(prefix) % 90 for prefix in prefixes]
"""


def workers_of(pid, folder):
    """Return the ids of the workers of a run in a folder that decode.

    A process that the run starts has forked them.
    """

    def children(parent):
        found = Path(f"/proc/{parent}/task/{parent}/children")
        return found.read_text().split() if found.exists() else []

    found = [worker for child in children(pid) for worker in children(child)]
    return [int(worker) for worker in found if (folder / f"decodes-{worker}").exists()]


def kill_some(running, folder, num_kills, generator):
    """Kill so many workers while the run goes on; return how many were."""
    killed = 0
    while killed < num_kills and running.poll() is None:
        time.sleep(generator.uniform(0.05, 0.4))
        workers = workers_of(running.pid, folder)
        if workers:
            try:
                os.kill(generator.choice(workers), signal.SIGKILL)
            except ProcessLookupError:
                continue
            killed += 1
    return killed


def without_schedule(line):
    result = json.loads(line)
    return json.dumps({k: v for k, v in result.items() if k not in {"slot", "steps"}})


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--requests", type=int, default=30_000)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "slow.py").write_text(MODEL)
        (folder / "requests.jsonl").write_bytes(lines_of(*workload(options.requests)))
        command = ("run", "requests.jsonl", "--model", "slow:slow", "-q")
        running = start(
            *(*command, "-b", 8, "-o", "out.jsonl", "--workers", options.workers),
            cwd=folder,
            command=COMMAND,
            stderr=subprocess.PIPE,
        )
        killed = kill_some(running, folder, options.kills, random.Random(options.seed))
        _, told = running.communicate()
        alone = subprocess.run(
            [*COMMAND, *command, "-b", "64"],
            cwd=folder,
            capture_output=True,
            check=True,
            env=ENVIRONMENT,
        )
        found = list(map(without_schedule, (folder / "out.jsonl").read_bytes().splitlines()))
        expected = list(map(without_schedule, alone.stdout.splitlines()))
        print(f"{killed} kills of {options.workers} workers, exit status {running.returncode}")
        print(f"{len(found)} results of {len(expected)}, {len(found) - len(set(found))} twice")
        print("the same as one process" if sorted(found) == sorted(expected) else "DIFFERENT")
        sys.stderr.write(told.decode())


if __name__ == "__main__":
    main()
