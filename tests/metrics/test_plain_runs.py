"""A plain run tells of no steps: each lasts 1.0.  Told of, they give the same numbers."""

import tracemalloc

import msgspec
import pytest
from examples import examples
from hypothesis import given
from hypothesis import strategies as st
from made_events import metrics_of
from reference_schedule import Job, jobs_of, play, workloads
from test_timed_numbers import series_of

from batcher.errors import BatchdecodeError
from batcher.events import AdmitEvent, ArriveEvent, EndEvent, FinishEvent, RunEvent, StepsEvent
from batcher.metrics import times
from batcher.metrics.slo import Slo
from batcher.metrics.summary import RunMetrics
from batcher.metrics.times import StepFeed, TimeSeries
from batcher.trace.run import RequestFold

SLO = Slo({"ttft": 3.0, "e2e": 6.0})


def summary_of(events, slo=None, num_steps=0):
    return metrics_of(events, slo).summary(num_steps)


def told(played, batch):
    """The events of a plain run, as one that tells of its steps would write them."""
    run, *events, end = played.events
    admitted = [event.step for event in events if isinstance(event, AdmitEvent)]
    busy = [batch - row.slots.count(None) for row in played.rows]
    decodes = [rows - admitted.count(step) for step, rows in enumerate(busy)]
    prefills = [5 * admitted.count(step) for step in range(len(busy))]
    nothing = [0] * len(busy)
    ends = [row.now + 1.0 for row in played.rows]
    steps = StepsEvent(0, ends, decodes, prefills, busy, nothing, nothing, nothing)
    run = RunEvent(batch=run.batch, model="test", settings={}, step_time={"name": "test"})
    return [run, *events, steps, end]


@given(workloads(), st.integers(1, 4), st.sampled_from([0.5, 1.0, 4.0]))
@examples(200)
def test_a_plain_run_has_the_times_of_one_that_tells_of_its_steps(jobs, batch, interval):
    played = play(jobs, batch)
    plain, timed = summary_of(played.events, SLO), summary_of(told(played, batch), SLO)
    for name in ("latencies", "goodput", "throughput"):
        assert getattr(plain, name) == getattr(timed, name)
    assert series_of(played.events, interval) == series_of(told(played, batch), interval)


def test_a_plain_run_of_requests_with_deadlines_tells_how_many_kept_theirs():
    events = play([Job("a", 2), Job("b", 3), Job("c", 4)], 1).events
    deadlines = {"b": 4.0, "c": 9.0}
    events = [
        msgspec.structs.replace(event, deadline=deadlines.get(event.id))
        if isinstance(event, ArriveEvent)
        else event
        for event in events
    ]
    summary = summary_of(events)
    assert summary.latencies is None
    goodput = summary.goodput
    assert (goodput.requests, goodput.good, goodput.missed) == (2, 1, {"deadline": 1})


def test_the_steps_of_a_run_that_is_broken_off_count_when_it_tells_of_them():
    events = play(jobs_of(50, 3), 2).events[:6]
    assert summary_of(events, SLO, num_steps=20).latencies.itl.count == 19 + 2
    series = TimeSeries(1.0)
    metrics_of(events, series=series).close(20)
    assert sum(row.steps for row in series.finish()) == 20


def test_events_that_say_what_cannot_be_are_refused():
    run = RunEvent(batch=1, model="test", settings={}, step_time={"name": "test"})
    steps = StepsEvent(4, [1.0], [1, 1], [0], [1], [0], [0], [0])
    with pytest.raises(BatchdecodeError, match="steps event of step 4: its lists differ"):
        summary_of([run, steps])
    run = RunEvent(batch=1, model="test", settings={}, scheduling={"kv_blocks": "many"})
    with pytest.raises(BatchdecodeError, match=r"`scheduling` .*kv_blocks"):
        summary_of([run])


def timed_run(num_requests, batch):
    """Yield the events of requests of one token that keep every slot busy."""
    yield RunEvent(batch=batch, model="test", settings={}, scheduling={"kv_blocks": 100})
    for index in range(num_requests):
        step, slot = divmod(index, batch)
        yield ArriveEvent(step, float(step), str(index), 0, "input", 5, 1)
        yield AdmitEvent(step, float(step), str(index), 0, slot, "refill")
        yield FinishEvent(step, float(step), str(index), 0, slot, "length", None, 1)
        if slot == batch - 1:
            yield StepsEvent(step, [step + 1.0], [0], [5], [1], [1], [0], [0])
    yield EndEvent(num_requests // batch, num_requests / batch, num_requests, num_requests)


@pytest.mark.parametrize("num_requests", [1_000, pytest.param(20_000, marks=pytest.mark.heavy)])
def test_memory_does_not_grow_with_the_number_of_requests(num_requests):
    metrics = RunMetrics(SLO, TimeSeries())
    tracemalloc.start()
    try:
        metrics.observe(timed_run(num_requests, batch=50))
        current, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert metrics.summary().latencies.ttft.count == num_requests
    assert current < 700_000


def test_intervals_are_doubled_until_there_are_no_more_rows_than_wanted(monkeypatch):
    monkeypatch.setattr(times, "MAX_ROWS", 100)
    events = list(timed_run(900, batch=2))  # 450 steps
    rows = series_of(events, None)
    assert len(rows) <= 100
    assert rows[1].time - rows[0].time == 8.0
    assert rows == series_of(events, 8.0)


def test_a_row_that_is_aborted_between_two_steps_goes_on_in_no_other():
    run = RunEvent(batch=2, model="test", settings={})
    arrived = [ArriveEvent(0, 0.0, name, 0, "input", 5, 9) for name in "ab"]
    admitted = [AdmitEvent(0, 0.0, name, 0, slot, "empty") for slot, name in enumerate("ab")]
    aborted = FinishEvent(1, 1.0, "a", 0, 0, "aborted", None, 2)
    late = ArriveEvent(2, 2.0, "c", 0, "input", 5, 1)
    in_step_2 = AdmitEvent(2, 2.0, "c", 0, 0, "refill")
    ends = [FinishEvent(2, 2.0, "c", 0, 0, "length", None, 1)]
    ends += [FinishEvent(2, 2.0, "b", 0, 1, "length", None, 3), EndEvent(3, 3.0, 6, 3)]
    events = [run, *arrived, *admitted, aborted, late, in_step_2, *ends]
    assert summary_of(events, SLO).latencies.itl.count == 1 + 2
    feed, fold = StepFeed(run), RequestFold()
    steps = [step for event in events[1:5] for step in feed.take(event, fold.take(event))]
    steps += feed.catch_up(2)  # somebody asks for the summary just then
    steps += [step for event in events[5:] for step in feed.take(event, fold.take(event))]
    assert [step.decodes for step in steps] == [0, 2, 1]
