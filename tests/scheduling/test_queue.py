"""The way to a slot: still to come, arrived, in the queue; and out of it, from wherever."""

import random
from math import inf
from typing import Any

from examples import examples
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from waiting import pending, waiting

from batcher.scheduling.queue import KeyQueue, WaitingQueue
from batcher.scheduling.sequence import Schedulable


def test_the_smallest_key_goes_first_whoever_has_gone_out_of_turn() -> None:
    draw = random.Random(3)
    order: KeyQueue[Schedulable] = KeyQueue(lambda sequence: (sequence.priority,), inf)
    sequences = [waiting(str(number), priority=draw.randrange(10_000)) for number in range(900)]
    for sequence in sequences:
        order.push(sequence)
    draw.shuffle(sequences)
    left = sequences[:100]
    for sequence in sequences[100:]:  # so many that the entries of what has gone are cleared out
        order.take(sequence)
    came = []
    while (first := order.head(0.0)) is not None:
        came.append(first.priority)
        order.take(first)
    assert came == sorted(sequence.priority for sequence in left)


class Queue(RuleBasedStateMachine):
    """Sequences on their way, in plain lists."""

    def __init__(self) -> None:
        super().__init__()
        self.queue = WaitingQueue[Schedulable]()
        self.to_come: list[Schedulable] = []
        self.waiting: list[Schedulable] = []
        self.now, self.num_added = 0.0, 0

    @rule(delay=st.sampled_from([-1.0, 0.0, 2.0]), num_slots=st.integers(1, 3))
    def add(self, delay: float, num_slots: int) -> None:
        sequence = pending(
            f"r{self.num_added % 5}",
            arrival_time=max(0.0, self.now + delay),
            input_index=self.num_added,
            num_slots=num_slots,
        )
        self.num_added += 1
        self.queue.add(sequence)
        self.to_come.append(sequence)

    @rule(delay=st.sampled_from([0.0, 1.0, 3.0]))
    def arrive(self, delay: float) -> None:
        self.now += delay
        come = [sequence for sequence in self.to_come if sequence.arrival_time <= self.now]
        come.sort(key=lambda sequence: (sequence.arrival_time, sequence.input_index))
        assert self.queue.take_arrivals(self.now) == come
        for sequence in come:
            self.to_come.remove(sequence)
            self.queue.push(sequence)
            self.waiting.append(sequence)

    @precondition(lambda self: self.waiting)
    @rule()
    def admit(self) -> None:
        first = self.queue.head(self.now)
        assert first is self.waiting.pop(0)
        self.queue.take(first)

    @precondition(lambda self: self.to_come or self.waiting)
    @rule(data=st.data())
    def abort(self, data: Any) -> None:
        request_id = data.draw(st.sampled_from([s.id for s in self.to_come + self.waiting]))
        found = self.queue.find(request_id)
        of_it = [s for s in self.to_come + self.waiting if s.id == request_id]
        assert sorted(found, key=id) == sorted(of_it, key=id)
        for sequence in found:
            self.queue.remove(sequence)
            (self.to_come if sequence in self.to_come else self.waiting).remove(sequence)

    @invariant()
    def the_counts_are_right(self) -> None:
        queue = self.queue
        assert queue.num_pending == len(self.to_come)
        assert queue.num_waiting == len(self.waiting)
        assert queue.num_slots == sum(sequence.num_slots for sequence in self.waiting)
        times = [sequence.arrival_time for sequence in self.to_come]
        assert queue.next_arrival == min(times, default=None)


TestQueue = Queue.TestCase
TestQueue.settings = settings(examples(100), stateful_step_count=40)
