from collections import Counter
from fractions import Fraction
from math import ceil

import msgspec
import numpy as np
import pytest
from examples import examples
from hypothesis import given
from hypothesis import strategies as st
from made_events import metrics_of
from slow_server import BUDGET, TOTAL_BLOCKS, Job, SlowServer

from batcher.events import ArriveEvent
from batcher.metrics.slo import Slo
from batcher.metrics.summary import RunMetrics
from batcher.metrics.times import SecondsHistogram, TimeSeries
from batcher.planning.simulator import ServedTimes

SLO = Slo({"queue": 4.0, "ttft": 6.0, "tpot": 1.1, "e2e": 12.5})
ARRIVALS = [0.0, 0.5, 1.0, 1.013, 3.0, 3.0, 7.25, 40.0]


@st.composite
def served(draw):
    """The events of a run of drawn jobs, and the truth of it."""
    jobs = [
        Job(
            f"r{number}",
            arrival,
            draw(st.integers(1, 9)),
            draw(st.integers(0, 12)),
            draw(st.sampled_from(["length", "stop", "length", "error", "aborted"])),
            draw(st.sampled_from([None, None, arrival + 9.0])),
            draw(st.sampled_from([False, False, True])),
        )
        for number, arrival in enumerate(
            sorted(draw(st.lists(st.sampled_from(ARRIVALS), min_size=1, max_size=10)))
        )
    ]
    server = SlowServer(jobs, draw(st.integers(1, 4)), draw(st.integers(0, 2**32)))
    return server.serve()


def micro(seconds):
    return round(seconds * 10**6)


