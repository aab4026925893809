"""The player: what keys and time make of a recorded run, on the screen of an emulator."""

import re
from types import SimpleNamespace

import pytest
from emulated_run import Clock, Fingers, Screen
from hypothesis import given
from hypothesis import strategies as st
from reference_paged import Limits, PagedJob, play_paged
from reference_schedule import Job, play

from batcher.explaining.story import answer_of, read_requests
from batcher.trace.timeline import Timeline, worst_bubble
from cli.screen.live import ScreenLive
from cli.screen.terminal import Pasted
from cli.screen.theme import ASCII, UNICODE
from cli.views.player import MOVES, Player, StepRange
from cli.views.recording import Recording
from cli.views.story_text import tell

LONG = play([Job(f"r{n}", 3 + n % 7) for n in range(60)], 4).events
LAST = LONG[-1].steps - 1
CROWDED = [PagedJob(f"p{n}", 2, 9) for n in range(6)]


class Seen:
    """A player of some events, and its screen."""

    def __init__(self, run, columns=80, rows=24, glyphs=UNICODE, span=None, **settings):
        recording = Recording.from_events(run)
        encoding = "ascii" if glyphs is ASCII else "utf-8"
        self.screen, self.clock = Screen(columns, rows, encoding=encoding), Clock()
        self.keyboard = Fingers()
        terminal = SimpleNamespace(
            output=self.screen,
            keyboard=self.keyboard,
            display=ScreenLive(self.screen),
            glyphs=glyphs,
        )
        self.player = Player(
            recording,
            "run",
            terminal,
            span=span or StepRange(0, recording.num_steps - 1),
            clock=self.clock,
            **{"step": 0, "found": {}} | settings,
        )
        self.player.look()

    def press(self, *keys):
        self.keyboard.keys += keys
        return self.wait(1.0 if self.player._is_paused else 0.0)

    def wait(self, seconds):
        self.clock.now += seconds
        self.player.look()
        self.clock.now += 1e-9
        return self

    def type(self, key, text):
        self.press(key, *text, "enter")
        return self.wait(1.0)

    @property
    def step(self):
        return self.player.step

    @property
    def text(self):
        return self.screen.text()


def test_steps_follow_each_other_as_fast_as_is_said_up_to_the_end():
    seen = Seen(LONG, speed=4.0)
    assert [seen.wait(0.5).step for _ in range(3)] == [2, 4, 6]
    assert "4 steps/s" in seen.text
    assert "run  step 6  " in seen.text
    assert seen.wait(3600).step == 10  # the process was stopped
    assert seen.press(*"+++++").wait(1.0).wait(1.0).step == LAST
    assert f"paused  {'█' * 10}" in seen.text
    assert "paused  200 steps/s" in seen.press("+").text
    assert "paused  100 steps/s" in seen.press("-").text
    assert "paused  █" in seen.press("x").text
    assert seen.press(" ", *"----").wait(0.5).step == 2  # from the beginning again


def test_a_selected_slot_shows_the_story_of_its_request_so_far():
    run = play_paged(CROWDED, Limits(batch=3, blocks=7))
    [lost, *_] = [e for e in run.events if type(e).__name__ == "PreemptEvent"]
    kept = read_requests(run.events, lost.id)
    whole = tell(answer_of(kept).stories[0])
    [preempted] = [line.strip() for line in whole if f"preempted before step {lost.step} " in line]
    seen = Seen(run.events, 120, 40, step=lost.step - 1).press(" ")
    seen.press(*["down"] * (lost.slot + 1))
    assert "\narrived at step 0 (" in seen.text
    assert f"\nnow it holds slot {lost.slot}\n" in seen.text
    seen.type("/", lost.id).press("g", *str(lost.step), "enter")
    assert f"\n{preempted}\n" in seen.text
    assert "\nnow it waits\n" in seen.text
    assert "\nqueue " in seen.text
    assert "now it" not in seen.press("escape").text


@pytest.mark.parametrize("rows", [19, 24])
def test_a_low_screen_shows_the_waits_of_a_story_and_the_note_of_the_step(rows):
    run = play_paged(CROWDED, Limits(batch=3, blocks=7))
    *_, lost = [e for e in run.events if type(e).__name__ == "PreemptEvent"]
    seen = Seen(run.events, rows=rows, step=lost.step).press(" ").type("/", lost.id)
    text = seen.press("g", *str(lost.step), "enter").text
    assert f"  « {lost.id} preempted for {lost.for_id}  next {lost.id}: blocked by" in text
    story = seen.press(".").text.partition("\n…\n")[2]
    assert re.match(r"waited 1 step (because|for) ", story)
    assert "\nwaited 1 step for KV blocks: it needed 4 of 7, and p4 held the others" in story
    assert not re.search("^(computed|generated)", story, re.MULTILINE)


