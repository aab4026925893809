"""A run of several workers is played as one of all slots, in steps of equal number."""

from random import Random

from examples import examples
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from test_restarted_workers import ADMIT, ARRIVE, cases, places

from batcher.events import RestartEvent, RunEvent
from batcher.trace.merged import read_timeline
from batcher.trace.workers import event_of_worker
from cli.screen.live_picture import Picture
from cli.screen.theme import UNICODE
from cli.views.play import recording as recording_module
from cli.views.play.opening import open_recording
from cli.views.play.playback import Playback
from cli.views.play.stage import Stage


def recorded(events):
    recording = open_recording(events[0])
    for event in events[1:]:
        recording.add(event)
    recording.close()
    return recording


@cases
@examples(40)
def test_each_step_shows_who_holds_which_slot(drawn, num_workers, seed, kind):
    _, _, events = places(drawn, num_workers, seed, kind)
    timeline = read_timeline(events)
    if not timeline.num_steps:
        return
    usual, recording_module.MIN_EVENTS = recording_module.MIN_EVENTS, 5
    try:
        playback = Playback(recorded(events), "run", UNICODE)
        assert playback.recording.num_requests == len(drawn)
        rows = {row.step: row for row in timeline.select_steps()}
        order = list(rows)
        Random(seed).shuffle(order)
        for step in order:
            scene = playback.seek(step)
            shown = [s.label if s.is_busy(step) else None for s in scene.run.slots]
            assert shown == rows[step].slots
            assert scene.gauges.num_queued == rows[step].waiting
            assert scene.gauges.num_coming >= 0
        assert playback.seek(max(order)).run.num_done == len(drawn)
    finally:
        recording_module.MIN_EVENTS = usual


def test_what_is_decoded_again_counts_once_in_a_run_of_one_worker():
    run = RunEvent(batch=1, model="simulated", settings={})
    restart = RestartEvent(step=4, time=4.0, reason="killed", code=9)
    begun = [ARRIVE, replace(ADMIT, step=0), restart, ARRIVE, replace(ADMIT, step=4)]
    assert recorded([run, *begun]).num_requests == 1


@given(st.integers(0, 2**32), st.sampled_from([(39, 11), (60, 20), (120, 40)]))
@examples(10)
def test_a_picture_of_workers_fits_into_narrow_terminals(seed, size):
    run = RunEvent(batch=4, workers=5, model="simulated", settings={})
    both = (ARRIVE, replace(ADMIT, step=0))
    arrivals = [event_of_worker(event, worker, 4) for worker in range(5) for event in both]
    restart = RestartEvent(step=3, time=3.0, reason="lost", worker=Random(seed).randrange(5))
    stage = Stage(recorded([run, *arrivals, restart]), "run", UNICODE)
    for step in range(stage.num_steps):
        lines = stage.lines(step, *size)
        assert len(lines) <= size[1]
        assert all(sum(len(text) for text, _ in line) <= size[0] for line in lines)
    assert Picture(stage.recording.longest)
    assert 2 in stage.points_of_interest()
