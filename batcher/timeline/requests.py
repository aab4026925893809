"""What happened to each sequence of a run, folded from its events one by one.

Rule: every reader of events reads it from here and keeps no sequences of its own.  Only those that
have not ended are kept, and events that contradict each other are refused where they do.
"""

from collections.abc import Callable, Iterable
from typing import Any, get_args

from msgspec import Struct

from batcher.errors import InvariantError
from batcher.events import (
    AdmitEvent,
    ArriveEvent,
    BlockedEvent,
    Event,
    FinishEvent,
    ForkEvent,
    JumpEvent,
    PreemptEvent,
    PrefillEvent,
    Role,
    StepsEvent,
)
from batcher.timeline.records import (
    Fork,
    Preemption,
    SequenceKey,
    SlotSpan,
    SpanOutcome,
    is_follower,
    key_of,
    label_of,
)


class Admission(Struct, gc=False):
    """What came of an admission, up to the preemption or the end of the sequence.

    waits_from: when it had joined the queue.
    left: how many tokens are left to compute before it generates.
    first_token: the step that was through with what it began with; None while none was.
    chunks: the steps after the admission that computed tokens of that.  forks: by step.  None for
    none: most have neither, and a list for each would take time.
    num_still: how many steps after that one gave it no token.
    has_jumped: whether a constraint has forced tokens on it that are not known to be computed.
    """

    event: AdmitEvent
    waits_from: int
    left: int
    first_token: int | None
    chunks: list[int] | None = None
    num_jumped: int = 0
    num_still: int = 0
    has_jumped: bool = False
    forks: list[Fork] | None = None
    preempt: PreemptEvent | None = None


class RequestTimeline(Struct, gc=False, eq=False):
    """A sequence on its way through a run; the first of a sequence group stands for all of it.

    arrive: None if the events begin later, if it was aborted before, or came along with another.
    waits_from, number: when it joined the queue last, and as which of all that did.
    admission: the one by which it holds a slot, or did when it ended; None while it waits.
    finish: None while it has not ended.
    max_tokens: how many it may generate; 0 for a negative prompt.
    num_rows: how many slots its group takes at once.
    The times of its tokens, in seconds, where somebody follows them (see metrics.latencies) -
    queue, ttft: from its arrival to its admission and its first token.  last_token: when it was
    given the last one while it was not decoding, or before it began to.  ended: the end of its last
    step.
    """

    id: str
    index: int
    role: Role
    arrive: ArriveEvent | None = None
    waits_from: int = 0
    number: int = 0
    max_tokens: int = 0
    admissions: list[Admission] = []
    admission: Admission | None = None
    finish: FinishEvent | None = None
    num_rows: int = 1
    queue: float | None = None
    ttft: float | None = None
    last_token: float = 0.0
    is_decoding: bool = False
    ended: float | None = None

    @property
    def label(self) -> str:
        """What the sequence is called."""
        return label_of(self.id, self.index, self.role)

    @property
    def first_event(self) -> ArriveEvent | AdmitEvent | FinishEvent | None:
        """The event that made it known."""
        return self.arrive or (self.admissions[0].event if self.admissions else self.finish)

    @property
    def first_token(self) -> int | None:
        """The step that gave its first token; None while none has."""
        for admission in reversed(self.admissions):
            if not admission.event.generated:
                return admission.first_token
        return None

    def tokens_after(self, step: int) -> int:
        """Return how many tokens it has after `step`, the last one that was made.

        A beam has made as many as it had steps, whatever it passes on as a result.
        """
        if not self.admissions or self.role == "negative":
            return 0
        admission = self.admissions[-1]
        if admission.preempt is not None:
            return admission.preempt.generated
        if self.finish is not None:
            if self.role != "beam":
                return self.finish.tokens
            step = self.finish.step
        start = step + 1 if admission.first_token is None else admission.first_token
        num_steps = step + 1 - start - admission.num_still
        return num_steps + admission.event.generated + admission.num_jumped

    def end(self, num_steps: int) -> int:
        """Return the step after its last one, of a run of `num_steps`."""
        if self.finish is None:
            return num_steps
        return min(self.finish.step + (self.admission is not None), num_steps)

    def steps(self, num_steps: int) -> range:
        """Return the steps from its arrival to its end, of a run of `num_steps`."""
        return range(self.arrive.step, self.end(num_steps)) if self.arrive else range(0)

    def slot_span(self, admission: Admission, end: int, outcome: SpanOutcome | None) -> SlotSpan:
        """Return the span that began with one of its admissions."""
        admit, preempt = admission.event, admission.preempt
        first_token = end - 1 if admission.first_token is None else admission.first_token
        return SlotSpan(
            admit.slot,
            admit.id,
            admit.index,
            admit.step,
            end,
            outcome,
            admit.role,
            admission.num_jumped,
            forks=tuple(admission.forks or ()),
            prefill=first_token + 1 - admit.step,
            cached=admit.cached,
            generated=admit.generated,
            resumed=admission is not self.admissions[0],
            preemption=None if preempt is None else Preemption.by(preempt),
        )


