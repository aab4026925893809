"""The numbers of several workers are those of the trace of them all, and follow from their sums."""

import pickle
from random import Random

import pytest
from examples import examples
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from reference import english_requests
from worker_runs import interleaved, worker_runs

from batcher import Request
from batcher.events import RunEvent
from batcher.metrics.slo import Slo
from batcher.metrics.summary import (
    RunMetrics,
    decode_totals,
    encode_totals,
    merged,
    summarize,
    summarize_workers,
)
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


def totals_of(events, slo=None):
    metrics = RunMetrics(slo)
    metrics.observe(events)
    return metrics.totals()


@cases
@examples(90)
def test_sums_that_were_sent_make_the_numbers_of_the_trace(drawn, num_workers, seed, kind):
    own = ran(drawn, num_workers, seed, kind)
    run = own[0][0]
    metrics = [RunMetrics(SLO) for _ in own]
    for event in interleaved(own, BATCH, Random(seed)):
        for each in metrics if isinstance(event, RunEvent) else [metrics[event.worker]]:
            each.observe([event])
    read = [each.totals() for each in metrics]
    sent = [decode_totals(encode_totals(totals_of(events, SLO))) for events in own]
    assert summarize_workers(sent, run, SLO) == summarize_workers(read, run, SLO)
    assert [pickle.loads(pickle.dumps(each)) for each in read] == sent  # noqa: S301 - our own


@cases
@examples(90)
def test_numbers_of_several_are_what_the_timeline_and_the_workers_tell(
    drawn, num_workers, seed, kind
):
    own = ran(drawn, num_workers, seed, kind)
    run = own[0][0]
    timeline = Timeline.from_events(interleaved(own, BATCH, Random(seed)))
    summary = summarize_workers([totals_of(events, SLO) for events in own], run, SLO)
    alone = [summarize(totals_of(events, SLO), run, SLO) for events in own]
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
    metrics = RunMetrics(SLO)
    metrics.observe(events)
    assert summarize(merged([metrics.totals()]), events[0], SLO) == metrics.summary()


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


def test_what_is_merged_into_another_stays_as_it_is():
    requests = [Request(id=f"r{n}", prompt="One", max_tokens=5) for n in range(7)]
    own = [run.events for run in worker_runs(requests, 2, BATCH, Random(1), **TIMED)]
    parts = [totals_of(events) for events in own]
    before = [encode_totals(totals) for totals in parts]
    merged(parts)
    assert [encode_totals(totals) for totals in parts] == before


@pytest.mark.parametrize("steps", [0, 9])
def test_workers_that_did_nothing_have_numbers(steps):
    run = RunEvent(batch=BATCH, model="simulated", settings={})
    metrics = RunMetrics()
    metrics.observe([run])
    summary = summarize_workers([metrics.totals(steps), metrics.totals()], run)
    assert (summary.batch, summary.steps, summary.busy_share) == (2 * BATCH, steps, 0.0)
    assert summary.idle.tail == 2 * BATCH * steps
