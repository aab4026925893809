import gzip
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from command_server import command_line
from reference_schedule import DESIGN_JOBS, jobs_of, play

from batcher.errors import BatchdecodeError
from batcher.trace.files import encode_events
from cli.commands.show import parse_steps, show_trace
from cli.commands.trace import TraceOptions

# The command leaves its files open to the end of the process, which here goes on.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")

DESIGN_TRACE = encode_events(play(DESIGN_JOBS, 2).events)
DESIGN_SPANS = [
    {"slot": 0, "id": "a", "index": 0, "start": 0, "end": 3, "outcome": "length"},
    {"slot": 1, "id": "b", "index": 0, "start": 0, "end": 1, "outcome": "length"},
    {"slot": 1, "id": "c", "index": 0, "start": 1, "end": 3, "outcome": "length"},
    {"slot": 0, "id": "d", "index": 0, "start": 3, "end": 7, "outcome": "length"},
]
DESIGN_REQUESTS = b"".join(
    json.dumps({"id": name, "prompt": "x", "max_tokens": length, "ignore_eos": True}).encode()
    + b"\n"
    for name, length, *_ in DESIGN_JOBS
)


@pytest.fixture
def design_trace(tmp_path):
    path = tmp_path / "run.trace.jsonl"
    path.write_bytes(DESIGN_TRACE)
    return path


@pytest.fixture
def shown(capfdbinary):

    def show(path, **options):
        show_trace(TraceOptions(input=str(path), **options))
        return capfdbinary.readouterr().out

    return show


def rows_of(output):
    return [json.loads(line) for line in output.splitlines()]


@pytest.mark.parametrize(
    ("view", "first_line"),
    [
        ("spans", b'{"slot":0,"id":"a","index":0,"start":0,"end":3,"outcome":"length"}'),
        ("steps", b'{"step":0,"slots":["a","b"],"waiting":2}'),
        ("csv", b"slot,id,index,start,end,outcome,role,jumped,dropped"),
        ("chrome", b'{"displayTimeUnit":"ms","traceEvents":['),
        ("gantt", "7 steps · 2 slots · 71% busy · 4 requests".encode()),
        (
            "svg",
            '<svg xmlns="http://www.w3.org/2000/svg" class="batchdecode-gantt" role="img" '
            'aria-label="7 steps · 2 slots · 71% busy · 4 requests" width="900" height="178" '
            'viewBox="0 0 900 178">'.encode(),
        ),
    ],
)
def test_each_format_goes_to_stdout_and_into_files(shown, design_trace, tmp_path, view, first_line):
    output = tmp_path / "view"
    assert shown(design_trace, format=view, output=str(output)) == b""
    assert output.read_bytes().splitlines()[0] == first_line
    packed = tmp_path / "view.gz"
    shown(design_trace, format=view, output=str(packed))
    assert gzip.decompress(packed.read_bytes()) == output.read_bytes()
    if view != "gantt":
        assert shown(design_trace, format=view) == output.read_bytes()


def test_steps_are_a_slice():
    slices = {"2:5": (2, 5), ":5": (None, 5), "-3:": (-3, None), "4": (4, 5), "-1": (-1, None)}
    assert {text: parse_steps(text) for text in slices} == slices
    for text in ("", "a", "1:2:3", "1.5:"):
        with pytest.raises(BatchdecodeError, match="expected A:B"):
            parse_steps(text)


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"steps": "7:"}, r"--steps 7: is out of range \(0-6\)"),
        ({"steps": "5:3"}, r"--steps 5:3 is out of range \(0-6\)"),
        ({"slot": (2,)}, r"--slot 2 is out of range \(0-1\)"),
        ({"slot": (-1,)}, r"--slot -1 is out of range \(0-1\)"),
        ({"request": ("zzz",)}, "--request zzz: no such request took a slot; known: "),
        ({"run_options": {"batch": 4}}, "--batch needs requests, but .* is a trace"),
        ({"format": "svg", "width": 319}, "--width 319: an svg is 320 to 8,000 pixels wide"),
        ({"format": "svg", "width": 8001}, "--width 8001: an svg is 320 to 8,000 pixels wide"),
    ],
)
def test_what_is_not_there_is_refused(shown, design_trace, options, complaint):
    with pytest.raises(BatchdecodeError, match=complaint):
        shown(design_trace, **options)


def test_a_packed_trace_is_read_as_far_as_it_goes_unless_it_is_damaged(shown, tmp_path):
    num_bytes = 3000
    packed = gzip.compress(encode_events(play(jobs_of(*[3] * 900), 4).events), 1)
    path = tmp_path / "run.trace.jsonl.gz"
    path.write_bytes(packed[:num_bytes])
    spans = rows_of(shown(path))
    assert [span["id"] for span in spans] == [f"r{number}" for number in range(len(spans))]
    assert num_bytes / 30 < len(spans) < 900
    path = tmp_path / "run.trace.jsonl.gz"
    path.write_bytes(gzip.compress(DESIGN_TRACE)[:-8] + bytes(8))
    with pytest.raises(BatchdecodeError, match="the compressed data is damaged"):
        shown(path)


