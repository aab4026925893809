"""What several workers cost: processor time of all processes, beside one, and of the command."""

import ctypes
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

from report import Row

TOOL = str(Path(sys.executable).with_name("batchdecode"))
NUM_REQUESTS, NUM_WORKERS, NUM_ROUNDS = 300_000, 2, 3
NUM_FEW = 1_000  # requests of a run that only starts, so to speak
_PR_SET_CHILD_SUBREAPER = 36  # of prctl(2): orphans are waited for here


def cpu_of(command: list[str]) -> tuple[float, float]:
    """Run a command; return its processor time and that of all it has started, in seconds."""
    own = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    seconds = [0.0, 0.0]
    while True:
        try:
            pid, status, usage = os.wait4(-1, 0)
        except ChildProcessError:
            return seconds[0], seconds[1]
        if os.WIFEXITED(status) and os.WEXITSTATUS(status):
            raise SystemExit(f"{' '.join(command)} failed")
        seconds[pid != own.pid] += usage.ru_utime + usage.ru_stime


def own_cpu_of(command: list[str]) -> float:
    """Run a command; return the processor time of its own process, in seconds."""
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    total, stat = 0, Path(f"/proc/{process.pid}/stat")
    while process.poll() is None:
        fields = stat.read_text().rpartition(")")[2].split()
        total = max(total, int(fields[11]) + int(fields[12]))  # utime and stime of proc(5)
        time.sleep(0.02)
    if process.returncode:
        raise SystemExit(f"{' '.join(command)} failed")
    return total / os.sysconf("SC_CLK_TCK")


def write_requests(path: Path, num_requests: int) -> None:
    """Write so many short requests into a file."""
    with path.open("w") as file:
        for number in range(num_requests):
            row = {"id": f"r{number}", "prompt": f"Tell of number {number}", "max_tokens": 16}
            file.write(f"{json.dumps(row)}\n")


def workers(folder: Path) -> Iterator[Row]:
    """Compare two workers with one process, file to file."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    few, many, out = folder / "few.jsonl", folder / "short.jsonl", folder / "workers.out.jsonl"
    write_requests(few, NUM_FEW)
    write_requests(many, NUM_REQUESTS)
    command = [TOOL, "run", "-q", "-b", "64", "--force", "-o", str(out)]
    by_workers = [*command, "--workers", str(NUM_WORKERS)]
    ratios, shares, own_times = [], [], []
    for _ in range(NUM_ROUNDS):
        alone, _ = cpu_of([*command, str(many)])
        own, others = cpu_of([*by_workers, str(many)])
        start, _ = cpu_of([*by_workers, str(few)])
        ratios.append((own + others) / alone)
        shares.append(own / alone)
        own_times.append((own - start) / (NUM_REQUESTS - NUM_FEW))
    ratio, share = statistics.median(ratios), statistics.median(shares)
    name = f"processor time of `run --workers 2`, {NUM_REQUESTS:,} short requests, against one"
    yield Row(f"{name} process", f"{ratio:.2f}x", "<= 1.12x")
    name = "the command itself, which hands out lines and writes, against that process"
    yield Row(name, f"{share:.2f}x", "<= 0.3x")
    own_time = statistics.median(own_times) * 1e6
    name = "the same, start-up left out"
    yield Row(name, f"{own_time:.1f} µs a request", "<= 5 µs")
    for cores, target in ((2, 1.7), (4, 3)):
        most = min(cores / ratio, 1 / share)
        name = f"by that, {cores} workers on {cores} cores, against one process, at most"
        yield Row(name, f"{most:.2f}x as fast", f">= {target}x")
    if find_spec("ray") is not None:
        yield from actors(few, many)


def actors(few: Path, many: Path) -> Iterator[Row]:
    """Compare the command with two workers on Ray with two processes: what it takes itself.

    few, many: files of NUM_FEW and NUM_REQUESTS requests.
    """
    os.environ["RAY_ADDRESS"] = "local"  # whatever cluster is here, a new one
    seconds = {}
    for where in ((), ("--on", "ray")):
        options = ["-q", "-b", "64", "-o", "/dev/null", "--workers", str(NUM_WORKERS), *where]
        first, last = (own_cpu_of([TOOL, "run", str(path), *options]) for path in (few, many))
        seconds[where] = (last - first) / (NUM_REQUESTS - NUM_FEW)
    plain, on_ray = (1e6 * each for each in seconds.values())
    name = f"the command itself with --on ray, start-up left out; {plain:.1f} µs without"
    yield Row(name, f"{on_ray:.1f} µs a request", "<= 50 µs")
