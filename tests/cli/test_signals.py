import csv
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import pytest
from command_terminal import CommandTerminal
from examples import mostly_heavy
from page_reader import parts_of, shown_spans, spans_of
from process import COMMAND, ENVIRONMENT, ROOT, batchdecode, lines_of, start, wait_for, workload

from cli.signals import STEPPING_ASIDE, STOPPING, Interrupted, StopSignals

LONG = lines_of(*workload(2000, max_tokens=100))


def send(number):
    os.kill(os.getpid(), number)


def test_the_second_signal_aborts():
    with StopSignals() as stop:
        send(signal.SIGTERM)
        with pytest.raises(KeyboardInterrupt):
            send(signal.SIGINT)
        assert stop.exit_status == 143


def test_a_second_signal_that_comes_as_the_command_ends_gives_the_status_of_the_first():
    script = """
import os
from cli import main, signals

end = signals.StopSignals.__exit__

def interrupted(stop, *error):
    try:
        for _ in range(2):
            os.kill(os.getpid(), 15)
    finally:
        end(stop, *error)

signals.StopSignals.__exit__ = interrupted
main.main()
"""
    command = [sys.executable, "-c", script, "run", "-q"]
    request = lines_of({"prompt": "a"})
    done = subprocess.run(command, input=request, capture_output=True, check=False)
    assert (done.returncode, done.stderr) == (143, b"")


@pytest.mark.parametrize("is_early", [True, False])
def test_a_signal_breaks_off_what_waits(is_early):
    with StopSignals() as stop:
        if is_early:
            send(signal.SIGINT)
        else:
            threading.Timer(0.05, send, [signal.SIGINT]).start()
        began = time.monotonic()
        with pytest.raises(Interrupted), stop.waiting():
            time.sleep(10)
        assert time.monotonic() - began < 5


def test_what_nohup_ignores_stays_ignored():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with StopSignals() as stop:
            send(signal.SIGHUP)
            assert stop.received is None
    finally:
        signal.signal(signal.SIGHUP, before)


def test_the_handlers_of_before_come_back():
    numbers = (*STOPPING, *STEPPING_ASIDE, signal.SIGPIPE)
    before = [signal.getsignal(number) for number in numbers]
    with StopSignals():
        assert signal.getsignal(signal.SIGPIPE) == signal.SIG_IGN
    assert [signal.getsignal(number) for number in numbers] == before


