"""The first of a queue is the first after sorting it anew, and nobody waits for ever."""

from itertools import takewhile
from typing import Any

import pytest
from examples import examples
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from reference_policies import policy_key
from waiting import waiting

from batcher.scheduling.queue import (
    MAX_MATCHED,
    POLICIES,
    KeyQueue,
    PrefixQueue,
    WaitingQueue,
    queue_number,
)
from batcher.scheduling.sequence import Schedulable

AGING = 5.0


def cached(sequence: Schedulable) -> int:
    """Return what stands for how much of a sequence is cached."""
    return sequence.priority * 7 % 5


def make_ordering(policy: str) -> WaitingQueue:
    if policy == "fcfs":
        return WaitingQueue()
    if policy == "lpm":
        return PrefixQueue(cached, AGING)
    return KeyQueue(POLICIES[policy], AGING)


def key_by_the_documentation(policy: str, sequence: Schedulable) -> Any:
    key = policy_key(
        policy,
        num_prompt_tokens=sequence.num_prompt_tokens,
        max_tokens=sequence.max_tokens,
        priority=sequence.priority,
        deadline=sequence.deadline,
        num_cached_tokens=cached(sequence),
    )
    return key, sequence.queue_number


class Queue(RuleBasedStateMachine):
    """A queue that is sorted anew for every question, beside one that is kept up."""

    @initialize(policy=st.sampled_from(list(POLICIES)))
    def start(self, policy: str) -> None:
        self.policy, self.ordering = policy, make_ordering(policy)
        self.waiting: list[Schedulable] = []
        self.running: list[Schedulable] = []
        self.now, self.num_joined = 0.0, 0

    @rule(
        delay=st.sampled_from([0.0, 1.0, 4.0]),
        late=st.sampled_from([0.0, 2.0]),
        priority=st.integers(0, 3),
        sizes=st.tuples(st.integers(1, 4), st.integers(1, 4)),
        deadline=st.sampled_from([None, 3.0, 9.0]),
    )
    def arrive(
        self,
        delay: float,
        late: float,
        priority: int,
        sizes: tuple[int, int],
        deadline: float | None,
    ) -> None:
        self.now += delay
        sequence = waiting(
            f"s{self.num_joined}",
            arrival_time=max(0.0, self.now - late),
            priority=priority,
            num_prompt_tokens=sizes[0],
            max_tokens=sizes[1],
            deadline=deadline,
            queue_number=self.num_joined,
        )
        self.num_joined += 1
        self.push(sequence)

    def push(self, sequence: Schedulable) -> None:
        self.ordering.push(sequence)
        self.waiting.append(sequence)

    @precondition(lambda self: self.waiting)
    @rule()
    def admit(self) -> None:
        first = self.ordering.head(self.now)
        self.ordering.take(first)
        self.waiting.remove(first)
        self.running.append(first)

    @precondition(lambda self: self.running)
    @rule()
    def preempt(self) -> None:
        last = self.ordering.last(self.running, self.now)
        assert last is self.victim()
        self.running.remove(last)
        self.push(last)

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def abort(self, data: Any) -> None:
        sequence = data.draw(st.sampled_from(self.waiting))
        self.ordering.take(sequence)
        self.waiting.remove(sequence)

    def is_aged(self, sequence: Schedulable) -> bool:
        return self.policy != "fcfs" and self.now - sequence.arrival_time >= AGING

    @invariant()
    def the_next_ones_are_in_order(self) -> None:
        if not hasattr(self, "ordering"):
            return
        aged = takewhile(self.is_aged, sorted(self.waiting, key=queue_number))
        if self.policy == "lpm":  # cached prefixes change, so only the first is certain
            aged = filter(None, [self.first()])
        in_order = sorted(
            self.waiting, key=lambda each: key_by_the_documentation(self.policy, each)
        )
        expected = list(dict.fromkeys([*aged, *in_order]))
        for num in (1, 3, len(self.waiting)):
            assert self.ordering.upcoming(num, self.now) == expected[:num]

    def first(self) -> Schedulable | None:
        in_order = sorted(self.waiting, key=queue_number)
        if not in_order or self.is_aged(in_order[0]):
            return in_order[0] if in_order else None
        return min(in_order, key=lambda other: key_by_the_documentation(self.policy, other))

    def victim(self) -> Schedulable:
        if self.policy in {"fcfs", "lpm"}:
            return max(self.running, key=queue_number)
        young = [other for other in self.running if not self.is_aged(other)]
        return max(
            young or self.running, key=lambda other: key_by_the_documentation(self.policy, other)
        )

    @invariant()
    def it_is_the_first_after_sorting(self) -> None:
        if not hasattr(self, "ordering"):
            return
        assert self.ordering.head(self.now) is self.first()
        assert self.ordering.num_waiting == len(self.waiting)
        assert set(self.ordering.waiting) == set(self.waiting)
        assert all(sequence in self.ordering.waiting for sequence in self.waiting)
        assert not any(sequence in self.ordering.waiting for sequence in self.running)

    @invariant()
    def it_stays_the_first_as_long_as_it_is_said_to(self) -> None:
        if not hasattr(self, "ordering") or not self.waiting:
            return
        until = self.ordering.steady_until(self.now)
        assert until >= self.now
        if until > self.now:
            later = min(self.now + 100.0, until)
            before = self.ordering.head(self.now)
            middle = (self.now + later) / 2
            assert self.ordering.head(middle) is before


TestQueue = Queue.TestCase
TestQueue.settings = settings(examples(150), stateful_step_count=40)


@pytest.mark.parametrize("policy", list(POLICIES))
def test_what_has_gone_is_not_kept(policy: str) -> None:
    ordering = make_ordering(policy)
    sequences = [waiting(f"s{number}", queue_number=number, priority=number) for number in range(9)]
    for sequence in sequences:
        ordering.push(sequence)
    for sequence in sequences:
        ordering.take(sequence)
    kept = [getattr(ordering, name, ()) for name in ("_by_key", "_by_arrival", "_numbers")]
    assert [len(part) for part in kept] == [0, 0, 0]
    assert ordering.head(0.0) is None


def test_a_queue_that_never_empties_keeps_no_more_than_what_waits() -> None:
    ordering = make_ordering("sjf")
    ordering.push(waiting("stays", queue_number=0, arrival_time=1e9, num_prompt_tokens=5))
    for number in range(1, 2000):
        sequence = waiting(f"s{number}", queue_number=number, arrival_time=1e9, num_prompt_tokens=9)
        ordering.push(sequence)
        ordering.head(0.0)
        ordering.take(sequence)
    assert len(ordering._by_key) < 500
    assert len(ordering._by_arrival) < 500


def test_the_cache_is_asked_only_for_those_that_have_waited_longest() -> None:
    asked: list[Schedulable] = []

    def num_cached(sequence: Schedulable) -> int:
        asked.append(sequence)
        return sequence.queue_number

    ordering = PrefixQueue(num_cached, AGING)
    sequences = [waiting(f"s{number}", queue_number=number) for number in range(MAX_MATCHED + 9)]
    for sequence in sequences:
        ordering.push(sequence)
    assert ordering.head(0.0) is sequences[MAX_MATCHED - 1]
    assert asked == sequences[:MAX_MATCHED]
