"""What a summary says of drafts, against a slow look at every step of a run that has them."""

from itertools import pairwise

import pytest
from examples import examples
from hypothesis import given
from hypothesis import strategies as st
from made_events import metrics_of, read_trace
from msgspec.structs import replace
from reference_drafts import DraftedJob, drafted_workloads, play_drafts

from batcher.events import (
    AcceptEvent,
    AdmitEvent,
    ArriveEvent,
    DraftEvent,
    EndEvent,
    FinishEvent,
    RollbackEvent,
    RunEvent,
    SpeculateEvent,
    StepsEvent,
)
from batcher.metrics.counts import PositionAcceptance
from batcher.metrics.slo import Slo
from batcher.metrics.summary import encode_summary
from batcher.metrics.times import TimeSeries
from batcher.speculation.settings import expected_speedup
from batcher.trace.files import encode_events


def summary_of(events, num_steps=0, slo=None):
    return metrics_of(events, slo).summary(num_steps)


def of_those_that_draft(run):
    """The verified steps, and how many decode steps the rows have that they are of."""
    names = {one.id for one in run.verified}
    return run.verified, sum(run.decode_steps[name] for name in names)


@given(drafted_workloads(), st.booleans())
@examples(150)
def test_what_became_of_drafts_is_counted(workload, is_timed):
    run = play_drafts(*workload, is_timed=is_timed)
    summary = summary_of(run.events)
    verified, num_decode_steps = of_those_that_draft(run)
    drafted, accepted = sum(v.drafted for v in verified), sum(v.accepted for v in verified)
    # Positions, and what any schedule needs, know of drafts.
    assert summary.positions.total == sum(run.computed)
    assert summary.generated_tokens == sum(map(len, run.given.values()))
    if is_timed and run.ends:
        assert summary.computed.draft_tokens == drafted
        assert summary.computed.prefill_tokens == sum(run.prompts)
        needed = summary.generated_tokens - accepted
        assert summary.least_steps == -(-needed // summary.batch)
    found = summary.speculation
    assert (found is None) == (not verified)
    if found is None:
        return
    rollbacks = [event for event in run.events if isinstance(event, RollbackEvent)]
    assert (found.steps, found.drafted, found.accepted) == (len(verified), drafted, accepted)
    assert found.rejected == sum(event.tokens for event in rollbacks)
    assert found.returned_blocks == sum(event.blocks for event in rollbacks)
    assert found.acceptance == round(accepted / drafted, 6)
    tested = accepted + len(rollbacks)
    assert found.token_acceptance == (round(accepted / tested, 6) if tested else 0.0)
    longest = max(v.drafted for v in verified)
    assert found.by_position == [
        PositionAcceptance(
            of := sum(v.drafted > i for v in verified),
            yes := sum(v.accepted > i for v in verified),
            round(yes / of, 6),
        )
        for i in range(longest)
    ]
    assert found.tokens_per_step == round((len(verified) + accepted) / len(verified), 3)
    assert found.wasted == round((drafted - accepted) / summary.positions.total, 6)
    assert found.speedup.measured == round(1 + accepted / num_decode_steps, 3)


@given(drafted_workloads(), st.booleans())
@examples(100)
def test_tokens_of_one_step_have_no_time_between_and_drafts_are_no_prompts(workload, is_timed):
    run = play_drafts(*workload, is_timed=is_timed)
    latencies = summary_of(run.events, slo=Slo({"ttft": 5.0})).latencies
    gaps = [b - a for times in run.given.values() for a, b in pairwise(times)]
    assert (latencies.itl is None) == (not gaps)
    if gaps:
        assert (latencies.itl.count, latencies.itl.max) == (len(gaps), max(gaps))
        assert latencies.itl.mean == round(sum(gaps) / len(gaps), 6)
    spans = [(t[-1] - t[0]) / (len(t) - 1) for t in run.given.values() if len(t) > 1]
    assert (latencies.tpot is None) == (not spans)
    if spans:
        assert latencies.tpot.mean == pytest.approx(sum(spans) / len(spans), abs=2e-6)
    series = TimeSeries(1.0)
    metrics_of(run.events, series=series).close(len(run.ends))
    rows = series.finish()
    assert sum(row.output_tokens for row in rows) == sum(map(len, run.given.values()))
    assert sum(row.prompt_tokens for row in rows) == sum(run.prompts)
    for row in rows:
        steps = {n for n, end in enumerate(run.ends) if row.time - 1 < end <= row.time}
        own = [one for one in run.verified if one.step in steps]
        assert (row.drafted, row.accepted) == (
            sum(one.drafted for one in own),
            sum(one.accepted for one in own),
        )


@given(drafted_workloads(), st.booleans(), st.data())
@examples(50)
def test_a_trace_gives_the_same_bytes_as_the_run_wherever_it_breaks_off(workload, is_timed, data):
    events = play_drafts(*workload, is_timed=is_timed).events
    kept = events[: data.draw(st.integers(1, len(events)))]
    read_back = read_trace(encode_events(kept).splitlines(keepends=True))
    assert encode_summary(summary_of(read_back)) == encode_summary(summary_of(kept))


@pytest.mark.parametrize(
    ("said", "rule"),
    [({}, "exact"), ({"acceptance": "leviathan"}, "leviathan"), ({"acceptance": 3}, "exact")],
)
def test_the_rule_is_the_one_that_the_run_began_with(said, rule):
    run, *events = play_drafts([DraftedJob("a", 3, 9)], 1, 5, is_timed=True).events
    run = replace(run, speculation={"draft": "simulated", **said})
    assert summary_of([run, *events]).speculation.rule == rule


TIMED = RunEvent(batch=1, model="test", settings={}, step_time={"name": "test"})


def drafting(drafts, ends):
    """A row in a run whose steps verify `drafts`, pairs of how many and how many accepted."""
    events = [TIMED, ArriveEvent(0, 0.0, "a", 0, "input", 5, 99)]
    events.append(AdmitEvent(0, 0.0, "a", 0, 0, "empty"))
    position = 6
    for step, (drafted, accepted) in enumerate(drafts, 1):
        now = float(ends[step - 1])
        if drafted:
            events.append(DraftEvent(step, now, "a", 0, 0, position, drafted))
        if accepted:
            events.append(AcceptEvent(step, now, "a", 0, 0, position, accepted))
        if accepted < drafted:
            rejected = position + accepted, drafted - accepted
            events.append(RollbackEvent(step, now, "a", 0, 0, *rejected))
        position += accepted + 1
    num_steps = len(drafts) + 1
    events.append(FinishEvent(num_steps - 1, ends[-2], "a", 0, 0, "length", None, position - 5))
    counts = [drafted for drafted, _ in drafts]
    nothing = [0] * num_steps
    decodes, rows = [0, *[1] * len(drafts)], [1] * num_steps
    columns = decodes, [5, *counts], rows, nothing, nothing, nothing
    told = None if not any(counts) else [0, *counts]
    return [*events, StepsEvent(0, ends, *columns, told), EndEvent(num_steps, ends[-1], 0, 1)]


def test_what_is_expected_stands_beside_what_was_measured():
    drafts = [(4, 4), (4, 1), (2, 0), (0, 0)]
    speedup = summary_of(drafting(drafts, [1.0, 2.0, 3.0, 4.0, 5.0])).speculation.speedup
    acceptance = 5 / 7
    fours = 2 * expected_speedup(acceptance, 4, 0.0)
    expected = (fours + expected_speedup(acceptance, 2, 0.0) + 1) / 4
    assert speedup.expected == round(expected, 3)
    assert speedup.measured == round(9 / 4, 3)
    assert speedup.simple == round(10 / 3 * acceptance, 3)
    assert (speedup.draft_cost, speedup.in_time) == (0.0, speedup.measured)


def test_a_draft_costs_what_it_makes_a_step_longer():
    ends = [9.0, 10.4, 11.4, 12.8]  # 4 drafts: 1.4 s, no draft: 1.0 s; the prompt does not count
    speedup = summary_of(drafting([(4, 3), (0, 0), (4, 4)], ends)).speculation.speedup
    acceptance = 7 / 8
    assert speedup.draft_cost == pytest.approx(0.1)
    assert speedup.measured == round(10 / 3, 3)
    assert speedup.in_time == round(10 / 3.8, 3)
    expected = (2 * expected_speedup(acceptance, 4, 0.1) + 1) / 3
    assert speedup.expected == round(expected, 3)
    assert speedup.simple == round(4 * acceptance / 1.1, 3)


def test_a_row_that_still_runs_is_measured_as_far_as_it_has_come():
    events = drafting([(4, 4), (0, 0), (4, 0), (0, 0)], [1.0, 2.0, 3.0, 4.0, 5.0])
    end = next(n for n, event in enumerate(events) if isinstance(event, FinishEvent))
    assert summary_of(events[:end], 3).speculation.speedup.measured == 3.0
    assert summary_of(events[:end], 5).speculation.speedup.measured == 2.0


def test_a_row_that_fails_as_it_first_drafts_was_no_faster():
    events = drafting([(4, 0)], [1.0, 2.0])
    end = FinishEvent(1, 1.0, "a", 0, 0, "error", None, 1)
    speedup = summary_of([*events[:4], end, *events[-2:]]).speculation.speedup
    assert (speedup.measured, speedup.expected) == (1.0, 1.0)


def test_steps_told_of_before_the_first_drafts_say_when_the_next_began():
    events = drafting([(0, 0), (4, 4), (0, 0)], [100.0, 101.0, 102.0, 103.0])
    told, end = events[-2], events[-1]
    columns = [getattr(told, name) for name in told.__struct_fields__[1:9]]
    parts = [
        StepsEvent(first, *[column[first : first + 2] for column in columns]) for first in (0, 2)
    ]
    draft = next(n for n, event in enumerate(events) if isinstance(event, DraftEvent))
    speedup = summary_of(
        [*events[:draft], parts[0], *events[draft:-2], parts[1], end]
    ).speculation.speedup
    assert speedup.draft_cost == 0.0


def test_changes_of_the_number_of_drafts_are_counted_by_their_reason():
    events = drafting([(4, 4)], [1.0, 2.0])
    changes = [SpeculateEvent(1, 1.0, "a", 0, 0, 0, why) for why in ("cost", "failure", "cost")]
    found = summary_of([*events[:-3], *changes, *events[-3:]]).speculation
    assert found.changes == {"gain": 0, "cost": 2, "failure": 1}
