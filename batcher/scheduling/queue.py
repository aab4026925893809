"""Sequences on the way to a slot: pending until they arrive, then in the waiting queue.

The policy keeps the waiting queue sorted.  Rule: the first is the same as after sorting all waiting
sequences from scratch.
"""

import reprlib
from bisect import bisect_left, bisect_right, insort
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from heapq import heapify, heappop, heappush
from itertools import chain, islice, takewhile
from math import inf
from operator import attrgetter
from typing import Any, Generic

from msgspec import Struct

from batcher.errors import BatchdecodeError
from batcher.foreign import calling, import_function
from batcher.lifecycle import ARRIVE, State
from batcher.scheduling.clock import BatchStats
from batcher.scheduling.lockstep import RunningBatch
from batcher.scheduling.sequence import NEVER, S, Schedulable
from batcher.settings import PreemptFor, SchedulingSettings

# The policies: each returns a sort key; the smallest goes first.
#
# Rule: a policy only orders sequences; admission and preemption are the same for all policies.
# Ties go to the sequence that joined the queue first: by arrival, then input index, then sample.

Key = Any
Policy = Callable[[Schedulable], Key]

LONGEST_PREFIX_MATCH = "lpm"  # its keys change with the cache


class Candidate(Struct, frozen=True, gc=False):
    """A waiting request as a custom policy sees it; the policy returns its sort key."""

    id: str
    index: int
    arrival_time: float
    prompt_tokens: int
    max_tokens: int
    priority: int
    deadline: float | None
    generated: int


# The number of sequences that joined the waiting queue before.
queue_number: Policy = attrgetter("queue_number")


def _size(sequence: Schedulable) -> int:
    return sequence.num_prompt_tokens + sequence.max_tokens


POLICIES: dict[str, Policy] = {
    "fcfs": queue_number,
    "priority": lambda sequence: (sequence.priority, sequence.queue_number),
    "sjf": lambda sequence: (_size(sequence), sequence.queue_number),
    "ljf": lambda sequence: (-_size(sequence), sequence.queue_number),
    "deadline": lambda sequence: (
        inf if sequence.deadline is None else sequence.deadline,
        sequence.queue_number,
    ),
    LONGEST_PREFIX_MATCH: queue_number,
}


