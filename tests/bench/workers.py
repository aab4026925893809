"""What several workers cost beside one process: processor time of all processes, for a request."""

import ctypes
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from report import Row

TOOL = str(Path(sys.executable).with_name("batchdecode"))
NUM_REQUESTS, NUM_WORKERS, NUM_ROUNDS = 300_000, 2, 3
_PR_SET_CHILD_SUBREAPER = 36  # of prctl(2): orphans are waited for here


def cpu_of(command: list[str]) -> float:
    """Run a command; return the processor time of it and all that it has started, in seconds."""
    subprocess.Popen(command, stdout=subprocess.DEVNULL)
    total = 0.0
    while True:
        try:
            _, status, usage = os.wait4(-1, 0)
        except ChildProcessError:
            return total
        if os.WIFEXITED(status) and os.WEXITSTATUS(status):
            raise SystemExit(f"{' '.join(command)} failed")
        total += usage.ru_utime + usage.ru_stime


def workers(folder: Path) -> Iterator[Row]:
    """Compare two workers with one process, file to file."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    requests, out = folder / "short.jsonl", folder / "workers.out.jsonl"
    with requests.open("w") as file:
        for number in range(NUM_REQUESTS):
            row = {"id": f"r{number}", "prompt": f"Tell of number {number}", "max_tokens": 16}
            file.write(f"{json.dumps(row)}\n")
    command = [TOOL, "run", str(requests), "-q", "-b", "64", "--force", "-o", str(out)]
    ratios = []
    for _ in range(NUM_ROUNDS):
        alone = cpu_of(command)
        ratios.append(cpu_of([*command, "--workers", str(NUM_WORKERS)]) / alone)
    ratio = statistics.median(ratios)
    name = f"processor time of `run --workers 2`, {NUM_REQUESTS:,} short requests, against one"
    yield Row(f"{name} process", f"{ratio:.2f}x", "<= 1.18x, 1.7x as fast on two cores")