class RequestFold:
    """Takes in the events of a run; an id may come again once all that had it has ended.

    blocked: why the first of the waiting queue is not let in; None if nothing keeps it.
    slots: the newest sequence of each slot that was used.
    ended, preempted: the sequences that did, and the admissions that are over by that, since
    somebody took them from here; None if nobody does.
    """

    def __init__(self) -> None:
        self._takers: dict[type[Event], Callable[[Any], RequestTimeline | None]] = {
            ArriveEvent: self.arrive,
            AdmitEvent: self.admit,
            PrefillEvent: self._compute,
            PreemptEvent: self._preempt,
            BlockedEvent: self._block,
            JumpEvent: self._jump,
            ForkEvent: self._fork,
            FinishEvent: self.finish,
            StepsEvent: self._tell,
        }
        self._open: dict[SequenceKey, RequestTimeline] = {}
        self._num_joined = 0
        self.blocked: BlockedEvent | None = None
        self.slots: dict[int, RequestTimeline] = {}
        self.ended: list[RequestTimeline] | None = None
        self.preempted: list[tuple[RequestTimeline, Admission]] = []

    @property
    def open(self) -> Iterable[RequestTimeline]:
        """The sequences that have not ended."""
        return self._open.values()

    def take(self, event: Event) -> RequestTimeline | None:
        """Take in the next event, and return the sequence that it tells of, if it is of one.

        Raises:
            InvariantError: it contradicts those before it.
        """
        taker = self._takers.get(type(event))
        return None if taker is None else taker(event)

    def arrive(self, event: ArriveEvent) -> RequestTimeline:
        """Let a sequence join the queue."""
        if event.step < 0:
            raise InvariantError(f"{event.id!r} arrives in step {event.step}")
        self._num_joined = number = self._num_joined + 1
        found = RequestTimeline(
            event.id, event.index, "sample", event, event.step, number, event.max_tokens
        )
        self._open[(event.id, event.index, "sample") if event.index else event.id] = found
        return found

    def admit(self, event: AdmitEvent) -> RequestTimeline:
        """Move a sequence from the queue into its slot."""
        is_first = not event.index and event.role != "negative"
        key = event.id if is_first else (event.id, event.index, event.role)
        found = self._open.get(key)
        if found is None:  # of those that came along, or events that begin in the middle
            found = self._open[key] = RequestTimeline(event.id, event.index, event.role)
        if not is_first and is_follower(event):
            self._join(event, found)
        elif self.blocked is not None:
            self._unblock(event)
        if found.admission is not None or (event.generated and not found.admissions):
            was = "while it runs"
            if found.admission is None:
                was = f"with {event.generated} tokens of its own, but was not preempted"
            raise InvariantError(f"{found.label!r} is admitted in step {event.step} {was}")
        if event.left < 0:
            raise InvariantError(f"{found.label!r} is admitted with {event.left} tokens left")
        found.role = event.role
        first_token = None if event.left else event.step
        found.admission = Admission(event, found.waits_from, event.left, first_token)
        found.admissions.append(found.admission)
        self.slots[event.slot] = found
        return found

    def finish(self, event: FinishEvent) -> RequestTimeline:
        """End a sequence, in its slot or in the queue."""
        is_first = not event.index and event.role != "negative"
        key = event.id if is_first else (event.id, event.index, event.role)
        found = self._open.pop(key, None)
        if found is None:
            found = RequestTimeline(event.id, event.index, event.role)
        admission = found.admission
        if admission is not None:
            if admission.event.slot != event.slot or found.role != event.role:
                raise _not_held(event, "leaves")
            if admission.left and event.reason in {"stop", "length"}:
                raise InvariantError(
                    f"{found.label!r} ends ({event.reason}) before its prompt was computed"
                )
        elif event.slot is not None and not found.admissions:
            raise _not_held(event, "leaves")
        elif self.blocked is not None:
            self._unblock(event)
        found.finish = event
        if self.ended is not None:
            self.ended.append(found)
        return found

    def _join(self, event: AdmitEvent, found: RequestTimeline) -> None:
        """Count one that comes along with the first of its group."""
        leader = self._open.get(key_of(event.id, leader_index(event.index, event.role), "sample"))
        if leader is not None:
            leader.num_rows += len(leader.admissions) == 1
            found.max_tokens = leader.max_tokens if event.role == "beam" else 0

    def _unblock(self, event: AdmitEvent | FinishEvent) -> None:
        """Forget what blocked a sequence that waits no more."""
        blocked = self.blocked
        if blocked is not None and blocked.id == event.id and blocked.index == event.index:
            self.blocked = None

    def _compute(self, event: PrefillEvent) -> RequestTimeline:
        """Take in what a step computed of a sequence after the step of its admission."""
        found, admission = self._holding(event, "computes in")
        left = admission.left
        if not left and admission.has_jumped:
            left = event.tokens + event.left
        is_late = event.step > admission.event.step
        if not is_late or event.tokens < 1 or left - event.tokens != event.left:
            raise InvariantError(
                f"{found.label!r} computes {event.tokens} tokens in step {event.step} and leaves "
                f"{event.left}, but {left} were left"
            )
        admission.left, admission.has_jumped = event.left, False
        admission.chunks = admission.chunks or []
        admission.chunks.append(event.step)
        if admission.first_token is not None:
            admission.num_still += event.left > 0
        elif not event.left:
            admission.first_token = event.step
        return found

    def _preempt(self, event: PreemptEvent) -> RequestTimeline:
        """Move a sequence from its slot back into the queue."""
        found, admission = self._holding(event, "is preempted in")
        if event.step <= admission.event.step:
            raise InvariantError(
                f"{found.label!r} is preempted in step {event.step}, "
                f"but was admitted in {admission.event.step}"
            )
        admission.preempt, found.admission = event, None
        found.waits_from = event.step
        if not is_follower(event):
            self._num_joined += 1
            found.number = self._num_joined
        if self.ended is not None:
            self.preempted.append((found, admission))
        return found

    def _block(self, event: BlockedEvent) -> RequestTimeline:
        """Take note of why the first of the queue is not let in."""
        found = self._open.get(key_of(event.id, event.index, "sample"))
        label = label_of(event.id, event.index, "sample")
        if found is None or found.admission is not None:
            raise InvariantError(f"{label!r} is held in step {event.step}, but does not wait")
        if self.blocked is not None and event.step < self.blocked.step:
            raise InvariantError(f"{label!r} is held in step {event.step}, after a later one")
        self.blocked = event
        return found

    def _jump(self, event: JumpEvent) -> RequestTimeline:
        """Add the tokens that a constraint forced to those of a sequence."""
        found, admission = self._in_slot(event)
        if event.tokens < 1:
            raise InvariantError(f"{event.id!r} jumps over {event.tokens} tokens")
        admission.num_jumped += event.tokens
        admission.has_jumped = True
        partner = self._open.get((event.id, event.index, "negative"))
        if partner is not None and partner.admission is not None:
            partner.admission.has_jumped = True
        return found

    def _fork(self, event: ForkEvent) -> RequestTimeline:
        """Note where a beam goes on from."""
        found, admission = self._in_slot(event)
        parent = self._open.get(key_of(event.id, event.parent, "beam"))
        is_beam = parent is not None and parent.admission is not None and parent.role == "beam"
        if found.role != "beam" or not is_beam:
            raise InvariantError(
                f"{found.label!r} forks in step {event.step} from "
                f"{label_of(event.id, event.parent, 'beam')!r}; both have to be running beams"
            )
        admission.forks = admission.forks or []
        admission.forks.append(Fork(event.step, event.parent))
        return found

    def _tell(self, event: StepsEvent) -> None:
        """Count the steps that computed prompts alone, in which those that generate stood still."""
        if 0 not in event.decodes:
            return
        for step, num_decodes in enumerate(event.decodes, event.step):
            for found in self.slots.values() if not num_decodes else ():
                admission = found.admission
                if admission is not None and found.finish is None:
                    first_token = admission.first_token
                    admission.num_still += first_token is not None and first_token < step

    def _holding(
        self, event: PrefillEvent | PreemptEvent, verb: str
    ) -> tuple[RequestTimeline, Admission]:
        """Return the sequence of `event` and how it came to the slot that it tells of.

        Raises:
            InvariantError: it does not hold that slot; `verb` says what it does there.
        """
        found = self._open.get(key_of(event.id, event.index, event.role))
        if found is not None and found.admission is not None:
            admit = found.admission.event
            if admit.slot == event.slot and admit.role == event.role:
                return found, found.admission
        raise _not_held(event, verb)

    def _in_slot(self, event: JumpEvent | ForkEvent) -> tuple[RequestTimeline, Admission]:
        """Return the sequence that `event` tells of, of whatever role, and its admission.

        Raises:
            InvariantError: it does not hold the slot of `event` in that step.
        """
        for role in get_args(Role):
            found = self._open.get(key_of(event.id, event.index, role))
            admission = None if found is None else found.admission
            if found is not None and admission is not None:
                admit = admission.event
                if admit.slot == event.slot and admit.step <= event.step:
                    return found, admission
        raise InvariantError(
            f"{label_of(event.id, event.index, 'sample')!r} does not run in slot {event.slot} "
            f"in step {event.step}"
        )


def _not_held(event: PrefillEvent | PreemptEvent | FinishEvent, verb: str) -> InvariantError:
    """Return the complaint about a sequence that does something in a slot that is not its own."""
    label = label_of(event.id, event.index, event.role)
    return InvariantError(f"{label!r} {verb} slot {event.slot}, which it does not hold")


def leader_index(index: int, role: Role) -> int:
    """Return the index of the first of the group that a sequence of this index and role is in."""
    return 0 if role == "beam" else index
