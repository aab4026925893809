"""Which share of the slots was in use, and what the others were waiting for."""

from collections import Counter
from typing import NamedTuple

from msgspec import Struct

from batcher.events import ArriveEvent, ArriveReason, BlockedReason


class IdleCauses(Struct, frozen=True, omit_defaults=True):
    """Slot-steps without a sequence, by what would have filled them.

    tail: nothing, no later request needed a slot.  arrivals: the next one had its arrival time
    still to come.  empty_queue: the next one had not been sent yet.  too_few: the next one waited
    for more slots at once than were free.  kv, tokens, preemption, batch, rate, concurrency: the
    next one was blocked, see BlockedEvent.
    """

    tail: int
    arrivals: int
    empty_queue: int
    too_few: int
    kv: int = 0
    tokens: int = 0
    preemption: int = 0
    batch: int = 0
    rate: int = 0
    concurrency: int = 0


class _Idle(NamedTuple):
    """So many idle slots in the steps [start, end); reason: what blocked the next, if known."""

    start: int
    end: int
    num_slots: int
    reason: BlockedReason | None


class SlotUse:
    """Busy and idle slot-steps, integrated from one event to the next.

    Which request the idle slots were waiting for is known when the next one is admitted: until then
    they are undecided.
    """

    def __init__(self) -> None:
        self.num_slots = self.num_occupied = 0
        self.integrated_steps = 0
        self.busy = self.num_too_few = 0
        self.idle: Counter[ArriveReason] = Counter()
        self.blocked: Counter[str] = Counter()
        self.undecided: list[_Idle] = []  # of all steps
        self._reason: BlockedReason | None = None

    def go_on_from(self, step: int) -> None:
        """Let the first step be `step`, before there was any."""
        self.integrated_steps = step

    def take(self, step: int, arrive: ArriveEvent) -> None:
        """Occupy a slot from `step` on, with a request that arrived as `arrive` says."""
        if step != self.integrated_steps:
            self._integrate(step)
        if self.undecided:
            self._decide(arrive)
        self._reason = None
        self.num_occupied += 1

    def take_again(self, step: int, preempted: int) -> None:
        """Occupy a slot from `step` on, with a sequence that was preempted before `preempted`.

        Slots that were idle before that were not waiting for it, but for one still to come.
        """
        self.join(step)
        earlier = [
            idle._replace(end=min(idle.end, preempted))
            for idle in self.undecided
            if idle.start < preempted
        ]
        for start, end, num_idle, reason in self.undecided:
            self._count(reason, max(0, end - max(start, preempted)) * num_idle)
        self.undecided = earlier
        self._reason = None

    def join(self, step: int) -> None:
        """Occupy a slot from `step` on, with another sequence of a group that has taken one."""
        if step != self.integrated_steps:
            self._integrate(step)
        self.num_occupied += 1

    def leave(self, step: int) -> None:
        """Free a slot from `step` on."""
        if step != self.integrated_steps:
            self._integrate(step)
        self.num_occupied -= 1

    def block(self, step: int, reason: BlockedReason) -> None:
        """Take note that from `step` on the next one is blocked for `reason`."""
        if step != self.integrated_steps:
            self._integrate(step)
        self._reason = reason

    def totals(self, num_steps: int) -> tuple[int, dict[str, int]]:
        """Return the busy slot-steps of a run of `num_steps`, and the idle ones by cause.

        Those that are of no cause known so far are of the tail.
        """
        busy = self.busy + self.num_occupied * (num_steps - self.integrated_steps)
        return busy, {
            "arrivals": self.idle["input"] + self.idle["turn"],
            "empty_queue": self.idle["follow"],
            "too_few": self.num_too_few,
            **self.blocked,
        }

    def _integrate(self, step: int) -> None:
        """Add up the steps before `step`, in which nothing has changed since the last event."""
        start, self.integrated_steps = self.integrated_steps, step
        self.busy += self.num_occupied * (step - start)
        if self.num_occupied < self.num_slots:
            num_idle = self.num_slots - self.num_occupied
            self.undecided.append(_Idle(start, step, num_idle, self._reason))

    def _decide(self, arrive: ArriveEvent) -> None:
        """Say why slots were idle: first the request had not arrived, then it was blocked."""
        for start, end, num_idle, reason in self.undecided:
            arrived = min(max(start, arrive.step), end)
            self.idle[arrive.reason] += (arrived - start) * num_idle
            self._count(reason, (end - arrived) * num_idle)
        self.undecided.clear()

    def _count(self, reason: BlockedReason | None, slot_steps: int) -> None:
        """Add idle slot-steps of one that waited: it was blocked, or too few were free."""
        if reason is None:
            self.num_too_few += slot_steps
        else:
            self.blocked[reason] += slot_steps
