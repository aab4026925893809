"""What an engine has done, as events, in the order in which it happened."""

from collections.abc import Iterable

from batcher.events import (
    AdmitEvent,
    AdmitReason,
    ArriveEvent,
    DropEvent,
    EndReason,
    FinishEvent,
    ForkEvent,
    JumpEvent,
    RequestEvent,
)
from batcher.request import Result, StopReason
from batcher.scheduling.clock import Clock
from batcher.sequence import NO_SLOT, Sequence


class Journal:
    """Turns what happens to sequences into events, each with the step and time it has now."""

    __slots__ = ("_clock", "_events")

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._events: list[RequestEvent] = []

    def __bool__(self) -> bool:
        return bool(self._events)

    def take(self) -> list[RequestEvent]:
        """Return the events since the last call."""
        events, self._events = self._events, []
        return events

    def arrived(self, sequence: Sequence) -> None:
        """Tell that a sequence joined the waiting queue, at its own time and not at this one."""
        request = sequence.request
        self._events.append(
            ArriveEvent(
                sequence.arrived_step,
                request.arrival_time,
                sequence.id,
                sequence.index,
                sequence.reason,
                len(sequence.prompt_tokens),
                request.max_tokens,
            )
        )

    def admitted(self, sequence: Sequence, reason: AdmitReason) -> None:
        """Tell that a sequence was given its slot."""
        clock, slot = self._clock, sequence.slot
        self._events.append(
            AdmitEvent(
                clock.step, clock.now, sequence.id, sequence.index, slot, reason, sequence.role
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
