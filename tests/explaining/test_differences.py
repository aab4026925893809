"""Two runs part where the first decision differs, and what came of it is added up right."""

from itertools import zip_longest

from hypothesis import given
from made_events import metrics_of
from msgspec.structs import replace
from reference_paged import CROWDED, Limits, PagedJob, paged_workloads, play_paged
from reference_schedule import DESIGN_JOBS, play

from batcher.events import FinishEvent, PreemptEvent
from batcher.explaining.differences import compare
from batcher.result import ErrorInfo


def decisions_by_step(events, num_steps):
    """What was decided in each step, by hand: all that tells of a slot, or of who is not let in."""
    kinds = {"admit", "prefill", "preempt", "blocked", "finish"}
    found = [set() for _ in range(num_steps)]
    for event in events:
        if event.__struct_config__.tag in kinds:
            found[event.step].add(
                tuple(
                    str(getattr(event, name)) for name in event.__struct_fields__ if name != "time"
                )
            )
    return found


@given(paged_workloads(), paged_workloads())
def test_runs_part_at_the_first_step_with_another_decision(workload, other):
    jobs, limits = workload
    room = max(limits.blocks * limits.block_size, other[1].blocks * other[1].block_size)
    limits_b = other[1]._replace(blocks=-(-room // other[1].block_size))
    a, b = play_paged(jobs, limits), play_paged(jobs, limits_b)
    by_step = zip_longest(
        decisions_by_step(a.events, len(a.slots)), decisions_by_step(b.events, len(b.slots))
    )
    parted = [step for step, (in_a, in_b) in enumerate(by_step) if in_a != in_b]
    comparison = compare(a.events, b.events)
    assert comparison.is_equal == (not parted)
    if parted:
        assert comparison.parting.step == parted[0]
        assert comparison.parting.only_a or comparison.parting.only_b
        assert comparison.involved


@given(paged_workloads())
def test_a_run_equals_itself_and_its_times_are_those_of_the_summary(workload):
    run = play_paged(*workload)
    comparison = compare(run.events, run.events)
    assert comparison.is_equal
    assert (comparison.settings, comparison.changes, comparison.involved) == ([], [], [])
    assert comparison.totals_a == comparison.totals_b
    assert comparison.totals_a.preemptions == sum(isinstance(e, PreemptEvent) for e in run.events)
    assert comparison.totals_a.tokens == sum(job.length for job in workload[0])
    assert comparison.num_compared == len(workload[0])
    events = play_paged(*workload).events
    latencies = metrics_of(events).summary().latencies
    totals = compare(events, events).totals_a
    assert (totals.ttft, totals.tpot, totals.e2e) == (
        (latencies.ttft, latencies.tpot, latencies.e2e) if latencies else (None, None, None)
    )


def test_neither_times_nor_what_decides_nothing_make_another_schedule():
    jobs = [PagedJob("a", 2, 3), PagedJob("b", 2, 3)]
    slow, fast = (play_paged(jobs, Limits(duration=duration)) for duration in (2.0, 0.5))
    comparison = compare(slow.events, fast.events)
    assert comparison.is_equal
    assert [setting.name for setting in comparison.settings] == ["step_time.duration"]
    assert {change.later for change in comparison.changes} == {-4.5}
    # Why a request failed, whose tokens were found, and where requests without a slot stand.
    events = play_paged([PagedJob("a", 3, 2), PagedJob("b", 3, 2, cached=2)], Limits()).events
    unstreamed, failed = [], [[], []]
    for event in events:
        found = getattr(event, "cached", 0)
        unstreamed.append(replace(event, cached_from=None) if found else event)
        for told, why in zip(failed, ("no", "never"), strict=True):
            error = ErrorInfo("model-error", why)
            is_end = isinstance(event, FinishEvent)
            told.append(replace(event, reason="error", error=error) if is_end else event)
    assert events != unstreamed
    assert compare(events, unstreamed).is_equal
    assert compare(*failed).is_equal
    run, *rest = play(DESIGN_JOBS, 2).events
    instant = FinishEvent(0, 0.0, "none", 0, None, "length", None, 0)
    assert compare([run, instant, *rest], [run, *rest[:-1], instant, rest[-1]]).is_equal


def test_what_changed_most_comes_first_and_other_workloads_are_told_apart():
    a, b = (play_paged(CROWDED, Limits(blocks=blocks)) for blocks in (8, 30))
    comparison = compare(a.events, b.events)
    assert [(c.label, c.later) for c in comparison.changes] == [
        ("c", -2.0),
        ("b", -2.0),
        ("a", 0.25),
    ]
    changed = comparison.changes[1]
    assert (changed.a.preemptions, changed.a.recomputed, changed.a.wait_steps) == (1, 8, 2)
    assert (changed.b.preemptions, changed.b.recomputed, changed.b.wait_steps) == (0, 0, 0)
    jobs = DESIGN_JOBS
    comparison = compare(
        play(jobs, 2).events, play([*jobs[:3], jobs[3]._replace(id="x")], 2).events
    )
    assert (comparison.only_a, comparison.only_b) == (["d"], ["x"])
    later = [*jobs[:3], jobs[3]._replace(arrival=1.0)]
    comparison = compare(play(jobs, 2).events, play(later, 2).events)
    assert (comparison.only_a, comparison.altered) == ([], ["d"])
    assert comparison.parting is None
    assert not comparison.is_equal


def test_where_a_run_breaks_off_the_comparison_does():
    events = play_paged(CROWDED, Limits()).events
    for number in range(1, len(events)):
        for a, b in ((events[:number], events), (events, events[:number])):
            comparison = compare(a, b)
            assert comparison.is_equal
            assert comparison.changes == []
            assert comparison.totals_a.steps == comparison.totals_b.steps
            assert [comparison.breaks_off_a, comparison.breaks_off_b].count(None) == 1
    a, b = (play_paged(CROWDED, Limits(blocks=blocks)).events for blocks in (8, 30))
    number = next(i for i, event in enumerate(a) if isinstance(event, PreemptEvent))
    short = compare(a[: number + 1], b)
    assert (short.parting, short.breaks_off_a, short.breaks_off_b) == (None, 7, None)
    later = next(i for i, event in enumerate(a) if getattr(event, "step", 0) > 8)
    comparison = compare(a[: later + 1], b)
    assert (comparison.parting.step, comparison.breaks_off_a) == (7, a[later].step)
    (involved,) = comparison.involved
    assert all(story.parts[-1].end == a[later].step for story in (involved.a, involved.b))
