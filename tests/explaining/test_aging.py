"""What tells that a request was admitted for its age, and not by the policy."""

from engine_runs import traced
from hypothesis import given
from hypothesis import strategies as st
from made_events import metrics_of

from batcher import Engine, Request, SimulatedModel
from batcher.events import AdmitEvent, ArriveEvent
from batcher.explaining.story import answer_of, read_requests
from batcher.settings import SchedulingSettings
from cli.screen.summary import summary_lines
from cli.views.story_text import tell


def events_of(jobs, batch, **settings):
    """The events of a run of jobs: of each its priority, its arrival and how many tokens."""
    engine = Engine(SimulatedModel(), batch, settings=SchedulingSettings(**settings))
    for number, (priority, arrival, tokens) in enumerate(jobs):
        engine.add(
            Request(
                prompt=[number + 1],
                id=f"r{number}",
                priority=priority,
                arrival_time=arrival,
                max_tokens=tokens,
                ignore_eos=True,
            )
        )
    return traced(engine)


def stories_of(events):
    worker = read_requests(events)
    return {story.id: story for story in answer_of(worker).stories}


OVERTAKEN = [(9, 0, 2), *[(0, 0, 2)] * 9]


def test_a_story_and_the_summary_tell_of_a_request_that_waited_too_long_for_the_policy():
    events = events_of(OVERTAKEN, 1, policy="priority", aging=6)
    told = tell(stories_of(events)["r0"])
    assert told[3] == (
        "  admitted to slot 0 at step 6, first by --aging: it had waited at least 6 steps"
    )
    assert [story.id for story in stories_of(events).values() if story.spans[0].aging] == [
        *("r0", *(f"r{number}" for number in range(4, 10)))
    ]
    summary = metrics_of(events).summary()
    assert summary.aged == 7
    assert "  7 admissions forced by --aging" in "\n".join(summary_lines(summary))


JOBS = st.lists(
    st.tuples(st.integers(0, 3), st.integers(0, 12).map(float), st.integers(1, 4)),
    min_size=1,
    max_size=12,
)


@given(JOBS, st.integers(1, 2), st.sampled_from([0.5, 2.0, 5.0, 300.0]))
def test_whoever_goes_before_a_more_urgent_one_is_told_to_have_waited_too_long(jobs, batch, aging):
    events = events_of(jobs, batch, policy="priority", aging=aging)
    told = stories_of(events)
    waiting = set[str]()
    for event in events:
        if isinstance(event, ArriveEvent):
            waiting.add(event.id)
        elif isinstance(event, AdmitEvent):
            waiting.discard(event.id)
            own = jobs[int(event.id[1:])]
            is_overruled = any(
                jobs[int(other[1:])][:2] < own[:1]
                for other in waiting
                if jobs[int(other[1:])][1] <= event.time
            )
            assert not is_overruled or told[event.id].spans[0].aging == aging
            assert (told[event.id].spans[0].aging is None) == (event.time - own[1] < aging)
