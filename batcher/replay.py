"""Goes through the events of a run to find every stay in a slot and in the queue.

Rule: events that contradict each other are refused where they do.
"""

from collections import Counter, defaultdict
from operator import itemgetter
from typing import NamedTuple, get_args

from msgspec.structs import replace

from batcher.errors import BatchdecodeError, InvariantError
from batcher.events import (
    AdmitEvent,
    ArriveEvent,
    DropEvent,
    EndEvent,
    EndReason,
    Event,
    FinishEvent,
    ForkEvent,
    JumpEvent,
    RejectEvent,
    Role,
    RunEvent,
)
from batcher.stays import Fork, SequenceKey, Span, Wait, key_of, label_of

MAX_SLOTS = 2**20
MAX_STEPS = 2**28
"""Views hold figures for each step of a run, so a longer one has no room in memory."""


class Stays(NamedTuple):
    """All stays of a run.  spans: by their end.  waits: in order of arrival."""

    run: RunEvent
    num_steps: int
    spans: list[Span]
    waits: list[Wait]


class _Finished(NamedTuple):
    """What a sample finished for, and the number of its span; None if it never held a slot."""

    reason: EndReason
    span: int | None


class Replay:
    """Follows a run by its events; an id may come again once all that had it has ended."""

    def __init__(self) -> None:
        self._run: RunEvent | None = None
        self._num_steps = 0
        self._last_step = -1  # of any event, whether it takes a slot or not
        self._num_arrivals = 0
        self._spans: list[Span] = []
        self._numbered_waits: list[tuple[int, Wait]] = []
        self._arrivals: dict[SequenceKey, tuple[int, ArriveEvent]] = {}
        self._admissions: dict[SequenceKey, AdmitEvent] = {}
        self._jumped: Counter[SequenceKey] = Counter()
        self._forks: defaultdict[SequenceKey, list[Fork]] = defaultdict(list)
        self._finished: dict[SequenceKey, _Finished] = {}  # the last of each name

    def close(self) -> Stays:
        """Return the stays; those that have not ended do where the events break off.

        Raises:
            InvariantError: the events do not begin with a run event.
        """
        if self._run is None:
            raise InvariantError("there is no run event")
        for key, admit in self._admissions.items():
            self._leave_slot(key, admit, self._num_steps, None)
        for arrival in self._arrivals.values():
            self._leave_queue(arrival, self._num_steps)
        waits = [wait for _, wait in sorted(self._numbered_waits, key=itemgetter(0))]
        return Stays(self._run, self._num_steps, self._spans, waits)

    def add(self, event: Event) -> None:
        """Take in the next event.

        Raises:
            InvariantError: it contradicts those before it.
            BatchdecodeError: there are more slots or steps than a timeline can hold.
        """
        match event:
            case ArriveEvent():
                key = key_of(event.id, event.index, "sample")
                self._arrivals[key] = self._num_arrivals, event
                self._num_arrivals += 1
            case AdmitEvent():
                self._admit(event)
            case FinishEvent():
                self._finish(event)
            case JumpEvent():
                self._jump(event)
            case ForkEvent():
                self._fork(event)
            case DropEvent():
                self._drop(event)
            case RunEvent():
                self._begin(event)
            case EndEvent():
                self._end(event)
            case RejectEvent() | DropEvent():
                pass  # neither takes a slot: a bad line, and a sample that has left its own

    def _begin(self, event: RunEvent) -> None:
        """Take in what run it is."""
        if not 1 <= event.batch <= MAX_SLOTS:
            raise BatchdecodeError(f"a batch of {event.batch} slots; there are 1 to {MAX_SLOTS}")
        self._run = event

    def _note_step(self, event: AdmitEvent | FinishEvent | JumpEvent | ForkEvent) -> None:
        """Note that the run has come as far as `event`."""
        if not 0 <= event.step < MAX_STEPS:
            raise BatchdecodeError(f"step {event.step}; a timeline has steps 0 to {MAX_STEPS - 1}")
        if event.step > self._last_step:  # noqa: PLR1730 - max() takes twice as long
            self._last_step = event.step
        if event.step >= self._num_steps and event.slot is not None:
            self._num_steps = event.step + 1

    def _admit(self, event: AdmitEvent) -> None:
        """Move a sequence from the queue into its slot."""
        self._note_step(event)
        key = key_of(event.id, event.index, event.role)
        if key in self._admissions:
            raise InvariantError(
                f"{label_of(event.id, event.index, event.role)!r} "
                f"is admitted in step {event.step} while it runs"
            )
        self._admissions[key] = event
        self._finished.pop(key, None)
        self._leave_queue(self._arrivals.pop(key, None), event.step)

    def _jump(self, event: JumpEvent) -> None:
        """Add the tokens that a constraint forced to those of the sequence."""
        self._note_step(event)
        key = self._running(event)
        if event.tokens < 1:
            raise InvariantError(f"{event.id!r} jumps over {event.tokens} tokens")
        self._jumped[key] += event.tokens

    def _fork(self, event: ForkEvent) -> None:
        """Note where a beam goes on from."""
        self._note_step(event)
        key = self._running(event)
        parent = self._admissions.get(key_of(event.id, event.parent, "beam"))
        if self._admissions[key].role != "beam" or parent is None or parent.role != "beam":
            raise InvariantError(
                f"{label_of(event.id, event.index, 'beam')!r} forks in step {event.step} from "
                f"{label_of(event.id, event.parent, 'beam')!r}; both have to be running beams"
            )
        self._forks[key].append(Fork(event.step, event.parent))

    def _drop(self, event: DropEvent) -> None:
        """Note that a sample which has finished has no result."""
        label = label_of(event.id, event.index, "sample")
        finished = self._finished.pop(key_of(event.id, event.index, "sample"), None)
        if finished is None:
            raise InvariantError(f"{label!r} is dropped in step {event.step}, and has not finished")
        reason, number = finished
        if event.reason != reason:
            raise InvariantError(
                f"{label!r} is dropped with the reason {event.reason!r}, not {reason!r}"
            )
        if number is not None:
            self._spans[number] = replace(self._spans[number], dropped=True)

    def _running(self, event: JumpEvent | ForkEvent) -> SequenceKey:
        """Return the key of the sequence that `event` tells of.

        Raises:
            InvariantError: it does not hold the slot of `event` in that step.
        """
        for role in get_args(Role):
            key = key_of(event.id, event.index, role)
            admit = self._admissions.get(key)
            if admit is not None and admit.slot == event.slot and admit.step <= event.step:
                return key
        raise InvariantError(
            f"{label_of(event.id, event.index, 'sample')!r} does not run in slot {event.slot} "
            f"in step {event.step}"
        )

    def _finish(self, event: FinishEvent) -> None:
        """End the stay of a sequence, in its slot or in the queue."""
        self._note_step(event)
        key = key_of(event.id, event.index, event.role)
        if event.role == "sample":
            number = None if event.slot is None else len(self._spans)
            self._finished[key] = _Finished(event.reason, number)
        if event.slot is None:
            self._leave_queue(self._arrivals.pop(key, None), event.step)
            return
        admit = self._admissions.pop(key, None)
        if admit is None or admit.slot != event.slot or admit.role != event.role:
            label = label_of(event.id, event.index, event.role)
            raise InvariantError(f"{label!r} leaves slot {event.slot}, which it does not hold")
        self._leave_slot(key, admit, event.step + 1, event.reason)

    def _end(self, event: EndEvent) -> None:
        """Take in the end of the run."""
        if self._admissions:
            raise InvariantError("the run ends while requests hold slots")
        if not 0 <= event.steps <= self._last_step + 1:
            raise InvariantError(f"{event.steps} steps, but all was over by step {self._last_step}")
        self._num_steps = event.steps

    def _leave_slot(
        self, key: SequenceKey, admit: AdmitEvent, end: int, outcome: EndReason | None
    ) -> None:
        """Record the stay that began with `admit`."""
        jumped = self._jumped.pop(key, 0) if self._jumped else 0
        forks = tuple(self._forks.pop(key, ())) if self._forks else ()
        self._spans.append(
            Span(
                admit.slot,
                admit.id,
                admit.index,
                admit.step,
                end,
                outcome,
                admit.role,
                jumped,
                forks=forks,
            )
        )

    def _leave_queue(self, arrival: tuple[int, ArriveEvent] | None, end: int) -> None:
        """Record a wait, if there was one."""
        if arrival is None:
            return
        number, arrive = arrival
        if arrive.step < 0:
            raise InvariantError(f"{arrive.id!r} arrives in step {arrive.step}")
        if arrive.step < end:
            self._numbered_waits.append((number, Wait(arrive.id, arrive.index, arrive.step, end)))
