"""Steps and times: what starts when, and which step an arrival falls into."""

from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batcher import Engine, Request, SimulatedModel
from batcher.errors import InvariantError
from batcher.scheduling.clock import (
    LINGER_SHARE,
    MAX_LINGER,
    BatchStats,
    ConstantClock,
    FormulaClock,
    PacedClock,
    WallClock,
    ticks_until,
)
from batcher.timing.profiles import step_time_of
from batcher.timing.step_time import TICKS_PER_SECOND

MOVES = st.lists(st.one_of(st.integers(1, 6), st.floats(0.01, 50)), max_size=12)


def clock_after(moves):
    """A clock that took steps (int) and jumps (float), and the start of each step it counted."""
    clock, starts = ConstantClock(), []
    for move in moves:
        if isinstance(move, int):
            for _ in range(move):
                starts.append(clock.now)
                clock.advance(None)
        else:
            clock.jump(clock.now + move)
    return clock, starts


@given(MOVES, st.floats(0, 1))
def test_step_at_is_the_first_step_that_starts_then_or_later(moves, part):
    clock, starts = clock_after(moves)
    time = clock.now * part
    later = [step for step, start in enumerate([*starts, clock.now]) if start >= time]
    assert clock.step_at(time) == later[0]


@given(MOVES)
def test_start_of_gives_every_start_again(moves):
    clock, starts = clock_after(moves)
    assert [clock.start_of(step) for step in range(len(starts))] == starts
    assert [clock.step_at(start) for start in starts] == list(range(len(starts)))
    assert clock.start_of(clock.step) == clock.now


class OddTime:
    """Steps of a third of a nanosecond for each token, and a bit."""

    name = "odd"
    settings: dict[str, Any] = {"a": 1}  # noqa: RUF012 - as StepTime has it

    def ticks(self, num_tokens, num_sequences, kv_read, prefill_work):
        return 1 + 333_333 * num_tokens + num_sequences + kv_read + 2 * prefill_work

    def ticks_of_decodes(self, num_sequences, kv_read, num_steps):
        raise NotImplementedError

    def num_decodes_until(self, num_sequences, kv_read, ticks):
        raise NotImplementedError


BATCH_STATS = st.builds(BatchStats, *[st.integers(0, 10**6)] * 4)


@given(st.lists(st.one_of(BATCH_STATS, st.floats(1e-9, 1e4)), max_size=20))
def test_a_formula_counts_whole_ticks_and_loses_none(moves):
    clock, ticks, starts = FormulaClock(OddTime()), 0, [0]
    for move in moves:
        if isinstance(move, BatchStats):
            clock.advance(move)
            ticks += OddTime().ticks(*move)
            starts.append(ticks)
        else:
            arrival = clock.now + move
            if arrival <= clock.now:
                continue
            clock.jump(arrival)
            assert Fraction(clock.ticks, TICKS_PER_SECOND) >= Fraction(arrival), "before it"
            assert Fraction(clock.ticks - 1, TICKS_PER_SECOND) < Fraction(arrival)
            ticks = starts[-1] = clock.ticks
        assert clock.ticks == ticks
    assert clock.step == len(starts) - 1
    assert [clock.start_of(step) for step in range(len(starts))] == [
        start / TICKS_PER_SECOND for start in starts
    ]
    assert clock.now == clock.start_of(clock.step)


@given(st.lists(BATCH_STATS, min_size=1, max_size=9), st.floats(0, 1))
def test_a_step_of_a_formula_is_found_by_its_time(loads, part):
    clock, starts = FormulaClock(OddTime()), [0.0]
    for load in loads:
        clock.advance(load)
        starts.append(clock.now)
    time = clock.now * part
    assert clock.step_at(time) == next(step for step, at in enumerate(starts) if at >= time)


@pytest.mark.parametrize("make", [ConstantClock, lambda: FormulaClock(OddTime())])
def test_no_clock_goes_back(make):
    clock = make()
    clock.jump(2.0)
    for time in (1.5, 2.0):
        with pytest.raises(InvariantError, match="cannot jump"):
            clock.jump(time)


def test_a_formula_that_nobody_feeds_is_found_out():
    with pytest.raises(InvariantError, match="measured"):
        FormulaClock(OddTime()).advance(None)


def test_clocks_tell_what_reproduces_their_times():
    assert ConstantClock().settings == {}
    assert FormulaClock(OddTime()).settings == {"name": "odd", "a": 1}
    assert WallClock().settings == {"name": "wall"}


def test_each_clock_estimates_how_long_a_step_would_take():
    load, step_time = BatchStats(40, 3, 500, 1369), step_time_of("rtx4090_llama3.1-8b")
    assert ConstantClock().estimate(load) == 1.0
    formula = FormulaClock(step_time)
    expected = formula.estimate(load)
    formula.advance(load)
    assert formula.now == expected
    timer = FakeTime()
    wall = timer.clock()
    assert wall.estimate(load) == 0.0, "nothing is known yet"
    timer.time += 0.25
    wall.advance(None)
    timer.time += 0.5
    wall.advance(None)
    assert wall.estimate(load) == 0.5, "as long as the last one"


