"""All benchmarks of docs/inside/benchmarks.md: `python tests/bench [NAME ...]` prints their table.

Machines are noisy, so every figure is a ratio of two things that are measured in turn, several
times, in this run; the median is quoted.
"""

import fcntl
import json
import os
import pty
import statistics
import struct
import sys
import tempfile
import termios
import threading
import time
from pathlib import Path
from typing import NamedTuple

sys.path.append(str(Path(__file__).parents[2]))  # cli/, which is installed as batchdecode

import bare
import workload
from fleets import fleets
from models import models
from paging import paging
from serving import serving
from simulation import simulation
from workload import Row

from batcher import Engine, Request, SimulatedModel

HERE = Path(__file__).parent
TOOL = [str(Path(sys.executable).with_name("batchdecode"))]


class Usage(NamedTuple):
    """What a child process took."""

    cpu: float  # seconds, user and system
    peak: float  # MB, the largest resident set


def child(command, *, stdin=None, stderr=None):
    """Run `command` to its end and return what it took; its output is thrown away."""
    pid = os.fork()
    if pid == 0:
        null = os.open(os.devnull, os.O_RDWR)
        os.dup2(null if stdin is None else stdin, 0)
        os.dup2(null, 1)
        os.dup2(null if stderr is None else stderr, 2)
        os.execvp(command[0], command)
    _, status, usage = os.wait4(pid, 0)
    if os.waitstatus_to_exitcode(status):
        raise SystemExit(f"exit status {os.waitstatus_to_exitcode(status)}: {' '.join(command)}")
    return Usage(usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1024)


def median_ratio(one, other, times=5):
    one(), other()
    return statistics.median(one() / other() for _ in range(times))


def extra_cost(one, other, times=11):
    """Return by which share one() takes longer than other(), from the least of each in turn.

    Noise only ever adds, and the least has the least of it: the difference is only a few per cent.
    """
    pairs = [(one(), other()) for _ in range(times)]
    ones, others = zip(*pairs, strict=True)
    return min(ones) / min(others) - 1


def cpu_seconds(work):
    began = time.process_time()
    work()
    return time.process_time() - began


def engine_rate(requests, batch_size):
    """Return generated tokens per CPU-second of the engine with the simulated model."""
    engine = Engine(SimulatedModel(), batch_size)

    def run():
        for request in requests:
            engine.add(request)
        while engine.has_work:
            engine.step()

    seconds = cpu_seconds(run)
    return engine.num_tokens / seconds


def bare_rate(rows, batch_size):
    outputs = {}
    seconds = cpu_seconds(lambda: outputs.update(bare.decode(rows, batch_size)))
    return sum(len(tokens) for tokens, _ in outputs.values()) / seconds


def engine(folder):
    """Measure the engine alone against the bare loop."""
    rows = list(workload.rows(4000))
    requests = [Request(**row) for row in rows]
    for batch_size, target in ((8, 0.5), (64, 1.8), (256, 2.5)):
        rates = [(engine_rate(requests, batch_size), bare_rate(rows, batch_size)) for _ in range(6)]
        ratio = statistics.median(ours / bares for ours, bares in rates[1:])
        ours, bares = (statistics.median(column) for column in zip(*rates[1:], strict=True))
        name = f"engine, B={batch_size}: {ours / 1e6:.2f}M tokens/s, bare loop {bares / 1e6:.2f}M"
        yield Row(name, f"{ratio:.2f}x", f">= {target}x")
    functions = functions_met()
    files = {name for name, _ in functions}
    what = "files and functions that a plain request meets on its way through an engine"
    yield Row(what, f"{len(files)}, {len(functions)}", "<= 22, 80")


def functions_met():
    """Return the functions of the project, each with its file, that one plain request calls."""
    engine, found = Engine(SimulatedModel(), 4), set()

    def note(frame, *_):
        name = frame.f_code.co_filename
        if "batcher" in Path(name).parts:
            found.add((name, frame.f_code.co_qualname))

    sys.setprofile(note)
    try:
        engine.add(Request(prompt=[5, 6, 7], max_tokens=5, stop_token=3))
        while engine.has_work:
            engine.step()
    finally:
        sys.setprofile(None)
    return found


def command(folder):
    """Measure `run` against the bare script, and what the trace and the live view cost."""
    source, target, trace = folder / "in.jsonl", folder / "out.jsonl", folder / "trace.jsonl"
    workload.write(source, 20_000)
    run = [*TOOL, "run", str(source), "-b", "64", "-o", str(target), "--quiet"]
    script = [sys.executable, str(HERE / "bare.py"), str(source), str(target), "64"]
    traced = [*run, "--trace", str(trace)]
    yield Row(
        "`run` file to file with a trace, 20,000 requests, B=64: speed against the bare script",
        f"{1 / median_ratio(clean(target, traced), clean(target, script)):.2f}x",
        ">= 1.3x",
    )
    cost = extra_cost(clean(target, traced), clean(target, run))
    yield Row("cost of the trace", f"{cost:+.1%}", "<= 5 %")
    run.remove("--quiet")
    cost = extra_cost(
        clean(target, [*run, "--live", "always"], on_terminal=True),
        clean(target, [*run, "--live", "never"], on_terminal=True),
    )
    yield Row("cost of the live view, 120x40", f"{cost:+.1%}", "<= 5 %")


