"""Invariant 9: the trace alone reproduces the schedule and every number of the summary."""

from engine_runs import drained
from examples import examples
from hypothesis import given
from hypothesis import strategies as st
from made_events import metrics_of, read_trace
from msgspec.structs import replace
from reference import english_requests
from scheduling_settings import scheduling_settings, sharing

from batcher import Engine, SimulatedModel
from batcher.events import FinishEvent
from batcher.metrics.summary import RunMetrics
from batcher.trace.files import encode_events
from batcher.trace.run import RequestFold, TraceChecks
from batcher.trace.timeline import Timeline


def traced(requests, batch_size):
    """The results of a run, the lines of its trace, and the numbers counted while it ran."""
    engine, metrics = Engine(SimulatedModel(), batch_size), RunMetrics()
    run = engine.run_event()
    done = drained(engine, requests)
    events = [run, *done.events, engine.end_event()]
    metrics.observe(events)
    return done.results, [encode_events([event]) for event in events], metrics


@given(st.lists(english_requests(), max_size=12), st.sampled_from([1, 2, 3, 8, 64]))
@examples(60)
def test_schedule_and_numbers_from_the_trace(requests, batch_size):
    results, lines, metrics = traced(requests, batch_size)
    timeline = Timeline.from_events(read_trace(lines, "trace", TraceChecks().complaint))
    timeline.check_integrity()
    spans = {
        (span.index, span.slot, span.start, span.end - 1, span.outcome) for span in timeline.spans
    }
    assert spans == {
        (r.index, r.slot, r.steps.admitted, r.steps.finished, r.finish_reason)
        for r in results
        if r.slot is not None
    }
    again = metrics_of(read_trace(lines))
    assert again.summary() == metrics.summary()
    summary = again.summary()
    assert summary.generated_tokens == sum(len(result.tokens) for result in results)
    assert summary.requests == len(results)


@st.composite
def limited_runs(draw):
    """Requests, some with an empty prompt, with slots and limits to decode them in."""
    num_slots = draw(st.sampled_from([1, 2, 3, 8]))
    requests = draw(st.lists(sharing(english_requests()), min_size=1, max_size=9))
    settings = draw(scheduling_settings(num_slots, st.none(), 4))
    return (
        [replace(one, prompt="") if draw(st.integers(0, 3)) == 0 else one for one in requests],
        num_slots,
        settings,
    )


@given(limited_runs())
@examples(60)
def test_first_tokens_are_those_of_the_trace_under_limits(run):
    requests, num_slots, settings = run
    engine, fold = Engine(SimulatedModel(), num_slots, settings=settings), RequestFold()
    run_event = engine.run_event()
    done = drained(engine, requests)
    first_tokens = {}
    checks = TraceChecks()
    for event in [run_event, *done.events, engine.end_event()]:
        assert checks.complaint(event) is None
        found = fold.take(event)
        if isinstance(event, FinishEvent) and found is not None:
            told = [one.first_token for one in found.admissions if one.first_token is not None]
            first_tokens[event.id] = told[0] if told and event.tokens else None
    assert first_tokens == {result.id: result.steps.first_token for result in done.results}
