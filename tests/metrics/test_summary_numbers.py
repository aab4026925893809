from fractions import Fraction

import msgspec
from hypothesis import given
from hypothesis import strategies as st
from made_events import metrics_of
from reference_schedule import DESIGN_JOBS, Job, jobs_of, play, workloads
from reference_units import PROMPT_TOKENS, beams, guided, play_units, samples, unit_workloads

from batcher.events import ArriveEvent, DropEvent, FinishEvent, JumpEvent, RejectEvent, RunEvent
from batcher.metrics.summary import Constraints, Positions, Summary, encode_summary
from batcher.metrics.times import Distribution, Histogram


def summary_of(jobs, batch=2):
    return metrics_of(play(jobs, batch).events).summary()


def test_the_numbers_of_the_example_of_the_design():
    assert summary_of(DESIGN_JOBS) == Summary(
        requests=4,
        outputs=4,
        ok=4,
        failed=0,
        rejected=0,
        aborted=0,
        unfinished=0,
        finish_reasons={"stop": 0, "length": 4, "error": 0, "aborted": 0},
        prompt_tokens=20,
        generated_tokens=10,
        longest_output=4,
        batch=2,
        steps=7,
        least_steps=5,
        tokens_per_step=1.429,
        busy_slot_steps=10,
        idle_slot_steps=4,
        busy_share=0.714286,
        idle={"tail": 4, "arrivals": 0, "empty_queue": 0, "too_few": 0},
        positions=Positions(total=26, padding=0),
        jumps=0,
        jumped_tokens=0,
        forks=0,
        constraints=Constraints(compiled=0, cache_hits=0),
        wait=Distribution(count=4, mean=1.0, p50=0, p90=3, p95=3, p99=3, max=3),
        first_token=Distribution(count=4, mean=2.0, p50=1, p90=4, p95=4, p99=4, max=4),
        latency=Distribution(count=4, mean=3.5, p50=3, p90=7, p95=7, p99=7, max=7),
    )


def idle_by_hand(jobs, rows):
    """Ask of every idle slot-step which job would have filled it."""
    causes = {"input": 0, "follow": 0, None: 0}
    for row in rows:
        later = [job.reason for job in jobs if job.arrival > row.now and job.length]
        causes[later[0] if later else None] += row.slots.count(None)
    return {
        "tail": causes[None],
        "arrivals": causes["input"],
        "empty_queue": causes["follow"],
        "too_few": 0,
    }


@given(workloads(), st.integers(1, 5))
def test_the_events_alone_give_busy_and_idle_slot_steps_and_the_causes(jobs, batch):
    played = play(jobs, batch)
    summary = metrics_of(played.events).summary()
    idle = sum(row.slots.count(None) for row in played.rows)
    assert summary.idle_slot_steps == idle
    assert summary.busy_slot_steps == batch * len(played.rows) - idle
    assert summary.idle == idle_by_hand(jobs, played.rows)


@given(workloads(), st.integers(1, 4), st.data())
def test_a_run_that_is_broken_off_has_numbers_too(jobs, batch, data):
    played = play(jobs, batch)
    kept = played.events[: data.draw(st.integers(1, len(played.events)))]
    summary = metrics_of(kept).summary()
    assert summary.busy_slot_steps + summary.idle_slot_steps == summary.steps * batch
    idle = summary.idle
    assert sum(idle.values()) == summary.idle_slot_steps
    arrived = sum(isinstance(event, ArriveEvent) for event in kept)
    assert summary.ok + summary.failed + summary.aborted + summary.unfinished == arrived


def test_the_steps_since_the_last_event_count_when_the_run_tells_of_them():
    events = play([Job("a", 100), Job("b", 3)], 2).events[:6]  # up to the end of b
    summary = metrics_of(events).summary(num_steps=50)
    assert (summary.steps, summary.busy_slot_steps, summary.unfinished) == (50, 53, 1)


def test_a_rejected_line_is_a_failed_request_and_one_that_never_arrives_is_counted():
    run = RunEvent(batch=2, model="test", settings={})
    summary = metrics_of([run, RejectEvent(0, 0.0, "x", 0, "invalid-json")]).summary()
    assert (summary.requests, summary.outputs) == (1, 1)
    assert (summary.failed, summary.rejected) == (1, 1)
    assert summary.finish_reasons["error"] == 1
    aborted = FinishEvent(0, 0.0, "x", 0, None, "aborted", None, 0)
    summary = metrics_of([run, aborted]).summary()
    assert (summary.requests, summary.aborted, summary.unfinished) == (1, 1, 0)


