"""What policies ask for, how fast it is followed, and the life that replicas have of it."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jobs import workload_of_jobs

from batcher.errors import BatchdecodeError, InvariantError
from batcher.planning.fleet import RouterQueue
from batcher.planning.management import (
    Autoscale,
    Autoscaler,
    FleetState,
    by_attainment,
    policy_of,
    proportional,
)
from batcher.planning.replicas import MOVES, PAID, Life, ReplicaState, timeline_of
from batcher.planning.simulated_sequence import Turns


def state_of(serving, starting=0, time=0.0, **given):
    counts = dict.fromkeys(("running", "waiting", "ended", "good", "refused"), 0)
    return FleetState(time=time, serving=serving, starting=starting, slots=8, **(counts | given))


@pytest.mark.parametrize(
    ("load", "serving", "starting", "wanted"),
    [
        (5.0, 10, 0, 10),  # on target
        (5.4, 10, 0, 10),  # within the tolerance
        (5.6, 10, 0, 12),
        (4.6, 10, 0, 10),
        (4.0, 10, 0, 8),
        (5.6, 10, 2, 12),  # two that start will do
        (7.0, 10, 2, 14),
        (4.0, 10, 2, 10),  # those that start are on target
        (0.0, 0, 3, 3),  # nobody serves
    ],
)
def test_replicas_are_in_proportion_to_the_load(load, serving, starting, wanted):
    assert proportional(load, 0.5, 0.1, state_of(serving, starting)) == wanted


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ({"starting": 1, "ended": 10}, 5),  # no more while some start
        ({"ended": 100, "good": 99}, 3),
        ({"ended": 100, "good": 90}, 5),  # 4 · 0.99 / 0.9
        ({"ended": 90, "good": 90, "refused": 10}, 5),
        ({"ended": 100, "good": 10}, 8),
        ({"refused": 10}, 8),
        ({}, 3),
    ],
)
def test_attainment_asks_for_more_by_what_is_missed(given, wanted):
    assert by_attainment(0.99, state_of(4, **given)) == wanted


def test_policies_go_by_slots_in_use_or_by_who_waits():
    state = state_of(4, running=32, waiting=12)
    assert policy_of(Autoscale(policy="target-utilisation", target=0.5, max=9))(state) == 8
    assert policy_of(Autoscale(policy="queue", target=2.0, max=9))(state) == 6


def test_a_policy_of_ones_own(tmp_path, monkeypatch):
    (tmp_path / "scaling_of_mine.py").write_text(
        "def by_time(state):\n    return 5 if state.time < 10 else 'many'\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    scaler = Autoscaler(Autoscale(policy="scaling_of_mine:by_time", max=4))
    assert scaler.decide(state_of(2)) == 4
    with pytest.raises(BatchdecodeError, match="'many', not a number of replicas"):
        scaler.decide(state_of(2, time=10.0))


def test_replicas_go_once_nothing_has_asked_for_them_during_the_cooldown():
    scaler = Autoscaler(Autoscale(policy="queue", target=1.0, max=9, cooldown=30.0))
    asked = [(0.0, 6), (10.0, 2), (20.0, 4), (30.0, 1), (40.0, 1), (50.0, 1), (60.0, 1)]
    number, decided = 6, []
    for time, waiting in asked:
        number = scaler.decide(state_of(number, time=time, waiting=waiting))
        decided.append(number)
    assert decided == [6, 6, 6, 6, 4, 4, 1]


def test_a_replica_moves_as_the_table_says_and_time_does_not_go_back():
    for before, allowed in MOVES.items():
        for after in ReplicaState:
            life = Life(before, 1.0)
            if after in allowed:
                life.move(after, 1.0)
                assert life.state is after
            else:
                with pytest.raises(InvariantError):
                    life.move(after, 1.0)
    with pytest.raises(InvariantError):
        Life(ReplicaState.STARTING, 1.0).move(ReplicaState.SERVING, 0.5)


@given(st.lists(st.lists(st.integers(0, 5), min_size=1, max_size=6), min_size=1, max_size=4))
def test_a_timeline_is_what_all_lives_are_at_each_time(gaps):
    lives = []
    for steps in gaps:
        life, time = Life(ReplicaState.STARTING, steps[0]), steps[0]
        for gap in steps[1:]:
            time += gap
            allowed = sorted(MOVES[life.state], key=lambda state: state.value)
            if allowed:
                life.move(allowed[gap % len(allowed)], time)
        lives.append(life)
    timeline = timeline_of(lives, 40.0)
    for moment in range(41):
        now = [[s for since, s in life.moves if since <= moment][-1:] for life in lives]
        states = [each[0] for each in now if each]
        told = [entry[1:] for entry in timeline if entry[0] <= moment][-1:] or [(0, 0)]
        assert told == [
            (states.count(ReplicaState.SERVING), sum(state in PAID for state in states))
        ]
    assert all(one[1:] != other[1:] for one, other in pairwise(timeline))


def test_who_waits_at_the_router_again_may_wait_as_long_again():
    (sequence,) = Turns(workload_of_jobs([0.0], [1])).sequences
    queue = RouterQueue(1, 5.0)
    queue.push(sequence, 0.0)
    assert queue.pop() is sequence
    queue.push(sequence, 3.0)  # lost in between
    assert queue.pop_late(5.0) == []
    assert queue.pop_late(8.0) == [sequence]