def clean(target, argv, *, on_terminal=False):
    """Return a function that removes `target`, runs `argv` and returns its CPU seconds."""

    def measure():
        target.unlink(missing_ok=True)
        return (on_pty(argv) if on_terminal else child(argv)).cpu

    return measure


def on_pty(argv):
    """Run `argv` with a terminal of 120 columns and 40 lines as its stderr."""
    leader, follower = pty.openpty()
    fcntl.ioctl(follower, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 120, 0, 0))
    reader = threading.Thread(target=drain, args=(leader,), daemon=True)
    reader.start()
    os.environ["TERM"] = "xterm-256color"
    os.environ.pop("CI", None)
    usage = child(argv, stderr=follower)
    os.close(follower)
    reader.join(5)
    os.close(leader)
    return usage


def drain(descriptor):
    try:
        while os.read(descriptor, 65536):
            pass
    except OSError:
        pass  # how Linux reports that the other end of a terminal is closed


def million(folder):
    """Measure a pipe of a thousand, a hundred thousand and a million requests."""
    small = statistics.median(through_a_pipe(1_000).cpu - through_a_pipe(1).cpu for _ in range(9))
    start = statistics.median(through_a_pipe(1).cpu for _ in range(5))
    middle, large = through_a_pipe(100_000), through_a_pipe(1_000_000)
    each = (large.cpu - start) / 1_000_000
    yield Row(
        f"time per request, 1,000,000 ({each * 1e6:.0f} µs) against 1,000"
        f" ({small * 1e3:.0f} µs), start-up not counted",
        f"{each * 1000 / small:.2f}x",
        "<= 1.3x",
    )
    name = "peak memory of a million requests through a pipe"
    yield Row(name, f"{large.peak:.0f} MB", "<= 200 MB")
    name = "peak memory, 1,000,000 against 100,000 requests"
    yield Row(name, f"{large.peak / middle.peak:.2f}x", "<= 1.2x")


def through_a_pipe(count):
    """Pipe `count` requests into `run`."""
    reader, writer = os.pipe()

    def feed():
        with os.fdopen(writer, "w", buffering=1 << 16) as pipe:
            block = [json.dumps(row)[len('{"id": "req-0000000"') :] for row in workload.rows(1000)]
            for number in range(count):
                pipe.write(f'{{"id":"req-{number:07}"{block[number % 1000]}\n')

    pid = os.fork()
    if pid == 0:
        os.close(reader)
        feed()
        os._exit(0)
    os.close(writer)
    usage = child([*TOOL, "run", "-", "-b", "64", "--quiet"], stdin=reader)
    os.close(reader)
    os.waitpid(pid, 0)
    return usage


def startup(folder):
    """Measure what the shortest commands take beside numpy: the least and the median of twenty."""
    source = folder / "three.jsonl"
    workload.write(source, 3)
    commands = {
        "numpy": [sys.executable, "-c", "import numpy"],
        "run": [*TOOL, "run", str(source), "--quiet"],
        "version": [*TOOL, "--version"],
    }
    rounds = [{name: child(argv).cpu for name, argv in commands.items()} for _ in range(21)][1:]
    seconds = {name: [each[name] for each in rounds] for name in commands}
    for what, name, limit in (
        ("a run of three requests, `--quiet`", "run", 2.2),
        ("`--version`", "version", 0.8),
    ):
        least, median = (
            of(seconds[name]) / of(seconds["numpy"]) for of in (min, statistics.median)
        )
        title = f"{what} against `python -c 'import numpy'`, least and median of twenty"
        yield Row(title, f"{least:.2f}x, {median:.2f}x", f"<= {limit}x")


BENCHMARKS = {
    benchmark.__name__: benchmark
    for benchmark in (
        engine,
        paging,
        command,
        million,
        startup,
        models,
        simulation,
        fleets,
        serving,
    )
}


def main(names):
    """Print the table of the benchmarks named, or of all."""
    unknown = [name for name in names if name not in BENCHMARKS]
    if unknown:
        raise SystemExit(f"unknown benchmark {unknown[0]}, known: {', '.join(BENCHMARKS)}")
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # what is installed has its bytecode
    print("| what | measured | should be |\n|---|---|---|", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        for name in names or BENCHMARKS:
            for row in BENCHMARKS[name](Path(folder)):
                print(f"| {row.name} | {row.figure} | {row.target} |", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