@given(st.floats(0, 1e6))
def test_ticks_until_a_time_are_the_fewest_that_reach_it(time):
    ticks = ticks_until(time)
    assert Fraction(ticks - 1, TICKS_PER_SECOND) < Fraction(time)
    assert Fraction(ticks, TICKS_PER_SECOND) >= Fraction(time)


class FakeTime:
    """A timer that passes only when it is told, or slept on; it wakes up early once."""

    def __init__(self):
        self.time = 1000.0
        self.slept = []

    def measure(self):
        return self.time

    def sleep(self, seconds):
        self.slept.append(seconds)
        self.time += seconds / 2 if len(self.slept) == 1 else seconds

    def clock(self):
        clock = WallClock(self.measure, self.sleep)
        assert clock.step_at(0.0) == 0  # which starts it
        return clock


def test_the_wall_shows_how_long_it_has_been():
    timer = FakeTime()
    clock = timer.clock()
    timer.time += 0.25
    clock.advance(None)
    timer.time += 0.5
    clock.advance(None)
    assert (clock.step, clock.now, clock.start_of(1)) == (2, 0.75, 0.25)
    assert [clock.step_at(time) for time in (0.0, 0.1, 0.25, 0.3)] == [0, 1, 1, 2]


def test_the_wall_sleeps_until_an_arrival_and_again_if_it_wakes_up_early():
    timer = FakeTime()
    clock = timer.clock()
    clock.jump(8.0)
    assert timer.slept == [8.0, 4.0]
    assert (clock.step, clock.now) == (0, 8.0)


def test_the_wall_does_not_sleep_when_it_is_late():
    timer = FakeTime()
    clock = timer.clock()
    timer.time += 9.0
    clock.jump(8.0)
    assert timer.slept == []
    assert clock.now == 9.0


def test_a_wall_that_goes_back_stands_still():
    timer = FakeTime()
    clock = timer.clock()
    timer.time += 5.0
    clock.advance(None)
    timer.time -= 3.0
    clock.advance(None)
    assert (clock.now, clock.start_of(1)) == (5.0, 5.0)


def test_an_engine_on_the_wall_waits_for_arrivals():
    timer = FakeTime()
    engine = Engine(SimulatedModel(), 2, clock=WallClock(timer.measure, timer.sleep))
    engine.add(Request(prompt="a", max_tokens=2, arrival_time=0.0))
    engine.add(Request(prompt="a", max_tokens=2, arrival_time=30.0))
    results = []
    while engine.has_work:
        timer.time += 0.125
        results += engine.step().results
    assert len(results) == 2
    assert sum(timer.slept) > 20
    assert engine.now >= 30.0


NOTHING = BatchStats(0, 0, 0, 0)


def paced(timer, seconds="constant:0.5", max_kept=None):
    """A clock on a wall that a test moves."""
    timer.time = 0.0  # of which nothing is lost by rounding
    return PacedClock(step_time_of(seconds), max_kept, timer.measure, timer.sleep)


def test_a_paced_step_ends_when_its_time_has_come_on_the_wall():
    timer = FakeTime()
    clock = paced(timer)
    timer.time += 0.2  # what the computation took
    clock.advance(NOTHING)
    assert (clock.now, clock.elapsed()) == (0.5, 0.5)
    timer.time += 2.0
    clock.advance(NOTHING)
    assert (clock.now, clock.elapsed()) == (1.0, 2.5), "late, and not waited for"
    clock.advance(NOTHING)
    clock.jump(4.0)
    assert (clock.now, clock.elapsed()) == (4.0, 4.0)


def test_a_paced_clock_lingers_for_what_has_come_and_ends_no_step_the_later():
    timer = FakeTime()
    clock = paced(timer)
    clock.linger()
    assert clock.elapsed() == 0, "before the first step nothing can have come"
    clock.advance(NOTHING)
    clock.linger()
    assert clock.elapsed() == pytest.approx(0.5 + MAX_LINGER)
    clock.advance(NOTHING)
    assert clock.elapsed() == pytest.approx(1.0)
    short = paced(timer, "constant:0.001")
    short.advance(NOTHING)
    short.linger()
    assert short.elapsed() == pytest.approx(0.001 * (1 + LINGER_SHARE))


@pytest.mark.parametrize("max_kept", [2, 3, 8])
def test_a_clock_that_forgets_knows_the_last_steps(max_kept):
    forgetting, whole = (
        FormulaClock(step_time_of("constant:0.5"), max_kept),
        FormulaClock(step_time_of("constant:0.5")),
    )
    for _ in range(30):
        for clock in (forgetting, whole):
            clock.advance(NOTHING)
        first = whole.step - max_kept // 2 + 1
        for step in range(max(first, 0), whole.step + 1):
            start = whole.start_of(step)
            assert forgetting.start_of(step) == start
            assert forgetting.step_at(start) == whole.step_at(start) == step
    assert len(forgetting._starts) < max_kept
