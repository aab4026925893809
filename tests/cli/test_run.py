import json
import os
import subprocess
import threading
import time
from types import SimpleNamespace

import pytest
from process import batchdecode, lines_of, refused, results, start, workload, write

from batcher import Engine
from batcher.errors import InvariantError
from batcher.requests.lines import BadLine
from batcher.trace.files import encode_events
from cli.run import loop
from cli.run.loop import Loop
from cli.run.run import run, run_events
from cli.run.run_options import RunOptions
from cli.signals import StopSignals

DESIGN = lines_of(
    *[
        {"id": name, "prompt": "x", "max_tokens": length, "ignore_eos": True}
        for name, length in (("a", 3), ("b", 1), ("c", 2), ("d", 4))
    ]
)
BAD = lines_of(
    *workload(5),
    {"id": "r1", "prompt": "again"},
    "{",
    *[request | {"id": f"s{i}"} for i, request in enumerate(workload(5))],
)


def run_here(path, **options):
    with StopSignals() as stop:
        return run(RunOptions(input=[str(path)], quiet=True, **options), stop, "continue")


@pytest.fixture
def requests(tmp_path):
    return write(tmp_path / "requests.jsonl", lines_of(*workload(60)))


def test_events_of_a_run_are_those_of_its_trace(tmp_path, requests):
    trace = tmp_path / "trace"
    run_here(requests, batch=3, trace=str(trace), output=str(tmp_path / "out"))
    assert encode_events(run_events(RunOptions(input=[requests], batch=3))) == trace.read_bytes()


def test_a_pipe_gives_the_same_bytes_as_a_file(tmp_path):
    arrivals = lines_of(*workload(40, arrivals=lambda i: i // 3 * 5))
    path = write(tmp_path / "in", arrivals)
    of_file = batchdecode("run", path, "-q", "-b", 4, "--trace", "file.trace", cwd=tmp_path)
    of_pipe = batchdecode(
        "run", "-q", "-b", 4, "--trace", "pipe.trace", cwd=tmp_path, stdin=arrivals
    )
    assert of_pipe.stdout == of_file.stdout
    assert (tmp_path / "pipe.trace").read_bytes() == (tmp_path / "file.trace").read_bytes()
    assert len(results(of_file.stdout)) == 40


SAMPLES = lines_of(
    {"id": "late", "prompt": "x", "max_tokens": 1, "arrival_time": 2},
    {"id": "n", "prompt": "x", "n": 5, "temperature": 1.0, "max_tokens": 9},
    "nonsense",
    {"id": "beams", "prompt": "x", "n": 2, "num_beams": 2, "max_tokens": 4},
    {"id": "best", "prompt": "x", "n": 2, "best_of": 4, "temperature": 1.0},
    {"id": "a", "prompt": "x"},
)


def test_in_the_order_of_the_input_the_results_of_a_request_stand_together(tmp_path):
    path, out, ordered = write(tmp_path / "in", SAMPLES), tmp_path / "out", tmp_path / "ordered"
    for output, keep_order in ((out, False), (ordered, True)):
        run_here(path, output=str(output), batch=3, keep_going=True, keep_order=keep_order)
    rows = results(ordered.read_bytes())
    ids = ["late", "n", "3", "beams", "best", "a"]
    assert [row["id"] for row in rows] == sorted((row["id"] for row in rows), key=ids.index)
    for name, num_results in (("n", 5), ("beams", 2), ("best", 2)):
        indexes = [row["index"] for row in rows if row["id"] == name]
        assert len(set(indexes)) == num_results
        assert indexes == sorted(indexes)
    assert sorted(ordered.read_bytes().splitlines()) == sorted(out.read_bytes().splitlines())


@pytest.mark.parametrize(
    ("fields", "code"), [({"regex": "(("}, "invalid-grammar"), ({"num_beams": 4}, "too-few-slots")]
)
def test_what_no_step_can_do_is_found_before_the_first(tmp_path, fields, code):
    path = write(tmp_path / "in", lines_of({"prompt": "x"}, {"prompt": "x", **fields}))
    for command in ("run", "check"):
        done = batchdecode(command, path, "-b", 3)
        assert done.returncode == 2
        assert f"error[{code}]" in done.stderr
        assert "1 invalid of 2 lines" in done.stderr


def test_a_bad_file_is_refused_and_nothing_is_touched(tmp_path):
    path = write(tmp_path / "in.jsonl", BAD)
    out = tmp_path / "out"
    out.write_text("precious")
    done = batchdecode("run", path, "-o", out, "--force")
    assert done.returncode == 2
    assert done.stdout == b""
    assert "in.jsonl:6:8" in done.stderr
    assert "in.jsonl:7:2" in done.stderr
    last = "error: 2 invalid of 12 lines; nothing decoded. --keep-going to skip them.\n"
    assert done.stderr.endswith(last)
    assert out.read_text() == "precious"


def test_keep_going_makes_bad_lines_results(tmp_path):
    path, trace = write(tmp_path / "in", BAD), tmp_path / "trace"
    done = batchdecode("run", path, "--keep-going", "--trace", trace, "-q")
    assert done.returncode == 1
    rows = {(row["id"], "error" in row): row for row in results(done.stdout)}
    assert len(rows) == 12
    assert rows["r1", True]["error"] | {"message": ""} == {
        "code": "duplicate-id",
        "message": "",
        "line": 6,
        "column": 8,
        "field": "id",
    }
    assert rows["7", True]["error"]["code"] == "invalid-json"
    rejected = [e for e in results(trace.read_bytes()) if e["event"] == "reject"]
    assert [(e["id"], e["index"], e["reason"]) for e in rejected] == [
        ("r1", 0, "duplicate-id"),
        ("7", 0, "invalid-json"),
    ]
    piped = batchdecode("run", "--keep-going", "-q", stdin=BAD)
    assert (piped.returncode, piped.stdout) == (1, done.stdout)


def test_a_bad_line_of_a_pipe_ends_the_reading_and_the_rest_is_drained():
    done = batchdecode("run", "-b", 2, stdin=BAD)
    assert done.returncode == 2
    assert {row["id"] for row in results(done.stdout)} == {"r0", "r1", "r2", "r3", "r4"}
    assert "<stdin>:6:8" in done.stderr
    assert "<stdin>:7" not in done.stderr
    assert "1 invalid of 6 lines; reading stopped there" in done.stderr


ROW = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "x"}}


