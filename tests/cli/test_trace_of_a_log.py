"""Logs of other engines, read as the trace of a run."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from process import batchdecode

from batcher.errors import BatchdecodeError
from batcher.events import AdmitEvent, ArriveEvent, FinishEvent, ReceiveEvent, RunEvent, StepsEvent
from batcher.planning.replay import read_requests
from batcher.trace.files import encode_events
from batcher.trace.logs import events_of_log, read_log
from batcher.trace.run import RequestFold
from batcher.trace.timeline import Timeline

MILLISECONDS = st.integers(0, 5000).map(lambda number: number / 1000)
ROWS = st.lists(
    st.tuples(MILLISECONDS, MILLISECONDS, MILLISECONDS, MILLISECONDS, st.integers(1, 20)),
    min_size=1,
    max_size=12,
)


def lines_of(*rows):
    return [(number, json.dumps(row).encode() + b"\n") for number, row in enumerate(rows, 1)]


def log_row(number, arrival, admitted, first, last, num):
    return {
        "request_id": f"r{number}",
        "input_toks": 3 + number,
        "output_toks": num,
        "queued_ts": arrival,
        "scheduled_ts": admitted,
        "first_token_ts": first,
        "last_token_ts": last if num > 1 else first,
    }


@given(ROWS, st.integers(1, 3))
def test_a_log_is_a_trace_of_the_same_times(rows, num_replicas):
    written = []
    for number, (arrival, queue, prefill, decode, num) in enumerate(rows):
        admitted = 100 + arrival + queue
        first = admitted + prefill + 0.001
        row = log_row(number, 100 + arrival, admitted, first, first + decode, num)
        written.append(row if num_replicas == 1 else row | {"replica": number % num_replicas})
    events = list(events_of_log(read_log(lines_of(*written), "log")))
    Timeline.from_events(iter(events)).check_integrity()
    lines = enumerate(encode_events(events).splitlines(), 1)
    begin = min(row["queued_ts"] for row in written)
    read = {each.request_id: each for each in read_requests(lines, "trace").requests}
    for row in written:
        same = read[row["request_id"]]
        assert (same.input_toks, same.output_toks) == (row["input_toks"], row["output_toks"])
        for field in ("queued_ts", "first_token_ts", "last_token_ts"):
            assert getattr(same, field) == pytest.approx(row[field] - begin, abs=1e-5)


@given(ROWS)
def test_a_request_holds_the_lowest_slot_that_is_free(rows):
    written = [
        log_row(
            n,
            arrival,
            arrival + queue,
            arrival + queue + 0.001,
            arrival + queue + 0.002 + decode,
            2,
        )
        for n, (arrival, queue, _, decode, _) in enumerate(rows)
    ]
    held = {}
    run, *events = events_of_log(read_log(lines_of(*written), "log"))
    assert isinstance(run, RunEvent)
    for event in events:
        if isinstance(event, AdmitEvent):
            assert event.slot == min({*range(run.batch)} - held.keys())
            held[event.slot] = event.id
        elif isinstance(event, FinishEvent):
            assert event.slot is not None
            assert held.pop(event.slot) == event.id
    assert not held


BENCH = {
    "model_id": "llama",
    "input_lens": [5, 6, 7],
    "output_lens": [4, 4, 0],
    "ttfts": [0.5, 0.25, 0.0],
    "itls": [[0.5, 0.25, 0.25], [1.0], []],
    "start_times": [10.0, 11.0, 12.0],
    "errors": ["", "", "refused"],
}


def test_the_result_of_a_benchmark_tells_when_each_chunk_came():
    log = read_log(lines_of(BENCH), "bench.json")
    events = list(events_of_log(log))
    timeline = Timeline.from_events(iter(events))
    timeline.check_integrity()
    ends = {event.step: end for event, end in _step_ends(events)}
    came = [(e.id, ends[e.step], e.tokens) for e in events if isinstance(e, ReceiveEvent)]
    assert came == [
        *[("0", 0.5, 1), ("0", 1.0, 1), ("0", 1.25, 1), ("1", 1.25, 2)],
        *[("0", 1.5, 1), ("1", 2.25, 2)],
    ]
    failed = next(e for e in events if isinstance(e, FinishEvent) and e.id == "2")
    assert (failed.reason, failed.slot) == ("error", None)
    assert failed.error is not None
    assert failed.error.message == "refused"


def test_a_benchmark_and_spans_are_replayed_as_well():
    run = read_requests(lines_of(BENCH), "bench.json")
    told = [(each.request_id, each.queued_ts, each.first_token_ts) for each in run.requests]
    assert told == [("0", 0.0, 0.5), ("1", 1.0, 1.25)]
    assert (run.batch, run.is_of_client) == (2, True)


def _step_ends(events):
    return [(event, event.ends[0]) for event in events if hasattr(event, "ends")]


def span(number, *, begin, end, **told):
    kinds = {int: "intValue", float: "doubleValue", str: "stringValue"}
    return {
        "name": "llm_request",
        "startTimeUnixNano": str(begin * 10**6),
        "endTimeUnixNano": str(end * 10**6),
        "attributes": [
            {
                "key": name.replace("__", "."),
                "value": {kinds[type(v)]: str(v) if type(v) is int else v},
            }
            for name, v in {"gen_ai__request__id": f"s{number}", **told}.items()
        ],
    }


def test_spans_of_requests_are_read_and_others_are_not():
    lengths = {"gen_ai__usage__prompt_tokens": 9, "gen_ai__usage__completion_tokens": 3}
    times = {"gen_ai__latency__time_in_queue": 0.5, "gen_ai__latency__time_to_first_token": 1.25}
    spans = [
        span(1, begin=1000, end=4000, **lengths, **times),
        span(2, begin=1500, end=2000, **lengths) | {"status": {"code": 2}},
        span(3, begin=0, end=9000),  # of an HTTP call around it, for example
    ]
    lines = lines_of({"resourceSpans": [{"scopeSpans": [{"spans": spans}]}]})
    events = list(events_of_log(read_log(lines, "spans.jsonl")))
    Timeline.from_events(iter(events)).check_integrity()
    arrive = [(e.id, e.time, e.prompt_tokens) for e in events if isinstance(e, ArriveEvent)]
    assert arrive == [("s1", 0.0, 9), ("s2", 0.5, 9)]
    [admit] = [e for e in events if isinstance(e, AdmitEvent)]
    assert admit.time == 0.5
    finished = [(e.id, e.reason, e.tokens) for e in events if isinstance(e, FinishEvent)]
    assert sorted(finished) == [("s1", "stop", 3), ("s2", "error", 0)]


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([b'{"request_id":"a","input_toks":1}\n'], "log:1: object missing required field"),
        ([b'{"input_lens":[1],"output_lens":[1],"ttfts":[0],"itls":[[]]}\n'], "`start_times`"),
        ([json.dumps(BENCH | {"ttfts": [1.0]}).encode()], "its lists have different lengths"),
        ([b'{"resourceSpans":[]}\n'], "log contains no requests"),
        ([b'{"input_toks":' + b"[" * 9999], "log:1: "),
        ([json.dumps(log_row(1, 0, 0, 0, 0, 1)).encode(), b"{"], "log:2: input data was truncated"),
    ],
)
def test_a_damaged_log_is_an_error_with_its_place(lines, message):
    with pytest.raises(BatchdecodeError) as caught:
        read_log(enumerate(lines, 1), "log")
    assert message in str(caught.value)


def test_trace_shows_a_log(tmp_path):
    log = tmp_path / "log.jsonl"
    rows = [log_row(n, n, n + 0.5, n + 1, n + 4, 8) for n in range(6)]
    log.write_text("".join(json.dumps(row) + "\n" for row in rows))
    shown = batchdecode("trace", log, "--format", "gantt")
    assert shown.returncode == 0
    assert b"4 slots" in shown.stdout
    assert "log.jsonl does not record which slot each request held" in shown.stderr
    summary = batchdecode("trace", log, "--format", "summary").stdout.decode()
    assert "6 ok" in summary
    assert "ttft p50 1 p99 1 s   tpot p50 429 p99 429 ms" in summary
    assert "itl" not in summary
    told = batchdecode("trace", "why", "r5", log)
    assert b"admitted to slot 1 at step" in told.stdout
    assert b"ended with step" in told.stdout
    refused = batchdecode("trace", log, "--batch", "3")
    assert (refused.returncode, refused.stdout) == (2, b"")
    assert "--batch needs requests, but" in refused.stderr


@pytest.mark.parametrize("workers", [(), ("--workers", "2")])
def test_the_summary_of_a_trace_is_that_of_its_run(workers, tmp_path):
    rows = [{"prompt": f"request {number}", "max_tokens": 3 + number} for number in range(7)]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = ["--batch", "2", *workers, "--trace", "t.jsonl"]
    told = ["--summary-json", "summary.json", "--output", "out.jsonl"]
    ran = batchdecode("run", "in.jsonl", *options, *told, cwd=tmp_path)
    assert ran.returncode == 0
    written = (tmp_path / "summary.json").read_bytes()
    read = batchdecode("trace", "t.jsonl", "--format", "summary-json", cwd=tmp_path)
    assert json.loads(read.stdout) == json.loads(written)
    for kind in ("summary", "summary-json", "summary"):  # each may replace the other
        again = batchdecode("trace", "t.jsonl", "--format", kind, "-o", "view", cwd=tmp_path)
        assert (again.returncode, again.stderr) == (0, "")
    refused = batchdecode("trace", "t.jsonl", "--format", "summary", "--steps", "1:", cwd=tmp_path)
    assert refused.stderr == "error: --steps does not work with --format summary\n"


def otlp(told_too=(), **fields):
    told = {"gen_ai.usage.prompt_tokens": {"intValue": "5"}}
    told |= {"gen_ai.usage.completion_tokens": {"intValue": "3"}} | dict(told_too)
    span = {"startTimeUnixNano": "1000000000", "endTimeUnixNano": "2000000000"}
    span |= {"attributes": [{"key": key, "value": value} for key, value in told.items()]} | fields
    return {"resourceSpans": [{"scopeSpans": [{"spans": [span]}]}]}


TTFT = "gen_ai.latency.time_to_first_token"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ({"resourceSpans": 5}, "resourceSpans"),
        ({"resourceSpans": [None]}, r"resourceSpans\[0\]"),
        ({"resourceSpans": None}, "contains no requests"),
        ({"resourceSpans": [{"scopeSpans": None}]}, "contains no requests"),
        (otlp(attributes=None), "contains no requests"),
        (otlp(attributes=[None]), r"attributes\[0\]"),
        (
            otlp({"gen_ai.usage.prompt_tokens": {"intValue": "-5"}}),
            "prompt_tokens: expected a whole number",
        ),
        (
            otlp({"gen_ai.usage.prompt_tokens": {"arrayValue": {}}}),
            "prompt_tokens: expected a whole number",
        ),
        (otlp({TTFT: {"doubleValue": "NaN"}}), "first_token: expected a number"),
        (otlp({TTFT: {"arrayValue": {"values": []}}}), "first_token: expected a number"),
        (otlp(startTimeUnixNano=None), "startTimeUnixNano: expected a whole number"),
        (otlp(endTimeUnixNano="9" * 400), "endTimeUnixNano: expected a whole number"),
        (otlp(status="bad"), "status"),
    ],
)
def test_spans_of_another_shape_are_complained_about(line, message):
    with pytest.raises(BatchdecodeError, match=message):
        read_log(lines_of(line), "spans")


@pytest.mark.parametrize(
    "line",
    [
        otlp(status=None),
        otlp({TTFT: {"doubleValue": None}, "x": None, "batchdecode.index": {"intValue": None}}),
        otlp({"gen_ai.usage.input_tokens": {"intValue": 5}}),
    ],
)
def test_spans_can_hold_nulls_and_both_names_of_an_attribute(line):
    (request,) = read_log(lines_of(line), "spans").requests
    num_tokens = sum(num for _, num in request.tokens)
    assert (request.num_prompt_tokens, num_tokens, request.error) == (5, 3, None)


def test_a_request_can_have_no_tokens():
    log = read_log(lines_of(log_row(1, 1.0, 1.5, 2.0, 3.0, 0) | {"last_token_ts": 3.0}), "log")
    Timeline.from_events(events_of_log(log)).check_integrity()


def test_two_requests_of_one_id_are_complained_about():
    with pytest.raises(BatchdecodeError, match="log:2: request_id 'r1' is already in line 1"):
        read_log(lines_of(*[log_row(1, 1.0, 1.5, 2.0, 3.0, 2)] * 2), "log")


def test_times_that_go_back_are_named_with_their_line():
    with pytest.raises(BatchdecodeError, match=r"log:1: first_token_ts 1.2 is before scheduled_ts"):
        read_log(lines_of(log_row(1, 1.0, 1.5, 1.2, 3.0, 2)), "log")


def test_many_requests_at_once_take_no_longer_than_their_tokens():
    num = 20_000
    rows = (log_row(n, 0.0, 0.0, 0.5 + n / num, 2.0 + n / num, 2) for n in range(num))
    events = list(events_of_log(read_log(lines_of(*rows), "log")))  # or else minutes
    assert sum(isinstance(event, FinishEvent) for event in events) == num


def test_a_step_of_a_server_is_taken_in_without_a_look_at_each_slot():
    rows = [log_row(n, 0.0, n / 100, 0.001 + n / 100, 99.0 + n, 2) for n in range(2)]
    fold = RequestFold()
    for event in events_of_log(read_log(lines_of(*rows), "log")):
        fold.take(event)
        if isinstance(event, ReceiveEvent):
            fold.slots = None  # type: ignore[assignment] - or else quadratic in the requests
            fold.take(StepsEvent(event.step, [1.0], [0], [0], [1], [0], [0], [0]))
            return
