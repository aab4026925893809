"""A recorded run, shown at any step, against the live view that showed it when it ran."""

from dataclasses import replace
from itertools import chain

import pytest
from examples import examples
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from played_runs import PLAYED
from recorded_runs import SETTINGS, watch_run, workloads, write_requests

from batcher.errors import BatchdecodeError, InvariantError
from batcher.events import AdmitEvent, ArriveEvent, FinishEvent, RunEvent
from batcher.trace.run import label_of, label_of_name
from batcher.trace.timeline import Timeline
from cli.screen.live_picture import Longest, picture
from cli.screen.theme import UNICODE
from cli.views import recording
from cli.views.recording import Playback, Recording

SIZES = ((79, 30), (60, 9))
WIDEST = Longest()
WIDEST.request, WIDEST.tokens, WIDEST.drafts = 8, 6, 6


def drawn(scene):
    """Return the pictures of a scene; only the player, which has stories, puts its note first."""
    scene = replace(scene, longest=WIDEST, story=None)
    return [picture(scene, *size, has_gantt=True) for size in SIZES]


@pytest.fixture
def small(monkeypatch):
    """Few steps are many, so that short runs have all there is to be of long ones."""
    monkeypatch.setattr(recording, "MIN_EVENTS", 6)
    seconds = {"admitted": 0.25, "preempted": 0.5, "failed": 0.625, "note": 0.75}
    for module in ("cli.screen.live", "cli.views.recording"):
        monkeypatch.setattr(f"{module}.NUM_SAMPLES", 5)
        monkeypatch.setattr(f"{module}.SHOWN_SECONDS", seconds)
    for module in ("cli.screen.live_picture", "cli.views.recording"):
        monkeypatch.setattr(f"{module}.MAX_CELLS", 16)
        monkeypatch.setattr(f"{module}.MAX_TREND", 16)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("runs")


def arrivals_in(events):
    arrivals = [event for event in events if isinstance(event, ArriveEvent)]
    return {label_of(event.id, event.index, "sample"): event.step for event in arrivals}


BACKLOGS = {
    "beams and samples": [
        {"max_tokens": 5, "num_beams": 2},
        {"max_tokens": 3, "n": 2, "best_of": 4, "temperature": 1},
        {"max_tokens": 0, "arrival_time": 3},
        {"max_tokens": 2, "n": 3, "temperature": 1, "arrival_time": 7},
    ],
    "turns": [
        {"max_tokens": 4, "session": "s"},
        {"max_tokens": 3, "arrival_time": 2},
        *[{"max_tokens": 5, "session": name, "think_time": 3} for name in ("s", "t", "s", "t")],
    ],
    "bad lines": [{"max_tokens": 6}, {"max_tokens": -1}, *[{"max_tokens": 3}] * 4],
}
ORDERS = [("fcfs", 4), ("sjf", 2), ("fcfs", 3)]


@pytest.mark.parametrize(
    ("backlog", "order"), [*zip(BACKLOGS, ORDERS, strict=True)], ids=list(BACKLOGS)
)
def test_the_queue_holds_what_has_arrived_and_was_not_admitted(
    tmp_path, monkeypatch, backlog, order
):
    policy, batch = order
    write_requests(tmp_path / "in", [{"prompt_tokens": 3} | row for row in BACKLOGS[backlog]])
    run = watch_run(monkeypatch, tmp_path / "in", batch, {"policy": policy}, lambda s: s.gauges)
    rows = list(Timeline.from_events(run.events).select_steps())
    arrivals = arrivals_in(run.events)
    for row, gauges in zip(rows, run.seen, strict=True):
        coming = sum(step > row.step for step in arrivals.values())
        assert (gauges.num_queued, gauges.num_coming) == (row.waiting, coming)
        assert gauges.next_up is None or arrivals[gauges.next_up] <= row.step


@pytest.mark.usefixtures("small")
@given(workloads(), st.sampled_from([1, 2, 5]), st.sampled_from(SETTINGS), st.data())
@settings(
    examples(30),
    suppress_health_check=[HealthCheck.function_scoped_fixture],
    phases=[Phase.generate],
)
def test_any_step_looks_as_it_did_live(folder, workload, batch, options, data):
    path = folder / "requests.jsonl"
    write_requests(path, workload)
    told = []

    def watch(shown):
        told.append((shown.moment, shown.gauges))
        # What no trace tells: the time on the wall, and who was next while there were others.
        shown.moment = shown.moment._replace(seconds=None, speed=None)
        shown.gauges = shown.gauges._replace(next_up=None, block_use=None, waiting=())
        return drawn(shown)

    with pytest.MonkeyPatch.context() as patch:
        run = watch_run(patch, path, batch, options, watch)
    if not run.seen:
        with pytest.raises(BatchdecodeError, match="nothing to play"):
            Recording.from_events(run.events)
        return
    found = Recording.from_events(run.events)
    assert found.num_steps == len(run.seen)
    played = Playback(found, "run", UNICODE)
    rows = list(found.timeline.select_steps())
    arrivals = arrivals_in(run.events)
    steps = data.draw(st.lists(st.integers(0, found.num_steps - 1), max_size=8))
    for step in [*range(found.num_steps), *steps, *reversed(range(found.num_steps))]:
        shown = played.seek(step)
        moment, gauges = told[step]
        assert shown.moment[:3] == (step, *moment[1:3])
        queue = gauges.num_queued, gauges.num_coming
        assert (shown.gauges.num_queued, shown.gauges.num_coming) == queue
        assert queue == (rows[step].waiting, sum(at > step for at in arrivals.values()))
        for first in (gauges.next_up, shown.gauges.next_up):
            assert first is None or arrivals[first] <= step
        waiting = [label_of_name(name) for name in shown.gauges.waiting]
        assert len(waiting) <= shown.gauges.num_queued
        assert all(arrivals[label] <= step for label in waiting)
        assert shown.gauges.now == pytest.approx(gauges.now)
        assert shown.gauges.num_free == gauges.num_free
        shown.moment = shown.moment._replace(speed=None)
        shown.gauges = shown.gauges._replace(
            next_up=None, block_use=None, waiting=(), now=gauges.now
        )
        if step < found.num_steps - 1 or not run.told_late:
            pairs = zip(chain(*drawn(shown)), chain(*run.seen[step]), strict=True)
            assert [(ours, live) for ours, live in pairs if ours != live] == []


@pytest.mark.usefixtures("small")
@given(PLAYED, st.data())
@settings(examples(40), suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_step_looks_the_same_wherever_one_comes_from(events, data):
    try:
        found = Recording.from_events(events)
    except BatchdecodeError:
        return
    forwards = Playback(found, "run", UNICODE)
    expected = [drawn(forwards.seek(step)) for step in range(found.num_steps)]
    jumping = Playback(found, "run", UNICODE)
    steps = data.draw(st.lists(st.integers(0, found.num_steps - 1), max_size=10))
    for step in [*steps, *reversed(range(found.num_steps))]:
        assert drawn(jumping.seek(step)) == expected[step]


def test_what_contradicts_itself_is_refused():
    admit = AdmitEvent(0, 0.0, "a", 0, 1, "empty")
    finish = FinishEvent(0, 0.0, "a", 0, 1, "length", None, 1)
    with pytest.raises(InvariantError, match="is in slot 1 of 1"):
        Recording.from_events([RunEvent(batch=1, model="m", settings={}), admit, finish])
    with pytest.raises(BatchdecodeError, match="slots"):
        Recording.from_events([RunEvent(batch=2**40, model="m", settings={})])