@pytest.mark.parametrize("command", ["run --workers 1", "run --keep-going", "check"])
def test_what_a_run_has_written_is_refused_as_requests_in_one_line(tmp_path, command):
    for name, first in (("rows", ROW), ("results", {"prompt": "x"})):
        files = ["-o", name, "--trace", "trace"]
        batchdecode("run", "-q", *files, cwd=tmp_path, stdin=lines_of(first, *workload(5)))
    for name, what in (("rows", "results"), ("results", "results"), ("trace", "trace")):
        assert refused(*command.split(), name, cwd=tmp_path) == (
            f"error: {name} contains the {what} of a run, not requests: "
            "pass the original requests file\n"
        )
    piped = batchdecode("check", stdin=(tmp_path / "rows").read_bytes())
    assert "<stdin> contains the results of a run" in piped.stderr


def test_max_errors_ends_the_reading_and_the_rest_is_drained(tmp_path):
    path = write(tmp_path / "in", BAD)
    done = batchdecode("run", path, "--max-errors", 2, "-b", 1)
    assert done.returncode == 1
    assert [row["id"] for row in results(done.stdout)] == ["r0", "r1", "r2", "r3", "r4", "r1", "7"]
    assert "stopped after 2 failed requests; 7 results went to stdout" in done.stderr
    assert "5 ok  2 failed  5 not begun   " in done.stderr


def test_a_byte_order_mark_is_accepted_with_one_warning(tmp_path):
    path = write(tmp_path / "in", b"\xef\xbb\xbf" + DESIGN.replace(b"\n", b"\r\n"))
    done = batchdecode("run", path, "-q")
    assert done.returncode == 0
    assert len(results(done.stdout)) == 4
    assert done.stderr.count("byte order mark") == 1