@pytest.mark.parametrize("module", ["msgspec", "typer"])
def test_ctrl_c_during_imports_ends_the_command_without_a_word(tmp_path, module):
    text = "import os, signal\nos.kill(os.getpid(), signal.SIGINT)\n"
    (tmp_path / f"{module}.py").write_text(text)
    environment = ENVIRONMENT | {"PYTHONPATH": f"{tmp_path}:{ROOT}"}
    done = subprocess.run([*COMMAND, "run"], env=environment, capture_output=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (-signal.SIGINT, b"", b"")


def test_a_stopped_run_leaves_whole_lines_and_says_how_to_go_on(tmp_path):
    (tmp_path / "in put.jsonl").write_bytes(LONG)
    arguments = ["run", "in put.jsonl", "-o", "out", "--trace", "trace", "--step-delay", "0.01"]
    files = ["--report", "report", "--timeseries", "series", "--timeseries-interval", "1"]
    process = start(*arguments, *files, cwd=tmp_path)
    wait_for(lambda: (tmp_path / "out").exists() and (tmp_path / "out").stat().st_size)
    process.send_signal(signal.SIGTERM)
    stderr = process.communicate(timeout=10)[1].decode()
    assert process.returncode == 143
    assert "stopped by SIGTERM" in stderr
    assert (
        "continue with: batchdecode run 'in put.jsonl' -o out --trace trace "
        f"--step-delay 0.01 {' '.join(files)} --resume" in stderr
    )
    results = [json.loads(line) for line in (tmp_path / "out").read_bytes().splitlines()]
    assert f"{len(results)} result" in stderr
    events = [json.loads(line) for line in (tmp_path / "trace").read_bytes().splitlines()]
    assert sum(event["event"] == "finish" for event in events) == len(results)
    assert events[-1]["event"] != "end"
    spans = batchdecode("trace", "trace", "--format", "spans", cwd=tmp_path).stdout
    _, [shown] = parts_of((tmp_path / "report").read_bytes())
    assert spans_of(shown) == shown_spans(spans.splitlines()) != []
    rows = list(csv.DictReader((tmp_path / "series").read_text().splitlines()))
    assert sum(int(row["steps"]) for row in rows) == len(rows) > 0


def test_a_stopped_stream_says_how_many_events_there_are(tmp_path):
    (tmp_path / "in").write_bytes(lines_of(*workload(3, max_tokens=900)))
    process = start("run", "in", "--stream", "-o", "out", "--step-delay", "0.01", cwd=tmp_path)
    wait_for(lambda: (tmp_path / "out").exists() and (tmp_path / "out").stat().st_size)
    process.send_signal(signal.SIGINT)
    stderr = process.communicate(timeout=10)[1].decode()
    lines = [json.loads(line) for line in (tmp_path / "out").read_bytes().splitlines()]
    num_events = sum("event" in line for line in lines)
    results = f"{len(lines) - num_events} result"
    assert num_events > 0
    assert f"stopped by SIGINT; {results}" in stderr
    assert f" and {num_events} token event" in stderr
    assert " went to out" in stderr


def test_ctrl_z_leaves_the_terminal_as_it_was_and_the_run_goes_on(tmp_path):
    (tmp_path / "in").write_bytes(lines_of(*workload(3, max_tokens=30)))
    arguments = ["run", "in", "-b", "2", "--live", "always", "--step-delay", "0.05"]
    pipes = {"is_job": True, "stdout": subprocess.PIPE}
    with CommandTerminal(*arguments, folder=tmp_path, **pipes) as terminal:
        terminal.see("decode")
        assert terminal.screen.is_alternate
        for _ in range(2):
            terminal.process.send_signal(signal.SIGTSTP)
            assert os.WIFSTOPPED(os.waitpid(terminal.process.pid, os.WUNTRACED)[1])
            while terminal.read():
                pass
            assert not terminal.screen.is_alternate
            assert not terminal.screen.text()
            terminal.process.send_signal(signal.SIGCONT)
        assert terminal.ended() == 0
        assert len(terminal.process.communicate()[0].splitlines()) == 3


def test_a_signal_leaves_the_terminal_in_order(tmp_path):
    (tmp_path / "in").write_bytes(lines_of(*workload(9, max_tokens=900)))
    arguments = ["run", "in", "-o", "out", "-b", "2", "--live", "always", "--step-delay", "0.02"]
    with CommandTerminal(*arguments, folder=tmp_path, stdout=subprocess.DEVNULL) as terminal:
        terminal.see("decode")
        terminal.process.send_signal(signal.SIGINT)
        assert terminal.ended() == 130
        assert not terminal.screen.is_alternate
        assert not terminal.screen.emulator.cursor.hidden
        lines = terminal.screen.lines()
        assert re.search(r"^\d+ steps · 2 slots · .* still running", lines[0])
        terminal.see("continue with: batchdecode run in")


def wait_for_handler(process):
    status = Path(f"/proc/{process.pid}/status")
    while not int(status.read_text().partition("SigCgt:")[2].split()[0], 16) >> 14 & 1:
        time.sleep(0.01)


def test_a_run_that_waits_for_its_fifo_to_open_stops_at_once(tmp_path):
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    process = start("run", fifo)
    wait_for_handler(process)
    time.sleep(0.1)  # by then it waits, most often
    process.terminate()
    assert process.wait(timeout=5) == 143
    assert process.communicate() == (b"", b"")


def test_a_run_that_waits_for_its_pipe_has_shown_all_and_stops_at_once(tmp_path):
    trace = tmp_path / "trace"
    process = start("run", "-b", "2", "--keep-order", "--trace", trace, stdin=subprocess.PIPE)
    short, *others = workload(3, max_tokens=100)
    long, waiting = (request | {"max_tokens": 50} for request in others)
    process.stdin.write(lines_of(long, short, waiting))  # the third fills the slot of the second
    process.stdin.flush()
    wait_for(lambda: trace.exists() and b'"finish"' in trace.read_bytes())
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=5) == 130
    stdout, stderr = process.communicate()
    assert b"--resume" not in stderr
    assert [json.loads(line)["id"] for line in stdout.splitlines()] == ["r0"]