@given(
    st.lists(st.integers(0, 5000) | st.integers(0, 10**7), min_size=1, max_size=200),
    st.integers(1, 100),
)
def test_a_histogram_has_percentiles_by_nearest_rank_within_a_twentieth_of_a_percent(
    values, percent
):
    histogram = Histogram()
    for value in values:
        histogram.add(value)
    distribution = histogram.distribution()
    assert distribution.count == len(values)
    assert distribution.mean == round(sum(values) / len(values), 3)
    assert distribution.max == max(values)
    rank = -(-len(values) * percent // 100)
    exact = sorted(values)[rank - 1]
    (found,) = histogram.percentiles((percent,))
    assert exact - Fraction(exact, 2000) <= found <= exact
    if exact < 4096:
        assert found == exact


def test_a_histogram_of_ever_larger_numbers_stays_small():
    histogram = Histogram()
    for value in range(0, 3_000_000, 17):
        histogram.add(value)
    assert len(histogram.counts) < 4096 + 10 * 2048


def test_the_json_is_readable_and_of_a_plain_run_has_the_fields_that_all_have():
    encoded = encode_summary(summary_of(jobs_of(3, 1, 2)))
    assert encoded.endswith(b"}\n")
    assert b'\n  "busy_share": 1.0,\n' in encoded
    optional = Summary.__struct_fields__.index("latencies")
    assert list(msgspec.json.decode(encoded)) == list(Summary.__struct_fields__[:optional])


@given(unit_workloads(), st.integers(0, 2**32))
def test_samples_partners_and_beams_are_counted_as_what_they_are(workload, seed):
    units, batch = workload
    run = play_units(units, batch, seed)
    summary = metrics_of(run.events).summary()
    reasons = summary.finish_reasons
    outcomes = [stay.outcome for stay in run.stays]
    assert reasons == {reason: outcomes.count(reason) for reason in reasons}
    assert summary.requests == len({unit.id for unit in units})
    assert summary.outputs == len(outcomes) - outcomes.count("unused")
    assert summary.outputs == summary.ok + summary.failed + summary.aborted
    assert summary.unfinished == 0
    assert summary.prompt_tokens == PROMPT_TOKENS * summary.requests
    tokens = [event.tokens for event in run.events if isinstance(event, FinishEvent)]
    assert summary.generated_tokens == sum(tokens)
    assert summary.longest_output == max(tokens, default=0)
    jumps = [event.tokens for event in run.events if isinstance(event, JumpEvent)]
    assert (summary.jumps, summary.jumped_tokens) == (len(jumps), sum(jumps))
    assert summary.jumped_tokens == sum(stay.jumped for stay in run.stays)
    assert summary.forks == sum(len(stay.forks) for stay in run.stays)
    # Slots of partners and beams are busy, and idle ones have a cause.
    assert summary.busy_slot_steps == sum(stay.end - stay.start for stay in run.stays)
    assert summary.busy_slot_steps + summary.idle_slot_steps == batch * len(run.labels)
    assert summary.idle == run.idle
    stays = [stay.end - stay.start for stay in run.stays]
    assert summary.least_steps == max([-(-sum(stays) // batch), *stays])
    assert summary.least_steps <= summary.steps
    # Times are those of samples, and of all beams together.
    firsts = {(unit.id, unit.rows[0]): unit for unit in units}
    waits, latencies = [], []
    for stay in run.stays:
        if (unit := firsts.get((stay.id, (stay.index, stay.role)))) is not None:
            arrived = next(
                event.step
                for event in run.events
                if isinstance(event, ArriveEvent)
                and (event.id, event.index) == (unit.id, unit.rows[0][0])
            )
            waits.append(stay.start - arrived)
            if unit.outcome in {"stop", "length"}:
                latencies.append(stay.end - arrived)
    for distribution, values in ((summary.wait, waits), (summary.latency, latencies)):
        assert (distribution.count if distribution else 0) == len(values)
        if distribution:
            assert distribution.max == max(values)
            assert distribution.mean == round(sum(values) / len(values), 3)
    assert (summary.first_token.count if summary.first_token else 0) == len(waits)


def test_a_wide_request_keeps_slots_idle_that_are_too_few_for_it():
    units = [*samples("a", 4), *samples("b", 1), *beams("wide", 2, 3), *samples("c", 1)]
    summary = metrics_of(play_units(units, 2).events).summary()
    assert summary.idle == {"tail": 1, "arrivals": 0, "empty_queue": 0, "too_few": 3}
    late = [*samples("a", 6), *guided("wide", 1, arrival=2.0, reason="follow")]
    summary = metrics_of(play_units(late, 2).events).summary()
    assert summary.idle == {"tail": 0, "arrivals": 0, "empty_queue": 2, "too_few": 4}


def test_samples_without_a_result_are_no_outputs():
    run = play_units(samples("s", 2, 3, 4), 3)
    drops = [DropEvent(3, 3.0, "s", index, "length") for index in (0, 2)]
    summary = metrics_of([*run.events[:-1], *drops, run.events[-1]]).summary()
    assert (summary.requests, summary.outputs, summary.ok) == (1, 1, 1)
    assert summary.finish_reasons == {"stop": 0, "length": 1, "error": 0, "aborted": 0}
    assert summary.unfinished == 0
    assert summary.busy_slot_steps == 2 + 3 + 4