def feed(path, chunks, delay):
    def write_all():
        with path.open("wb", buffering=0) as fifo:
            for chunk in chunks:
                fifo.write(chunk)
                time.sleep(delay)

    thread = threading.Thread(target=write_all)
    thread.start()
    return thread


def test_following_a_slow_fifo_does_not_wait_for_it(tmp_path):
    fifo, trace = tmp_path / "fifo", tmp_path / "trace"
    os.mkfifo(fifo)
    thread = feed(fifo, DESIGN.splitlines(keepends=True), 0.1)
    done = batchdecode("run", fifo, "-q", "-b", 2, "--follow", "--trace", trace)
    thread.join()
    assert done.returncode == 0
    rows = results(done.stdout)
    assert [row["id"] for row in rows] == ["a", "b", "c", "d"]
    arrivals = [e for e in results(trace.read_bytes()) if e["event"] == "arrive"]
    assert {e["reason"] for e in arrivals} == {"follow"}
    assert [e["time"] for e in arrivals] == [0, 3, 4, 6]


def test_an_interrupted_follower_ends_at_once():
    process = start("run", "--follow", stdin=subprocess.PIPE)
    process.stdin.write(DESIGN)
    process.stdin.flush()
    assert len([process.stdout.readline() for _ in range(4)]) == 4
    process.terminate()
    assert process.wait(timeout=5) == 143
    process.communicate()


def test_a_run_that_cannot_go_on_is_an_error(tmp_path, monkeypatch):
    path = write(tmp_path / "requests.jsonl", lines_of(*workload(2)))
    monkeypatch.setattr(Engine, "wants_request", False)
    with pytest.raises(InvariantError, match="idle"):
        run_here(path, output=str(tmp_path / "results.jsonl"))


DEFAULTS = {"max_tokens": 30, "temperature": 0.8, "top_p": 0.9, "seed": 5}
AS_OPTIONS = ["--max-tokens", 30, "--temperature", 0.8, "--top-p", 0.9, "--seed", 5]


@pytest.mark.parametrize("command", ["run -q", "check", "plan --slo e2e=90", "trace"])
def test_defaults_of_a_run_mean_what_the_fields_of_rows_mean(tmp_path, command):
    rows = [
        {"id": "text", "prompt": "Say it", "ignore_eos": True},
        {"id": "own", "prompt": "Say it", "max_tokens": 4, "temperature": 0, "seed": 9},
        {"id": "chat", "messages": [{"role": "user", "content": "Say it"}]},
    ]
    (tmp_path / "bare").write_bytes(lines_of(*rows))
    (tmp_path / "whole").write_bytes(lines_of(*(DEFAULTS | row for row in rows)))
    outputs = [
        batchdecode(*command.split(), name, *options, cwd=tmp_path).stdout.replace(
            name.encode(), b"in"
        )
        for name, options in (("bare", AS_OPTIONS), ("whole", []))
    ]
    assert outputs[0]
    assert outputs[0] == outputs[1]


CUT = "the default limit cut 3 of 3 outputs: set max_tokens or --max-tokens"
NO_KV = "kv-too-small, for example request 1: "