def check_distribution(found, seconds):
    """Compare with all the numbers themselves."""
    values = sorted(map(micro, seconds))
    if not values:
        assert found is None
        return
    assert found.count == len(values)
    assert found.mean == round(sum(values) / len(values) / 10**6, 6)
    assert micro(found.max) == values[-1]
    for percent in (50, 90, 95, 99):
        exact = values[-(-len(values) * percent // 100) - 1]
        assert exact - Fraction(exact, 2000) <= micro(getattr(found, f"p{percent}")) <= exact


def oks(truth):
    return [job for job in truth.jobs if job.ended_as in {"length", "stop"} and job.token_times]


def times_of(job):
    tokens = job.token_times
    ttft, e2e = tokens[0] - job.arrival, job.end - job.arrival
    tpot = (e2e - ttft) / (len(tokens) - 1) if len(tokens) > 1 else 0.0
    return {"queue": job.admitted[0] - job.arrival, "ttft": ttft, "tpot": tpot, "e2e": e2e}


@given(served(), st.booleans())
@examples(300)
def test_every_number_is_that_of_a_look_at_every_step_and_token(run, has_slo):
    events, truth = run
    jobs, good, steps = truth.jobs, oks(truth), truth.steps
    summary = metrics_of(events, SLO if has_slo else None).summary()
    # Latencies.
    found = summary.latencies
    check_distribution(found.queue, [j.admitted[0] - j.arrival for j in jobs if j.admitted])
    check_distribution(found.ttft, [j.token_times[0] - j.arrival for j in jobs if j.token_times])
    check_distribution(found.e2e, [times_of(job)["e2e"] for job in good])
    check_distribution(
        found.tpot, [times_of(job)["tpot"] for job in good if len(job.token_times) > 1]
    )
    gaps = [b - a for j in jobs for a, b in zip(j.token_times, j.token_times[1:], strict=False)]
    check_distribution(found.itl, gaps)
    # The first token is counted in steps from the arrival.
    arrived = {event.id: event.step for event in events if isinstance(event, ArriveEvent)}
    ends = [step["end"] for step in steps]
    waits = [ends.index(j.token_times[0]) + 1 - arrived[j.id] for j in jobs if j.token_times]
    first = summary.first_token
    assert (first.count if first else 0) == len(waits)
    assert first is None or first.mean == round(sum(waits) / len(waits), 3)
    # Throughput is over the time from the first arrival to the end of the last step.
    found, num_tokens = summary.throughput, sum(len(job.token_times) for job in jobs)
    assert summary.generated_tokens == num_tokens
    assert (found is None) == (not steps)
    if steps:
        makespan = ends[-1] - min(job.arrival for job in jobs)
        assert found.makespan == round(makespan, 6)
        assert found.requests == round(summary.ok / makespan, 6)
        assert found.prompt_tokens == round(sum(job.prompt for job in jobs) / makespan, 3)
        assert found.output_tokens == round(num_tokens / makespan, 3)
    # Goodput counts requests that met all limits.
    judged = [job for job in jobs if job.length and (has_slo or job.deadline is not None)]
    found, limits = summary.goodput, SLO.limits if has_slo else {}
    assert (found is None) == (not has_slo and not judged)
    if found:
        missed = {job.id: reasons_of(job, good, limits) for job in judged}
        counts = Counter(reason for reasons in missed.values() for reason in reasons)
        num_good = sum(not reasons for reasons in missed.values())
        assert (found.requests, found.good, found.missed) == (len(judged), num_good, counts)
        assert found.share == (round(num_good / len(judged), 6) if judged else 0.0)
    # Steps: what they used is what they told.
    if steps:
        durations = [step["end"] - step["start"] for step in steps]
        held = [step["blocks"] * seconds for step, seconds in zip(steps, durations, strict=True)]
        mean = sum(held) / sum(durations)
        assert summary.kv.mean_blocks == pytest.approx(mean, abs=1e-3)
        assert summary.kv.mean_share == pytest.approx(mean / TOTAL_BLOCKS, abs=1e-6)
        assert summary.kv.max_blocks == max(step["blocks"] for step in steps)
        tokens = [step["decodes"] + step["prefills"] for step in steps]
        share = sum(tokens) / len(tokens) / BUDGET
        assert summary.budget.mean_share == pytest.approx(share, abs=1e-6)
        assert summary.budget.full_steps == tokens.count(BUDGET)
    for field, name in (
        ("prefill_tokens", "prefills"),
        ("decode_tokens", "decodes"),
        ("right_padding", "prefill_padding"),
        ("left_padding", "decode_padding"),
    ):
        assert getattr(summary.computed, field) == sum(step[name] for step in steps)
    # Slots of preempted rows are not busy.
    moves = [sum(n for at, n, _ in truth.moves if at <= step["start"]) for step in steps]
    assert summary.busy_slot_steps == sum(moves)
    # Hits, preemptions and blocked steps are counted.
    hits = summary.prefix_cache
    assert (hits.asked, hits.found) == (truth.asked, truth.found)
    assert (hits.asked_again, hits.found_again) == (truth.asked_again, truth.found_again)
    preempted = summary.preemptions
    assert preempted.count == len(truth.preemptions)
    assert preempted.recomputed_tokens == truth.recomputed
    assert +Counter(summary.blocked) == +Counter(truth.hold_steps)


def reasons_of(job, good, limits):
    """Why a request was not good."""
    if job not in good:
        return ["failed"]
    times = times_of(job)
    reasons = [name for name in limits if micro(times[name]) > micro(limits[name])]
    is_late = job.deadline is not None and micro(job.end) > micro(job.deadline)
    return [*reasons, "deadline"] if is_late else reasons


def test_a_percentile_is_a_time_that_was_there():
    histogram = SecondsHistogram()
    for microseconds in (5001, 5000, 5001):
        histogram.add(microseconds / 10**6)
    assert histogram.distribution().p99 == 0.005


def rows_by_hand(truth, interval):
    """What happened in each interval, by looking at everything for each."""

    def index_of(time):
        return max(0, ceil(time / interval) - 1)

    moments = [time for time, _, _ in truth.moves] + [step["end"] for step in truth.steps]
    rows = []
    for index in sorted({index_of(time) for time in moments}):
        steps = [step for step in truth.steps if index_of(step["end"]) == index]
        past = [move for move in truth.moves if index_of(move[0]) <= index]
        ttfts = [
            job.token_times[0] - job.arrival
            for job in truth.jobs
            if job.token_times and index_of(job.token_times[0]) == index
        ]
        blocks = max((step["blocks"] for step in steps), default=0)
        rows.append(
            {
                "time": (index + 1) * interval,
                "steps": len(steps),
                "running": sum(move[1] for move in past),
                "waiting": sum(move[2] for move in past),
                "blocks": blocks,
                "kv_share": round(blocks / TOTAL_BLOCKS, 6),
                "prompt_tokens": sum(step["prefills"] for step in steps),
                "output_tokens": sum(step["num_tokens"] for step in steps),
                "arrived": sum(index_of(job.arrival) == index for job in truth.jobs),
                "finished": sum(index_of(job.end) == index for job in truth.jobs),
                "preemptions": sum(index_of(time) == index for time in truth.preemptions),
                "ttft_mean": pytest.approx(sum(ttfts) / len(ttfts), abs=2e-6) if ttfts else None,
            }
        )
    return rows


def series_of(events, interval):
    series, rows = TimeSeries(interval), []
    metrics = RunMetrics(series=series)
    for event in events:
        metrics.observe([event])
        rows += series.rows()
    metrics.close(0)
    return rows + series.finish()


@given(served(), st.sampled_from([0.25, 1.0, 3.0]))
@examples(200)
def test_a_time_series_tells_what_happened_in_each_interval(run, interval):
    events, truth = run
    found = [msgspec.structs.asdict(row) for row in series_of(events, interval)]
    expected = rows_by_hand(truth, interval)
    assert [{name: row[name] for name in expected[0]} for row in found] == expected


@given(served())
@examples(100)
def test_times_in_arrays_give_the_latencies_that_the_events_give(run):
    events, truth = run
    summary, good = metrics_of(events, Slo(SLO.limits)).summary(), oks(truth)
    times = ServedTimes(
        np.array([job.arrival for job in good]),
        np.array([job.admitted[0] for job in good]),
        np.array([job.token_times[0] for job in good]),
        np.array([job.end for job in good]),
        np.array([len(job.token_times) for job in good], float),
        np.zeros(len(good)),
    )
    found = times.latencies()
    check_distribution(found.queue, [times_of(job)["queue"] for job in good])
    for name in ("tpot", "e2e"):
        exact, streamed = getattr(found, name), getattr(summary.latencies, name)
        assert (exact and (exact.count, exact.mean, exact.max)) == (
            streamed and (streamed.count, streamed.mean, streamed.max)
        )
    met = times.goodput(SLO.limits, 0, times.makespan)
    assert met.good == sum(
        all(micro(times_of(job)[name]) <= micro(limit) for name, limit in SLO.limits.items())
        for job in good
    )
