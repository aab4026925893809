"""The numbers of several workers are those of the trace of them all, and follow from their sums."""

from random import Random

import pytest
from examples import examples
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from reference import english_requests
from worker_runs import interleaved, worker_runs

from batcher.events import RunEvent
from batcher.metrics.slo import Slo
from batcher.metrics.summary import RunMetrics, summarize
from batcher.metrics.times import Histogram, SecondsHistogram
from batcher.settings import SchedulingSettings
from batcher.speculation.settings import SpeculationSettings
from batcher.timing.profiles import step_time_of
from batcher.trace.timeline import Timeline

BATCH = 3
TIMED = {"step_time": step_time_of("h100_llama3.1-8b_tp1")}
SETTINGS = {
    "plain": {},
    "few blocks": {"settings": SchedulingSettings(kv_blocks=30, block_size=4, max_batch_tokens=16)},
    "timed": TIMED,
    "drafts": {"speculation": SpeculationSettings(draft="ngram"), **TIMED},
}
SLO = Slo({"ttft": 0.02, "e2e": 8.0})
requests = st.lists(english_requests(), min_size=1, max_size=16)
cases = given(requests, st.integers(2, 5), st.integers(0, 2**32), st.sampled_from(list(SETTINGS)))


def ran(drawn, num_workers, seed, kind):
    draw = Random(seed)
    named = [replace(request, id=f"r{number}") for number, request in enumerate(drawn)]
    return [run.events for run in worker_runs(named, num_workers, BATCH, draw, **SETTINGS[kind])]


def totals_of(events):
    metrics = RunMetrics(SLO)
    metrics.observe(events)
    return metrics.totals()


@cases
@examples(40)
def test_numbers_of_several_are_what_the_timeline_and_the_workers_tell(
    drawn, num_workers, seed, kind
):
    own = ran(drawn, num_workers, seed, kind)
    run, events = own[0][0], interleaved(own, BATCH, Random(seed))
    timeline = Timeline.from_events(events)
    metrics = RunMetrics(SLO, worker_series=[None] * num_workers)
    metrics.observe(events)
    summary, of_each = metrics.summary(), list(map(totals_of, own))
    assert metrics.summary() == summary
    assert [worker.totals() for worker in metrics.workers] == of_each
    alone = [summarize(totals, run, SLO) for totals in of_each]
    assert summary.batch == timeline.num_slots == num_workers * BATCH
    assert summary.steps == timeline.num_steps == max(each.steps for each in alone)
    busy = sum(stretch.total for stretch in timeline.occupied())
    assert summary.busy_slot_steps == busy
    assert summary.idle_slot_steps == summary.steps * summary.batch - busy
    causes = summary.idle
    assert sum(getattr(causes, n) for n in causes.__struct_fields__) == summary.idle_slot_steps
    drained = sum((summary.steps - each.steps) * BATCH for each in alone)
    assert causes.tail == sum(each.idle.tail for each in alone) + drained
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
    metrics = RunMetrics(worker_series=[None, None])
    metrics.observe([RunEvent(batch=BATCH, model="simulated", settings={}, workers=2)])
    metrics.workers[0].counted.num_steps = steps
    summary = metrics.summary()
    assert (summary.batch, summary.steps, summary.busy_share) == (2 * BATCH, steps, 0.0)
    assert summary.idle.tail == 2 * BATCH * steps