def full_pipe(path=None):
    """Return both ends of a pipe, or of a FIFO, that takes no more."""
    if path is None:
        reader, writer = os.pipe()
    else:
        os.mkfifo(path)
        reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        writer = os.open(path, os.O_WRONLY)
    os.set_blocking(writer, False)
    with suppress(BlockingIOError):
        while os.write(writer, b"x" * 4096):
            pass
    os.set_blocking(writer, True)
    return reader, writer


BLOCKED = {  # fifo: nobody has opened it; stalled: nobody reads it
    "results to stdout": ["-q"],
    "a trace to a fifo": ["-q", "-o", "out", "--trace", "fifo"],
    "a trace": ["-q", "-o", "out", "--trace", "stalled"],
    "a trace of workers": ["-q", "-o", "out", "--trace", "stalled", "--workers", "2"],
    "a report": ["-q", "-o", "out", "--report", "fifo"],
    "messages": ["-o", "out", "--step-delay", "0.001", "--live", "never"],
    "a picture": ["-o", "out", "--step-delay", "0.001", "--live", "always"],
}
QUICK = ("results to stdout", "a trace to a fifo")


@pytest.mark.parametrize("what", mostly_heavy(BLOCKED, *QUICK))
def test_the_first_signal_ends_a_run_whose_output_is_blocked(tmp_path, what):
    number = signal.SIGINT if what == "results to stdout" else signal.SIGTERM
    requests = workload(400, max_tokens=100)
    (tmp_path / "in").write_bytes(lines_of(*requests))
    batchdecode("--version")  # what runs the others has started now
    os.mkfifo(tmp_path / "fifo")
    reader, writer = full_pipe()
    stalled = full_pipe(tmp_path / "stalled")
    more = BLOCKED[what]
    has_stderr = "-q" in more
    process = start(
        *["run", "in", *(["--keep-order"] if "out" in more else []), *more],
        cwd=tmp_path,
        **({} if has_stderr else {"stderr": writer}),
    )
    wait_for_handler(process)
    time.sleep(4 if "workers" in what else 0.4)
    assert process.poll() is None
    began = time.monotonic()
    process.send_signal(number)
    assert process.wait(timeout=10) == 128 + number
    assert time.monotonic() - began < 1.5  # a second, on a machine that is not busy
    stderr = process.stderr.read().decode() if has_stderr else ""
    for descriptor in (*stalled, reader, writer):
        os.close(descriptor)
    lines = process.communicate()[0].splitlines(keepends=True)
    if what == "results to stdout":
        assert [json.loads(line)["finish_reason"] for line in lines] == ["length"] * len(lines)
        assert lines[-1].endswith(b"\n")
    assert (f"stopped by {number.name}" in stderr) == has_stderr
    if "out" in more and has_stderr:
        assert "continue with: batchdecode run in" in stderr
    if "out" in more:  # nothing is lost
        resumed = ["run", "in", "-q", "--keep-order", "-o", "out", "--resume"]
        resumed += ["--workers", "2"] if "workers" in what else []
        assert batchdecode(*resumed, cwd=tmp_path).returncode == 0
        results = (tmp_path / "out").read_bytes()
        alone = batchdecode("run", "in", "-q", "--keep-order", cwd=tmp_path).stdout
        if "workers" not in what:  # whose slots are others
            assert results == alone
        assert len(results.splitlines()) == len(requests)