@pytest.mark.parametrize(
    ("rows", "options", "hint"),
    [
        ([{}] * 3, "", CUT),
        ([{}] + [{"max_tokens": 3}] * 9, "", None),
        ([{}] * 2 + [{"max_tokens": 3}] * 9, "", "2 of 11 outputs"),
        ([{"max_tokens": 16}] * 3, "", None),
        ([{}] * 3, "--max-tokens 16", None),
        ([{"stop": "e"}] * 3, "", None),
        ([{"max_tokens": 99}] * 2 + [{}], "--kv-blocks 2", f"2 of 3 outputs failed with {NO_KV}"),
        ([{"max_tokens": 99}] * 2, "--kv-blocks 2 -q", None),
        ([{"max_tokens": 99}] + [{"max_tokens": 9}] * 2, "--kv-blocks 2", None),
        ([{}, {"n": -1}, {"n": -2}], "--keep-going", "invalid-value, for example request 2"),
        ([{"max_tokens": 9}] * 9, "-b 32", "of the 32 slots were empty: use a smaller --batch for"),
        ([{"max_tokens": 9}], "", None),
        ([{"max_tokens": 9, "num_beams": 5}] * 4, "-b 32", None),
        ([{}] * 9, "-b 32", "limit cut 9 of 9 outputs"),
    ],
    ids=str,
)
def test_a_run_ends_with_one_line_of_advice(tmp_path, rows, options, hint):
    lines = lines_of(*({"prompt": "Say it", "ignore_eos": True} | row for row in rows))
    trace = ["--trace", "run.trace.jsonl"]
    done = batchdecode("run", *options.split(), *trace, cwd=tmp_path, stdin=lines)
    assert done.stderr.count("hint: ") == (hint is not None)
    assert (hint or "") in done.stderr.splitlines()[-1]
    assert done.stderr.count("it needs up to") == ("kv" in options)  # in the advice, or alone
    if "-q" not in options:
        shown = batchdecode("trace", trace[1], "--format", "summary", cwd=tmp_path).stdout.decode()
        assert [line for line in shown.splitlines() if line.startswith("hint: ")] == [
            line for line in done.stderr.splitlines() if line.startswith("hint: ")
        ]


def test_bad_lines_are_handed_out_before_too_many_wait():
    num_lines = 3 * loop.MAX_HELD + 5
    lines = iter([BadLine("x", [SimpleNamespace(code="no", line=i)]) for i in range(num_lines)])
    source = SimpleNamespace(
        has_ended=True, input_index=0, next=lambda: next(lines, None), took=bool
    )
    engine = SimpleNamespace(
        now=0.0, num_steps=0, wants_request=True, num_pending=0, has_work=False
    )
    answers = SimpleNamespace(reject=lambda line, index: [])
    outcomes = [*Loop(engine, source, answers, keep_going=True)]
    assert [len(outcome.events) for outcome in outcomes] == [*[loop.MAX_HELD] * 3, 5]


LATE = [("a", 5, 0), ("z", 0, 2), ("b", 1, 3)]  # ids, lengths and arrivals
IN_TURN = [("a", 3, 0), ("b", 2, 0), ("y", 0, 0), ("c", 2, 0), ("z", 0, 1), ("d", 1, 9)]
ENDS = [("a", 2), ("y", 3), ("b", 4), ("z", 5), ("c", 6), ("d", 7)]


@pytest.mark.parametrize(
    ("policy", "requests", "ends"),
    [
        ("fcfs", LATE, [("z", 2), ("a", 4), ("b", 5)]),
        ("sjf", LATE, [("z", 2), ("a", 4), ("b", 5)]),
        ("fcfs", IN_TURN, ENDS),
    ],
)
def test_what_needs_no_slot_ends_at_its_arrival_or_in_its_turn(tmp_path, policy, requests, ends):
    rows = [
        {"id": name, "prompt": "x", "max_tokens": n, "arrival_time": at, "ignore_eos": True}
        for name, n, at in requests
    ]
    command, data = ["run", "-q", "-b", "1", "--policy", policy], lines_of(*rows)
    path = write(tmp_path / "in.jsonl", data)
    piped, filed = batchdecode(*command, stdin=data), batchdecode(*command, path)
    assert piped.stdout == filed.stdout
    assert [(row["id"], row["steps"]["finished"]) for row in results(filed.stdout)] == ends


def test_what_was_read_ahead_is_not_complete_when_the_run_gives_up(tmp_path):
    data = lines_of({"id": "a"}, {"id": "b", "prompt": "x"})
    done = batchdecode("run", "-q", "--max-errors", "1", cwd=tmp_path, stdin=data)
    assert [json.loads(line)["id"] for line in done.stdout.splitlines()] == ["a"]
    assert done.returncode == 1
