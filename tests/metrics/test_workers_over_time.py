"""The run over time of several workers is that of each of them, in intervals of one length."""

from random import Random

from examples import examples
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from reference import english_requests
from test_restarted_workers import SETTINGS, cases, places
from worker_runs import worker_runs

from batcher.events import FinishEvent
from batcher.metrics.summary import RunMetrics
from batcher.metrics.times import TimeSeries, with_one_interval
from batcher.trace.run import event_of_worker

BATCH = 3


@given(
    st.lists(english_requests(), min_size=1, max_size=16),
    st.integers(1, 4),
    st.integers(0, 2**32),
    st.sampled_from(list(SETTINGS)),
    st.sampled_from([None, 0.5, 4.0]),
)
@examples(60)
def test_rows_of_a_worker_are_those_of_an_engine(drawn, num_workers, seed, kind, interval):
    named = [replace(request, id=f"r{number}") for number, request in enumerate(drawn)]
    for number, run in enumerate(
        worker_runs(named, num_workers, BATCH, Random(seed), **SETTINGS[kind])
    ):
        alone, told = TimeSeries(interval), TimeSeries(interval)
        metrics, worker = RunMetrics(series=alone), RunMetrics(series=told)
        metrics.observe(run.events)
        worker.observe(run.events[:1])
        worker.observe(event_of_worker(event, number, BATCH) for event in run.events[1:])
        for each in (metrics, worker):
            each.close(run.engine.num_steps)
        assert told.finish() == alone.finish()


@cases
@examples(60)
def test_restarts_lose_no_step_and_end_nothing(drawn, num_workers, seed, kind):
    _, of_places, events = places(drawn, num_workers, seed, kind)
    all_series = [TimeSeries() for _ in of_places]
    metrics = RunMetrics(worker_series=all_series)
    metrics.observe(events)
    metrics.close(0)
    with_one_interval(all_series)
    assert len({series.interval for series in all_series}) == 1
    rows = [series.finish() for series in all_series]
    for told, lives in zip(rows, of_places, strict=True):
        assert sum(row.steps for row in told) == lives[-1].num_steps
        assert not told or (told[-1].running, told[-1].waiting) == (0, 0)
        ends = [e for life in lives for e in life.events if isinstance(e, FinishEvent)]
        arrived = [e for e in ends if e.role != "negative" and not (e.role == "beam" and e.index)]
        assert sum(row.finished for row in told) == len(arrived)
