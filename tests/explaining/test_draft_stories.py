"""What stories and comparisons tell of drafts, against a run that was played with them."""

import msgspec
import pytest
from examples import examples
from hypothesis import given
from hypothesis import strategies as st
from reference_drafts import DraftedJob, drafted_workloads, play_drafts

from batcher.events import AcceptEvent, DraftEvent, SpeculateEvent
from batcher.explaining.differences import compare
from batcher.explaining.story import DraftChange, answer_of, read_requests
from cli.views.story_text import WHOLE, decided, describe, results_of, tell

JOBS = [DraftedJob("a", 3, 40), DraftedJob("b", 3, 30), DraftedJob("c", 3, 9, speculates=False)]


def stories_of(events):
    return answer_of(read_requests(events)).stories


def accepted_and_drafted(verified):
    return sum(one.accepted for one in verified), sum(one.drafted for one in verified)


@given(drafted_workloads(), st.booleans())
@examples(100)
def test_each_stay_tells_its_own_drafts(workload, is_timed):
    run = play_drafts(*workload, is_timed=is_timed)
    for story in stories_of(run.events):
        for span in story.spans:
            steps = range(span.start, span.end)
            own = [v for v in run.verified if v.id == story.id and v.step in steps]
            found = span.drafts
            if found is None:
                assert not own
                continue
            assert (found.accepted, found.drafted) == accepted_and_drafted(own)
            assert found.steps == len(own)
            longest = max((v.drafted for v in own), default=0)
            assert found.by_position == [
                (sum(v.drafted > i for v in own), sum(v.accepted > i for v in own))
                for i in range(longest)
            ]
            changes = [
                DraftChange(event.step, event.tokens, event.reason)
                for event in run.events
                if isinstance(event, SpeculateEvent)
                and event.id == story.id
                and event.step in steps
            ]
            assert (found.changes, found.last_change) == (len(changes), (changes or [None])[-1])
        assert tell(story, WHOLE)


def test_a_story_says_what_drafts_brought():
    (story, *_) = stories_of(play_drafts(JOBS, 2, 3).events)
    assert [line for line in tell(story) if "draft" in line] == [
        (
            "  had 22 of 38 drafts accepted in 14 steps, besides a token for each step; "
            "by position 86% 58% 50% 25% 0%"
        )
    ]
    assert not [
        line for line in tell(stories_of(play_drafts(JOBS, 2, 3).events)[2]) if "draft" in line
    ]


@pytest.mark.parametrize(
    ("change", "line"),
    [
        (DraftChange(4, 0, "cost"), "no more drafts from step 5 on: more would not pay off"),
        (DraftChange(4, 1, "gain"), "1 draft a step from step 5 on: more pay off"),
        (DraftChange(4, 0, "failure"), "no more drafts from step 5 on: the drafter failed"),
    ],
)
def test_a_story_says_why_there_were_more_drafts_or_fewer(change, line):
    (story, *_) = stories_of(play_drafts(JOBS, 2, 3).events)
    (span,) = story.spans
    for number, suffix in ((1, ""), (3, ", the last of 3 changes")):
        drafts = msgspec.structs.replace(span.drafts, changes=number, last_change=change)
        told = msgspec.structs.replace(span, drafts=drafts)
        assert f"  {line}{suffix}" in tell(msgspec.structs.replace(story, spans=[told]))


@given(drafted_workloads(), st.integers(0, 2**32))
@examples(50)
def test_runs_that_draft_part_where_their_drafts_do(workload, seed):
    jobs, batch, own_seed = workload
    one, other = (play_drafts(jobs, batch, s).events for s in (own_seed, seed))
    found = compare(one, other)
    told = [
        {
            (e.step, msgspec.json.encode(e))
            for e in events
            if isinstance(e, DraftEvent | AcceptEvent)
        }
        for events in (one, other)
    ]
    differing = {step for step, _ in told[0] ^ told[1]}
    assert (found.parting is not None) or not differing
    if differing:
        assert found.parting.step <= min(differing)
    for text in (list(describe(found, "A", "B")), list(results_of(found, 9))):
        assert text


def test_a_run_without_drafts_parts_from_one_that_has_some_at_the_first():
    plain = play_drafts([job._replace(speculates=False) for job in JOBS], 2, 3).events
    drafted = play_drafts(JOBS, 2, 3)
    found = compare(plain, drafted.events)
    assert found.parting.step == drafted.verified[0].step
    assert found.parting.only_a == []
    assert [decided(decision) for decision in found.parting.only_b] == [
        "drafts 5 tokens for a in slot 0",
        "accepts 4 drafts of a in slot 0",
    ]
    accepted, num_drafted = accepted_and_drafted(drafted.verified)
    rows = [line.split() for line in results_of(found, 9)]
    assert ["tokens", "drafted", "0", str(num_drafted), f"+{num_drafted}"] in rows
    assert ["drafts", "accepted", "0", str(accepted), f"+{accepted}"] in rows
    (change,) = [change for change in found.changes if change.id == "b"]
    of_b = [one for one in drafted.verified if one.id == "b"]
    assert (change.b.accepted, change.b.drafted) == accepted_and_drafted(of_b)
