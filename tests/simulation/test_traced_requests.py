"""The requests of a trace are those of a log of the same run."""

import engine_runs
import pytest
from made_events import metrics_of

from batcher import Engine, Request
from batcher.errors import BatchdecodeError
from batcher.models.simulated import SimulatedModel
from batcher.planning.replay import read_requests
from batcher.timing.step_time import ConstantStepTime
from batcher.trace.files import encode_events


def traced(requests, **options):
    """The lines of the trace of a run, numbered, and its events."""
    events = engine_runs.traced(Engine(SimulatedModel(), 2, **options), requests)
    return [*enumerate(encode_events(events).splitlines(keepends=True), 1)], events


REQUESTS = [
    Request(prompt=[5] * (3 + number), max_tokens=1 + number, ignore_eos=True, arrival_time=number)
    for number in range(6)
]


def test_the_times_are_those_of_the_metrics():
    lines, events = traced(REQUESTS, step_time=ConstantStepTime(0.4))
    found = read_requests(lines, "t")
    latencies = metrics_of(events).summary().latencies
    assert found.batch == 2
    assert [each.request_id for each in found.requests] == list("123456")
    assert [each.input_toks for each in found.requests] == [3, 4, 5, 6, 7, 8]
    assert [each.output_toks for each in found.requests] == [1, 2, 3, 4, 5, 6]
    ttfts = [each.first_token_ts - each.queued_ts for each in found.requests]
    e2es = [each.last_token_ts - each.queued_ts for each in found.requests]
    assert sum(ttfts) / 6 == pytest.approx(latencies.ttft.mean, abs=1e-6)
    assert sum(e2es) / 6 == pytest.approx(latencies.e2e.mean, abs=1e-6)


def test_what_failed_is_left_out_and_samples_are_told_apart():
    both = Request(prompt=[5], max_tokens=3, n=2, temperature=1.0, ignore_eos=True, id="a")
    lines, _ = traced(
        [both, Request(prompt=[5], max_tokens=0, id="none")], step_time=ConstantStepTime(0.4)
    )
    assert {each.request_id for each in read_requests(lines, "t").requests} == {"a", "a#1"}


def test_a_trace_without_times_or_an_end_is_refused():
    untimed, timed = traced(REQUESTS)[0], traced(REQUESTS, step_time=ConstantStepTime(0.4))[0]
    for lines, why in ((untimed, "its steps have no times"), (timed[:1], "no request finished")):
        with pytest.raises(BatchdecodeError, match=why):
            read_requests(lines, "t")


def test_a_trace_that_no_run_can_have_written_is_refused():
    lines, _ = traced(REQUESTS, step_time=ConstantStepTime(0.4))
    number = next(n for n, text in lines if b'"event":"finish"' in text)
    lines[number - 1] = (number, lines[number - 1][1].replace(b'"tokens":1', b'"tokens":1000'))
    lines = [(1, lines[0][1]), *((n + 1, text) for n, text in lines[1:])]  # behind a blank line
    with pytest.raises(
        BatchdecodeError, match=rf"^t:{number + 1}: '1' ends with 1,000 tokens, and"
    ):
        read_requests(lines, "t")