def test_what_a_trace_contradicts_or_lacks_is_told_by_its_line(shown, tmp_path):
    path = tmp_path / "trace"
    first, *rest = DESIGN_TRACE.splitlines(keepends=True)
    path.write_bytes(first + b"\n\n" + b"{}\n" + b"".join(rest))
    with pytest.raises(BatchdecodeError, match="trace:4: not a line of a trace"):
        shown(path)
    path = tmp_path / "trace"
    path.write_bytes(DESIGN_TRACE.replace(b'"slot":1', b'"slot":0'))
    num_open = len([*Path("/dev/fd").iterdir()])
    with pytest.raises(BatchdecodeError) as refused:  # which keeps all that was open
        shown(path)
    assert re.search(r"its events contradict each other: .* slot 0", str(refused.value))
    assert len([*Path("/dev/fd").iterdir()]) == num_open


def command(*arguments, **options):
    line = [*command_line(), "trace", *arguments]
    return subprocess.run(line, capture_output=True, timeout=60, check=False, **options)


@pytest.mark.parametrize("data", [DESIGN_REQUESTS, DESIGN_TRACE])
def test_stdin_is_a_trace_or_requests(data):
    options = ["-b", "2"] if data == DESIGN_REQUESTS else []
    done = command("-", *options, input=data)
    assert (done.returncode, done.stderr) == (0, b"")
    assert rows_of(done.stdout) == DESIGN_SPANS


def test_a_fifo_is_read_once(tmp_path):
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    with subprocess.Popen(["sh", "-c", f"cat > {fifo}"], stdin=subprocess.PIPE) as writer:
        writer.stdin.write(DESIGN_REQUESTS)
        writer.stdin.close()
        assert rows_of(command(str(fifo), "-b2").stdout) == DESIGN_SPANS


def test_a_trace_needs_no_numpy(design_trace):
    script = (
        "import sys; from cli.commands.show import *; from cli.commands.trace import TraceOptions;"
        f"show_trace(TraceOptions(input={str(design_trace)!r}, format='gantt'));"
        "assert 'numpy' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", script], check=True, stdout=subprocess.DEVNULL)


def test_colours_go_to_a_terminal_and_where_they_are_asked_for(shown, design_trace, tmp_path):
    plain = shown(design_trace, format="gantt")
    assert b"\x1b" not in plain
    assert (
        re.sub(rb"\x1b\[[\d;]*m", b"", shown(design_trace, format="gantt", color="always")) == plain
    )
    for _ in range(2):
        shown(design_trace, format="gantt", color="always", output=str(tmp_path / "view"))
    assert b"\x1b[" in (tmp_path / "view").read_bytes()


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (
            b'{"id":"a","index":0,"text":"","tokens":[],"finish_reason":"length"}',
            "contains results: pass the trace of that run",
        ),
        (b'{"id":"x","custom_id":"a","response":{},"error":null}', "contains results"),
        (
            b'{"event":"token","step":0,"id":"a","index":0,"tokens":[5],"text":"x"}',
            "contains a stream: pass the trace of that run (--trace FILE), or its requests",
        ),
        (b'{"event":"arrive","step":0}', "the first line of the trace"),
        (b'{"name":"x","id":3}', "neither a trace nor requests: its first line has no prompt"),
        (b"Dear reader,", "neither a trace nor requests"),
    ],
)
def test_what_is_neither_trace_nor_requests_is_said_in_one_line(tmp_path, line, said):
    path = tmp_path / "something"
    path.write_bytes(b"".join([line, b"\n"]) * 60)
    done = command(str(path))
    stderr = done.stderr.decode()
    assert done.returncode == 2
    assert said in stderr
    assert stderr.count("\n") == 1
    assert "--keep-going" not in stderr


def test_bad_lines_of_requests_are_reported_or_shown_as_rejected(tmp_path):
    path = tmp_path / "requests.jsonl"
    path.write_bytes(b'{"id":"a","prompt":"x","max_tokens":2,"ignore_eos":true}\n{"prompt":}\n')
    done = command(str(path))
    assert done.returncode == 2
    assert b"error[invalid-json]" in done.stderr
    assert b"--keep-going to skip" in done.stderr
    done = command(str(path), "--format", "csv", "--keep-going")
    assert done.returncode == 0
    assert b"error[invalid-json]" in done.stderr
    assert done.stdout.splitlines()[1:] == [b"0,a,0,0,2,length,sample,0,false"]


def test_how_requests_are_run_comes_from_the_configuration(tmp_path, design_trace):
    path, settings = tmp_path / "requests.jsonl", tmp_path / "settings.yaml"
    path.write_bytes(b'{"prompt":"x","max_tokens":9}\n' * 3)
    settings.write_text("batch: 2\noutput: precious\nkeep-order: true\nsimulated:\n  eos_rate: 0\n")
    rows = command(str(path), "--format", "csv", "--config", str(settings)).stdout.splitlines()
    assert rows[1:] == [
        b"0,1,0,0,9,length,sample,0,false",
        b"1,2,0,0,9,length,sample,0,false",
        b"0,3,0,9,18,length,sample,0,false",
    ]
    rows = command(str(path), "--format", "csv", "--config", str(settings), "-b", "3").stdout
    assert rows.splitlines()[-1].startswith(b"2,3,0,0,9")
    done = command(str(design_trace), "--config", str(settings))
    assert done.returncode == 2
    assert b"--config needs requests" in done.stderr
    settings.write_text("width: 90\n")
    assert b"unknown setting width" in command(str(path), "--config", str(settings)).stderr
