"""The numbers of several workers are those of the trace of them all, and follow from their sums.

The run over time is that of each of them, in intervals of one length.
"""

from random import Random

import pytest
from examples import examples
from hypothesis import given
from hypothesis import strategies as st
from made_events import metrics_of
from msgspec.structs import replace
from reference import english_requests
from test_worker_traces import SETTINGS as RESTARTED
from test_worker_traces import cases as restarts
from test_worker_traces import places
from worker_runs import BATCH, SETTINGS, interleaved, worker_runs

from batcher.events import FinishEvent, RunEvent
from batcher.metrics.slo import Slo
from batcher.metrics.summary import RunMetrics
from batcher.metrics.times import Histogram, SecondsHistogram, TimeSeries, with_one_interval
from batcher.trace.run import event_of_worker
from batcher.trace.timeline import Timeline

SLO = Slo({"ttft": 0.02, "e2e": 8.0})
requests = st.lists(english_requests(), min_size=1, max_size=16)
cases = given(requests, st.integers(2, 5), st.integers(0, 2**32), st.sampled_from(list(SETTINGS)))


def ran(drawn, num_workers, seed, kind):
    draw = Random(seed)
    named = [replace(request, id=f"r{number}") for number, request in enumerate(drawn)]
    return [run.events for run in worker_runs(named, num_workers, BATCH, draw, **SETTINGS[kind])]


def totals_of(events):
    return metrics_of(events, SLO).totals()


@cases
@examples(40)
def test_numbers_of_several_are_what_the_timeline_and_the_workers_tell(
    drawn, num_workers, seed, kind
):
    own = ran(drawn, num_workers, seed, kind)
    run, events = own[0][0], interleaved(own, BATCH, Random(seed))
    timeline = Timeline.from_events(events)
    metrics = metrics_of(events, SLO, worker_series=[None] * num_workers)
    summary, of_each = metrics.summary(), list(map(totals_of, own))
    assert metrics.summary() == summary
    assert [worker.totals() for worker in metrics.workers] == of_each
    alone = [totals.report(run, SLO) for totals in of_each]
    assert summary.batch == timeline.num_slots == num_workers * BATCH
    assert summary.steps == timeline.num_steps == max(each.steps for each in alone)
    busy = sum(stretch.total for stretch in timeline.occupied())
    assert summary.busy_slot_steps == busy
    assert summary.idle_slot_steps == summary.steps * summary.batch - busy
    causes = summary.idle
    assert sum(causes.values()) == summary.idle_slot_steps
    drained = sum((summary.steps - each.steps) * BATCH for each in alone)
    assert causes["tail"] == sum(each.idle["tail"] for each in alone) + drained
    for name in ("requests", "outputs", "ok", "prompt_tokens", "generated_tokens", "unfinished"):
        assert getattr(summary, name) == sum(getattr(each, name) for each in alone)
    assert summary.positions.total == sum(each.positions.total for each in alone)
    assert summary.goodput.good == sum(each.goodput.good for each in alone)
    assert [each.steps for each in summary.workers] == [each.steps for each in alone]
    assert [each.busy_share for each in summary.workers] == [each.busy_share for each in alone]


@cases
@examples(30)
def test_of_one_worker_it_is_what_it_was(drawn, num_workers, seed, kind):
    (events, *_) = ran(drawn, num_workers, seed, kind)
    one, engine = RunMetrics(SLO, worker_series=[None]), RunMetrics(SLO)
    for metrics in (one, engine):
        metrics.observe(events)
    assert replace(one.summary(), workers=None) == engine.summary()


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 2**40)), min_size=1))
def test_histograms_of_parts_are_that_of_all(values):
    for kind in (Histogram, SecondsHistogram):
        whole, parts = kind(), [kind() for _ in range(4)]
        for part, value in values:
            number = value if kind is Histogram else value / 2**20
            whole.add(number)
            parts[part].add(number)
        first, *others = parts
        for other in others:
            first.merge(other)
        assert first.distribution() == whole.distribution()


@pytest.mark.parametrize("steps", [0, 9])
def test_workers_that_did_nothing_have_numbers(steps):
    run = RunEvent(batch=BATCH, model="simulated", settings={}, workers=2)
    metrics = metrics_of([run], worker_series=[None, None])
    metrics.workers[0].note_steps(steps)
    summary = metrics.summary()
    assert (summary.batch, summary.steps, summary.busy_share) == (2 * BATCH, steps, 0.0)
    assert summary.idle["tail"] == 2 * BATCH * steps


@given(
    st.lists(english_requests(), min_size=1, max_size=16),
    st.integers(1, 4),
    st.integers(0, 2**32),
    st.sampled_from(list(RESTARTED)),
    st.sampled_from([None, 0.5, 4.0]),
)
@examples(60)
def test_rows_of_a_worker_are_those_of_an_engine(drawn, num_workers, seed, kind, interval):
    named = [replace(request, id=f"r{number}") for number, request in enumerate(drawn)]
    for number, run in enumerate(
        worker_runs(named, num_workers, BATCH, Random(seed), **RESTARTED[kind])
    ):
        alone, told = TimeSeries(interval), TimeSeries(interval)
        metrics, worker = RunMetrics(series=alone), RunMetrics(series=told)
        metrics.observe(run.events)
        worker.observe(run.events[:1])
        worker.observe(event_of_worker(event, number, BATCH) for event in run.events[1:])
        for each in (metrics, worker):
            each.close(run.engine.num_steps)
        assert told.finish() == alone.finish()


@restarts
@examples(60)
def test_restarts_lose_no_step_and_end_nothing(drawn, num_workers, seed, kind):
    _, of_places, events = places(drawn, num_workers, seed, kind)
    all_series = [TimeSeries() for _ in of_places]
    metrics_of(events, worker_series=all_series).close(0)
    with_one_interval(all_series)
    assert len({series.interval for series in all_series}) == 1
    rows = [series.finish() for series in all_series]
    for told, lives in zip(rows, of_places, strict=True):
        assert sum(row.steps for row in told) == lives[-1].num_steps
        assert not told or (told[-1].running, told[-1].waiting) == (0, 0)
        ends = [e for life in lives for e in life.events if isinstance(e, FinishEvent)]
        arrived = [e for e in ends if e.role != "negative" and not (e.role == "beam" and e.index)]
        assert sum(row.finished for row in told) == len(arrived)