CAPTIONS = {0: "All slots start.", 7: "word " * 25 + "end", 9: "A slot is refilled."}


def test_a_caption_holds_the_play_until_a_key_and_stays_until_the_next_one():
    seen = Seen(LONG, speed=4.0, captions=CAPTIONS)
    assert seen.screen.lines()[-4:-2] == ["All slots start.", ""]
    assert [seen.wait(1.0).step for _ in range(5)] == [0, 0, 0, 4, 7]
    assert "any key continues" in seen.text
    assert seen.screen.lines()[-4] == ("word " * 16).strip()
    assert seen.screen.lines()[-3].endswith("word end")
    assert seen.press(" ").wait(0.25).step == 8
    assert seen.wait(0.5).step == 9
    assert seen.press("+").wait(1.0).step == 14
    assert seen.screen.lines()[-4:-2] == ["A slot is refilled.", ""]
    assert seen.press(",").screen.lines()[-4:-2] == ["A slot is refilled.", ""]
    assert seen.press("home").screen.lines()[-4] == "All slots start."
    assert "All slots start" not in Seen(LONG, rows=6, captions=CAPTIONS).text


@given(st.lists(st.sampled_from([*MOVES, " ", "+", "-", "]", "[", "?", "up", "escape"])))
def test_keys_go_as_many_steps_as_they_say_and_stay_in_the_run(keys):
    seen, expected = Seen(LONG, rows=8, span=StepRange(5, 30), step=9), 9
    seen.press(" ")
    for key in keys:
        if key == " ":
            continue
        seen.press(key)
        expected = min(max(expected + MOVES.get(key, 0), 5), 30)
        if key in "[]":
            expected = seen.step
        assert seen.step == expected


def test_requests_and_steps_are_found_and_n_goes_through_all():
    seen = Seen(LONG).type("/", "r17")
    [admit] = [e for e in LONG if type(e).__name__ == "AdmitEvent" and e.id == "r17"]
    assert seen.step == admit.step
    assert f"r17 is in slot {admit.slot}" in seen.text
    assert f"{admit.slot}▸r17    ◂" in seen.text
    seen.type("/", "nobody")
    assert "no request with nobody in its id was admitted" in seen.text
    assert seen.step == admit.step
    seen = Seen(LONG).type("/", "r1")  # which one is called as a whole
    assert "r1 is in slot 1" in seen.text
    seen.type("/", "r5")
    assert "no admission that was found after" in seen.press("n").text
    seen.press("home")
    steps = sorted({e.step for e in LONG if type(e).__name__ == "AdmitEvent" and "7" in e.id})
    found = [seen.type("/", "7").step, *(seen.press("n").step for _ in steps[1:])]
    assert found == steps
    assert [seen.press("N").step for _ in steps[1:]] == steps[-2::-1]
    assert Seen(LONG).type("g", "x-1 \x7f,7q").step == 17  # only digits are typed
    seen = Seen(LONG).press("g", "1", Pasted("step 7")).wait(1.0)
    assert "go to step 17" in seen.text
    assert seen.press("enter").step == 17
    assert f"{'9' * 30} is not a step from 0 to {LAST}" in seen.type("g", "9" * 30).text
    assert seen.type("g", "").step == 17
    assert seen.press("g", "3", "escape").step == 17


def test_brackets_go_to_what_is_worth_seeing_up_to_where_a_run_breaks_off():
    run = play_paged(CROWDED, Limits(batch=3, blocks=7))
    lost = sorted({e.step for e in run.events if type(e).__name__ == "PreemptEvent"})
    assert lost
    seen = Seen(run.events)
    bubble = worst_bubble(Timeline.from_events(run.events)).start
    points = sorted({*lost, bubble} - {0})
    assert [seen.press("]").step for _ in points] == points
    assert "no preemption, failure or bubble after" in seen.press("]").text
    assert [seen.press("[").step for _ in points[:-1]] == points[-2::-1]
    seen = Seen(LONG[:40])
    seen.press("end").wait(1.0)
    last = max(getattr(event, "step", 0) for event in LONG[:40])
    assert seen.step == last
    assert f"step {last} " in seen.text