def policy_of(name: str) -> Policy:
    """Return the policy called `name`, or the custom one that `module:function` names.

    Raises:
        BatchdecodeError: there is no such policy.
    """
    if name in POLICIES:
        return POLICIES[name]
    if ":" not in name:
        from difflib import get_close_matches  # noqa: PLC0415 - for a mistake only

        near = get_close_matches(name, POLICIES, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        known = ", ".join(POLICIES)
        raise BatchdecodeError(
            f"unknown policy {name!r}{hint} (known: {known}, or module:function)"
        )
    return _custom_policy(name, import_function(name, "policy", ", ".join(POLICIES)))


def _custom_policy(name: str, own_key: Callable[[Candidate], Any]) -> Policy:
    """Return a policy that sorts by the result of `own_key`.

    The policy raises:
        BatchdecodeError: `own_key` raised, or returned something other than numbers.
    """

    def key(sequence: Schedulable) -> Key:
        who = sequence.id, sequence.index, sequence.arrival_time
        lengths = sequence.num_prompt_tokens, sequence.max_tokens
        urgency = sequence.priority, sequence.deadline
        candidate = Candidate(*who, *lengths, *urgency, sequence.num_generated)
        with calling(f"the policy {name} raised"):
            found = own_key(candidate)
        numbers = found if isinstance(found, tuple) else (found,)
        if not all(isinstance(number, int | float) and number == number for number in numbers):  # noqa: PLR0124 - NaN
            shown = reprlib.repr(found)
            raise BatchdecodeError(
                f"the policy {name} returned {shown}, not a number or a tuple of numbers"
            )
        return numbers, sequence.queue_number

    return key


MAX_GONE = 256  # stale entries of a KeyQueue
MAX_MATCHED = 128  # the longest waiting ones, whose prefixes are looked up

ARRIVAL_ORDER = attrgetter("arrival_time", "input_index", "index")


class WaitingQueue(Generic[S]):
    """Sequences without a slot; those that have arrived are served first come, first served.

    Preempted sequences come first.  The first sequence of a group waits for the slots of the whole
    group.

    num_slots: slots that all waiting sequences need together.
    num_pending: sequences that have not joined the queue yet.
    urgency: the same sequences by urgency, if some may be admitted ahead of others.
    """

    def __init__(self) -> None:
        self.num_slots = self.num_pending = 0
        self.urgency: Urgency[S] | None = None
        self._num_added = self._num_joined = 0
        self._pending: deque[S] = deque()  # by arrival, as they were added
        self._early: list[tuple[float, int, S]] = []  # those added out of order: a heap by arrival
        self._waiting: deque[S] = deque()

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def waiting(self) -> Iterable[S]:
        return self._waiting

    # -- still to come ---------------------------------------------------------------------------

    @property
    def pending(self) -> Iterator[S]:
        early = sorted([entry[-1] for entry in self._early], key=ARRIVAL_ORDER)
        return chain(self._pending, early)

    @property
    def next_arrival(self) -> float | None:
        """The next arrival time, which may have passed; None without pending sequences."""
        time = self._pending[0].arrival_time if self._pending else None
        if self._early and (time is None or self._early[0][0] < time):
            return self._early[0][0]
        return time

    def add(self, sequence: S) -> None:
        """Add a sequence, which joins the queue at its arrival time."""
        self.num_pending += 1
        time = sequence.arrival_time
        if not self._pending or time >= self._pending[-1].arrival_time:
            self._pending.append(sequence)
        else:
            heappush(self._early, (time, self._num_added, sequence))
            self._num_added += 1

    def take_arrivals(self, now: float) -> list[S]:
        """Return the sequences that have arrived since the last call, in order."""
        arrived, pending, early = list[S](), self._pending, self._early
        while pending and pending[0].arrival_time <= now:
            arrived.append(pending.popleft())
        while early and early[0][0] <= now:
            arrived.append(heappop(early)[-1])
        if len(arrived) > 1:
            arrived.sort(key=ARRIVAL_ORDER)
        self.num_pending -= len(arrived)
        for first in arrived:
            first.state = ARRIVE[first.state]
            for other in first.others:
                other.state = ARRIVE[other.state]
        return arrived

    # -- waiting ---------------------------------------------------------------------------------

    def push(self, sequence: S) -> None:
        """Add an arrived or preempted sequence to the waiting queue."""
        if sequence.queue_number == NEVER:
            sequence.queue_number = self._num_joined
            self._num_joined += 1
        self._insert(sequence)
        if self.urgency is not None:
            self.urgency.push(sequence)
        self.num_slots += sequence.num_slots

    def take(self, sequence: S) -> None:
        """Remove a waiting sequence, usually the first."""
        self._discard(sequence)
        if self.urgency is not None:
            self.urgency.remove(sequence)
        self.num_slots -= sequence.num_slots

    def head(self, now: float) -> S | None:  # noqa: ARG002 - as others need it
        """Return the sequence to admit first, or None.

        The others wait even if they would fit; otherwise a large one could wait forever.
        """
        return self._waiting[0] if self._waiting else None

    def upcoming(self, num: int, now: float) -> list[S]:  # noqa: ARG002 - as above
        """Return the first `num` sequences to admit, as far as that depends on the queue."""
        return list(islice(self._waiting, num))

    def steady_until(self, now: float) -> float:  # noqa: ARG002 - as above
        """Return until when the head stays without a push or take; `now`: unknown."""
        return inf

    def last(self, sequences: Iterable[S], now: float) -> S:  # noqa: ARG002 - as above
        """Return the running sequence to preempt first."""
        return max(sequences, key=queue_number)

    def find(self, request_id: str) -> list[S]:
        everything = chain(self.waiting, self.pending)
        return [sequence for sequence in everything if sequence.id == request_id]

    def remove(self, sequence: S) -> None:
        """Remove a waiting or pending sequence."""
        if sequence.state is State.WAITING:
            self.take(sequence)
            return
        self.num_pending -= 1
        self._pending = deque(other for other in self._pending if other is not sequence)
        self._early = [entry for entry in self._early if entry[-1] is not sequence]
        heapify(self._early)

    def _insert(self, sequence: S) -> None:
        waiting, number = self._waiting, sequence.queue_number
        if not waiting or number > waiting[-1].queue_number:
            waiting.append(sequence)
        elif number < waiting[0].queue_number:  # usual after a preemption
            waiting.appendleft(sequence)
        else:
            insort(waiting, sequence, key=queue_number)

    def _discard(self, sequence: S) -> None:
        if self._waiting[0] is sequence:
            self._waiting.popleft()
        else:
            self._waiting.remove(sequence)


class KeyQueue(WaitingQueue[S]):
    """Smallest key first; a sequence that has waited for `aging` seconds comes before that.

    Both orders are heaps of numbers.  Removed entries are skipped at the top, and cleared out once
    they are the majority.
    """

    def __init__(self, policy: Policy, aging: float) -> None:
        super().__init__()
        self._policy, self._aging = policy, aging
        self._numbers: dict[S, int] = {}  # of its valid entries
        self._by_key: list[tuple[Key, int, S]] = []
        self._by_arrival: list[tuple[Key, int, S]] = []
        self._num_pushed = 0

    @property
    def num_waiting(self) -> int:
        return len(self._numbers)

    @property
    def waiting(self) -> Iterable[S]:
        return self._numbers

    def head(self, now: float) -> S | None:
        if not self._numbers:
            return None
        oldest = self._top(self._by_arrival)
        if now - oldest.arrival_time >= self._aging:
            return oldest
        return self._top(self._by_key)

    def steady_until(self, now: float) -> float:
        if not self._numbers:
            return inf
        aged = self._top(self._by_arrival).arrival_time + self._aging
        return aged if aged > now else inf

    def upcoming(self, num: int, now: float) -> list[S]:
        by_arrival = takewhile(
            lambda waiting: now - waiting.arrival_time >= self._aging,
            self._smallest(self._by_arrival),
        )
        found = dict.fromkeys(islice(by_arrival, num))
        found |= dict.fromkeys(islice(self._smallest(self._by_key), num))
        return list(found)[:num]

    def last(self, sequences: Iterable[S], now: float) -> S:
        def key(sequence: S) -> tuple[bool, Key]:
            return now - sequence.arrival_time < self._aging, self._policy(sequence)

        return max(sequences, key=key)

    def _insert(self, sequence: S) -> None:
        number = self._num_pushed
        self._num_pushed += 1
        heappush(self._by_key, (self._policy(sequence), number, sequence))
        heappush(self._by_arrival, (queue_number(sequence), number, sequence))
        self._numbers[sequence] = number

    def _discard(self, sequence: S) -> None:
        there = self._numbers
        del there[sequence]
        if not there or len(self._by_key) + len(self._by_arrival) > 4 * len(there) + MAX_GONE:
            for heap in (self._by_key, self._by_arrival):
                heap[:] = [entry for entry in heap if there.get(entry[2]) == entry[1]]
                heapify(heap)

    def _smallest(self, heap: list[tuple[Key, int, S]]) -> Iterator[S]:
        """Yield the sequences of a heap in order, without sorting all of it."""
        nodes = [(heap[0], 0)] if heap else []
        while nodes:
            (_, number, sequence), place = heappop(nodes)
            if self._numbers.get(sequence) == number:
                yield sequence
            for child in range(2 * place + 1, min(2 * place + 3, len(heap))):
                heappush(nodes, (heap[child], child))

    def _top(self, heap: list[tuple[Key, int, S]]) -> S:
        while self._numbers.get(heap[0][2]) != heap[0][1]:
            heappop(heap)
        return heap[0][2]


class PrefixQueue(WaitingQueue[S]):
    """Longest cached prefix first, among those that have waited longest; aging as in KeyQueue.

    num_cached: returns the number of cached tokens of a sequence.
    """

    def __init__(self, num_cached: Callable[[S], int], aging: float) -> None:
        super().__init__()
        self._num_cached, self._aging = num_cached, aging

    def head(self, now: float) -> S | None:
        oldest = super().head(now)
        if oldest is None or now - oldest.arrival_time >= self._aging:
            return oldest
        return max(islice(self._waiting, MAX_MATCHED), key=self._num_cached)

    def upcoming(self, num: int, now: float) -> list[S]:
        first = self.head(now)
        others = sorted(islice(self._waiting, MAX_MATCHED), key=self._num_cached, reverse=True)
        return [] if first is None else list(dict.fromkeys([first, *others]))[:num]

    def steady_until(self, now: float) -> float:
        return now


def make_queue(settings: SchedulingSettings, num_cached: Callable[[S], int]) -> WaitingQueue[S]:
    """Return the queue for the policy in the settings; num_cached: see PrefixQueue."""
    if settings.policy == LONGEST_PREFIX_MATCH:
        return PrefixQueue(num_cached, settings.aging)
    policy = policy_of(settings.policy)
    return WaitingQueue() if policy is queue_number else KeyQueue(policy, settings.aging)


# --preempt-for: urgent sequences that preempt others, in addition to the order of the queue.
#
# Rule: only strictly less urgent sequences are preempted, by a measure that never changes.  So two
# sequences never preempt each other in turn.

Estimate = Callable[[BatchStats], float]
"""How many seconds a step that computes so much would take."""

MAX_ASKED = 128  # urgent sequences that are checked for victims in a step


class Urgency(Generic[S]):
    """The waiting sequences by urgency.

    measure: a lower priority value, or an earlier deadline, is more urgent.
    max_chunk: the most prompt tokens that a step computes of one sequence.
    """

    def __init__(
        self, queue: WaitingQueue[S], measure: PreemptFor, max_chunk: int, estimate: Estimate
    ) -> None:
        self.measure = measure
        self._queue = queue
        self._key = POLICIES[measure]
        self._by_urgency: list[S] = []
        self._max_chunk, self._estimate = max_chunk, estimate

    def push(self, sequence: S) -> None:
        insort(self._by_urgency, sequence, key=self._key)

    def remove(self, sequence: S) -> None:
        del self._by_urgency[bisect_left(self._by_urgency, self._key(sequence), key=self._key)]

    def last(self, sequences: Iterable[S]) -> S:
        """Return the least urgent sequence; of equals, the one that joined the queue last."""
        return max(sequences, key=self._key)

    def degree(self, sequence: S) -> float:
        """Return the urgency as a number; a smaller one is more urgent."""
        degree: float = self._key(sequence)[0]
        return degree

    def ahead(self, running: Iterable[S], now: float) -> list[S]:
        """Return the waiting sequences that may be admitted ahead of the queue, most urgent first.

        Each is more urgent than a running sequence, or than the head of the queue, which would be
        preempted next if it were admitted before.  Deadlines must not have passed.
        """
        first = self._queue.head(now)
        if first is None:
            return []
        waiting = self._by_urgency
        stop = bisect_left(waiting, max(map(self.degree, (first, *running))), key=self.degree)
        start = 0
        if self.measure == "deadline":
            start = bisect_right(waiting, now, hi=stop, key=self.degree)
        return waiting[start : min(start + MAX_ASKED, stop)]

    def less_urgent(self, first: S, running: Iterable[S]) -> list[S]:
        """Return the running sequences that are less urgent than `first`, least urgent first."""
        own = self.degree(first)
        less = [row for row in running if self.degree(row) > own]
        return sorted(less, key=self._key, reverse=True)

    def is_due(self, first: S, now: float, batch: RunningBatch[S]) -> bool:
        """Whether a waiting sequence cannot wait for another step.

        With deadlines: it would miss its deadline if it began one step later, generated max_tokens,
        and steps took as long as they would now.
        """
        deadline = first.deadline
        if self.measure == "priority" or deadline is None:
            return True
        num_rows, num_read = batch.num_decoding, batch.num_read
        num_tokens, num_left = first.num_tokens, first.max_tokens - first.num_generated
        step = self._estimate(BatchStats(num_rows + 1, num_rows + 1, num_read + num_tokens, 0))
        prompt = self._estimate(
            BatchStats(num_rows + num_tokens, num_rows + 1, num_read, num_tokens**2)
        )
        num_steps = -(-num_tokens // self._max_chunk) + num_left - 1
        return deadline < now + num_steps * step + prompt
