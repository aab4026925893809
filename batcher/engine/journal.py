"""What an engine has done, as events, in the order in which it happened."""

from collections.abc import Iterable

from batcher.engine.step_log import StepLog
from batcher.events import (
    AdmitEvent,
    AdmitReason,
    ArriveEvent,
    BlockedEvent,
    DropEvent,
    EndReason,
    FinishEvent,
    ForkEvent,
    JumpEvent,
    PreemptEvent,
    PrefillEvent,
    RequestEvent,
)
from batcher.result import Result, StopReason
from batcher.scheduling.clock import Clock
from batcher.scheduling.plan import Hold, PlannedChunk, Preemption
from batcher.scheduling.sequence import NO_SLOT, ScheduledSequence
from batcher.sequence import Sequence


class Journal:
    """Turns what happens to sequences into events, each with the step and time it has now."""

    __slots__ = ("_clock", "_events", "_steps")

    def __init__(self, clock: Clock, steps: StepLog | None) -> None:
        """Keep a journal; `steps`, if there is one, tells what each step has computed."""
        self._clock = clock
        self._steps = steps
        self._events: list[RequestEvent] = []

    def __bool__(self) -> bool:
        return bool(self._events) or (self._steps is not None and self._steps.is_full)

    def take(self) -> list[RequestEvent]:
        """Return the events since the last call; what steps have computed comes before them."""
        events, self._events = self._events, []
        if self._steps is not None and self._steps:
            return [self._steps.take(), *events]
        return events

    def arrived(self, sequence: Sequence) -> None:
        """Tell that a sequence joined the waiting queue, at its own time and not at this one."""
        request = sequence.request
        self._events.append(
            ArriveEvent(
                sequence.arrived_step,
                sequence.arrival_time,
                sequence.id,
                sequence.index,
                sequence.reason,
                sequence.num_prompt_tokens,
                request.max_tokens,
                request.deadline,
            )
        )

    def admitted(
        self, sequence: ScheduledSequence, reason: AdmitReason, num_generated: int
    ) -> None:
        """Tell that a sequence was given its slot, after the step has been planned.

        num_generated: how many tokens it had generated before it was preempted.
        """
        clock = self._clock
        self._events.append(
            AdmitEvent(
                clock.step,
                clock.now,
                sequence.id,
                sequence.index,
                sequence.slot,
                reason,
                sequence.role,
                num_generated,
                sequence.num_cached,
                sequence.num_tokens - sequence.num_computed,
            )
        )

    def computed(self, chunk: PlannedChunk) -> None:
        """Tell of a chunk of a sequence that was admitted before."""
        clock, row = self._clock, chunk.sequence
        self._events.append(
            PrefillEvent(
                clock.step,
                clock.now,
                row.id,
                row.index,
                row.slot,
                chunk.num_tokens,
                row.num_tokens - row.num_computed,
                row.role,
            )
        )

    def preempted(self, row: ScheduledSequence, preemption: Preemption) -> None:
        """Tell that a row lost its slot and what it had computed, for whom and why."""
        clock, beneficiary = self._clock, preemption.beneficiary
        self._events.append(
            PreemptEvent(
                clock.step,
                clock.now,
                row.id,
                row.index,
                row.slot,
                preemption.reason,
                beneficiary.id,
                beneficiary.index,
                preemption.num_computed[row],
                max(row.num_generated, 0),
                row.role,
            )
        )

    def held(self, hold: Hold) -> None:
        """Tell that the first of the queue is not let in, and why."""
        clock, leader = self._clock, hold.leader
        self._events.append(
            BlockedEvent(
                clock.step, clock.now, leader.id, leader.index, hold.reason, hold.num_blocks
            )
        )

    def jumped(self, sequence: Sequence, num_tokens: int) -> None:
        """Tell that a row was given `num_tokens` more than a step gives."""
        clock, slot = self._clock, sequence.slot
        self._events.append(
            JumpEvent(clock.step, clock.now, sequence.id, sequence.index, slot, num_tokens)
        )

    def forked(self, child: Sequence, parent: Sequence) -> None:
        """Tell that a beam goes on as what another one was."""
        clock = self._clock
        self._events.append(
            ForkEvent(clock.step, clock.now, child.id, child.index, child.slot, parent.index)
        )

    def finished(
        self, sequence: Sequence, step: int, reason: EndReason, stop: StopReason, num_tokens: int
    ) -> None:
        """Tell that a sequence ended with `step`, which may be one that is over."""
        clock, slot = self._clock, sequence.slot
        self._events.append(
            FinishEvent(
                step,
                clock.now if step == clock.step else clock.start_of(step),
                sequence.id,
                sequence.index,
                None if slot == NO_SLOT else slot,
                reason,
                stop,
                num_tokens,
                sequence.role,
            )
        )

    def dropped(self, results: Iterable[Result], step: int) -> None:
        """Tell which samples have turned out in `step` not to be among the best."""
        now = self._clock.start_of(step)
        self._events += [DropEvent(step, now, r.id, r.index, r.finish_reason) for r in results]
