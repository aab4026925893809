"""Invariant 9: the trace alone reproduces the schedule and every number of the summary."""

from examples import examples
from hypothesis import given
from hypothesis import strategies as st
from reference import english_requests

from batcher import Engine, Request, Result, SimulatedModel
from batcher.formats.trace import encode_events, read_trace
from batcher.metrics.run_metrics import RunMetrics
from batcher.timeline import Timeline


def traced(
    requests: list[Request], batch_size: int
) -> tuple[list[Result], list[bytes], RunMetrics]:
    """The results of a run, the lines of its trace, and the numbers counted while it ran."""
    engine, metrics, results = Engine(SimulatedModel(), batch_size), RunMetrics(), []
    events = [engine.run_event()]
    for request in requests:
        engine.add(request)
    while engine.has_work:
        outcome = engine.step()
        events += outcome.events
        results += outcome.results
    events.append(engine.end_event())
    metrics.observe(events)
    return results, [encode_events([event]) for event in events], metrics


@given(st.lists(english_requests(), max_size=12), st.sampled_from([1, 2, 3, 8, 64]))
@examples(60)
def test_schedule_and_numbers_from_the_trace(requests: list[Request], batch_size: int) -> None:
    results, lines, metrics = traced(requests, batch_size)
    timeline = Timeline.from_events(read_trace(lines))
    timeline.check_integrity()
    spans = {
        (span.index, span.slot, span.start, span.end - 1, span.outcome) for span in timeline.spans
    }
    assert spans == {
        (r.index, r.slot, r.steps.admitted, r.steps.finished, r.finish_reason)
        for r in results
        if r.slot is not None
    }
    again = RunMetrics()
    again.observe(read_trace(lines))
    assert again.summary() == metrics.summary()
    summary = again.summary()
    assert summary.generated_tokens == sum(len(result.tokens) for result in results)
    assert summary.requests == len(results)
