"""Folds the events of a run, one by one, into what happened to each of its sequences.

Rule: every reader of events reads it from here and keeps no sequences of its own.  Only those that
have not ended are kept, and events that contradict each other are refused where they do.
"""

from collections.abc import Callable, Collection
from typing import Any, get_args

from msgspec import Struct

from batcher.errors import InvariantError
from batcher.events import (
    AcceptEvent,
    AdmitEvent,
    ArriveEvent,
    BlockedEvent,
    DraftEvent,
    DropEvent,
    Event,
    FinishEvent,
    ForkEvent,
    JumpEvent,
    PreemptEvent,
    PrefillEvent,
    ReceiveEvent,
    RejectEvent,
    RestartEvent,
    RetryEvent,
    Role,
    RollbackEvent,
    SpeculateEvent,
    StepsEvent,
)
from batcher.trace.drafts import DraftRecord, StepDrafts
from batcher.trace.records import (
    AdmissionRecord,
    Fork,
    RequestTimeline,
    SequenceKey,
    first_index,
    is_follower,
    key_of,
    label_of,
)


class FoldNews(Struct):
    """What a fold has come to know, in the order in which it did.

    ended: the sequences that have.  preempted: those that were, with the admission that is over.
    samples: those that have arrived beside the first of their requests.
    withdrawn: the lines that were no requests, and the samples that are no results.
    restarts: the workers that were replaced.  drafts: of the steps that verified some.
    """

    ended: list[RequestTimeline] = []
    preempted: list[tuple[RequestTimeline, AdmissionRecord]] = []
    samples: list[ArriveEvent] = []
    withdrawn: list[RejectEvent | DropEvent] = []
    restarts: list[RestartEvent] = []
    drafts: list[StepDrafts] = []


class RequestFold:
    """Takes in the events of a run; an id may come again once all that had it has ended.

    blocked: why the first of the waiting queue is not admitted; None if nothing blocks it.
    slots: the newest sequence of each slot that was used.
    num_arrived, num_wanted: how many samples have arrived, or beams together, and how many tokens
    they may generate.  num_drafted, num_accepted: how many drafts there were, and how many of them
    were accepted.
    news: since somebody took them from here; None if nobody does.
    """

    def __init__(self) -> None:
        self._takers: dict[type[Event], Callable[[Any], RequestTimeline | None]] = {
            ArriveEvent: self.arrive,
            AdmitEvent: self.admit,
            PrefillEvent: self._compute,
            PreemptEvent: self._preempt,
            BlockedEvent: self._block,
            JumpEvent: self._jump,
            ReceiveEvent: self._receive,
            RetryEvent: self._retry,
            DraftEvent: self._speculate,
            AcceptEvent: self._speculate,
            RollbackEvent: self._speculate,
            SpeculateEvent: self._speculate,
            ForkEvent: self._fork,
            FinishEvent: self.finish,
            StepsEvent: self._tell,
            RejectEvent: self._withdraw,
            DropEvent: self._withdraw,
            RestartEvent: self._restart,
        }
        self._open: dict[SequenceKey, RequestTimeline] = {}
        self.num_arrived = self.num_wanted = self._num_back = 0
        self.num_drafted = self.num_accepted = 0
        self.blocked: BlockedEvent | None = None
        self.slots: dict[int, RequestTimeline] = {}
        self.news: FoldNews | None = None

    @property
    def open(self) -> Collection[RequestTimeline]:
        """The sequences that have not ended."""
        return self._open.values()

    @property
    def num_open(self) -> int:
        """How many sequences have not ended."""
        return len(self._open)

    def ends_at(self, restart: RestartEvent) -> list[FinishEvent]:
        """Return how all that has not ended ends, since whoever had it has died.

        Raises:
            InvariantError: some of it was admitted later than that.
        """
        ends = []
        for found in self._open.values():
            slot, step = None, restart.step
            if found.admission is not None:
                slot, step = found.admission.event.slot, restart.step - 1
                if found.admission.event.step > step:
                    raise InvariantError(
                        f"{found.label!r} is admitted in step {found.admission.event.step}, and "
                        f"the worker replaced before step {restart.step}"
                    )
            name, tokens = (found.id, found.index, slot), max(found.tokens_after(step), 0)
            ends.append(FinishEvent(step, restart.time, *name, "lost", None, tokens, found.role))
        return ends

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
        self.num_arrived += 1
        self.num_wanted += event.max_tokens
        number = self.num_arrived + self._num_back
        found = RequestTimeline(
            event.id, event.index, "sample", event, event.step, number, event.max_tokens
        )
        if not event.index:
            self._open[event.id] = found
            return found
        self._open[event.id, event.index, "sample"] = found
        if self.news is not None:
            self.news.samples.append(event)
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
        found.admission = AdmissionRecord(event, found.waits_from, event.left, first_token)
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
            has_outputs = found.role == "beam" and admission.event.generated  # from an earlier stay
            if admission.left and event.reason in {"stop", "length"} and not has_outputs:
                raise InvariantError(
                    f"{found.label!r} ends ({event.reason}) before its prompt was computed"
                )
            if admission.told_still > event.step:  # it was aborted before that step
                admission.num_still -= 1
            if admission.drafts is not None and event.reason != "lost":
                _check_tokens(event, found, admission, admission.drafts)
        elif event.slot is not None and not found.admissions:
            raise _not_held(event, "leaves")
        elif self.blocked is not None:
            self._unblock(event)
        found.finish = event
        if self.news is not None:
            self.news.ended.append(found)
        return found

    def _join(self, event: AdmitEvent, found: RequestTimeline) -> None:
        """Count one that comes along with the first of its group."""
        first = self._open.get(key_of(event.id, first_index(event.index, event.role), "sample"))
        if first is not None:
            first.num_rows += len(first.admissions) == 1
            found.max_tokens = first.max_tokens if event.role == "beam" else 0

    def _unblock(self, event: AdmitEvent | FinishEvent) -> None:
        """Forget what blocked a sequence that waits no more."""
        blocked = self.blocked
        if blocked is not None and blocked.id == event.id and blocked.index == event.index:
            self.blocked = None

    def _compute(self, event: PrefillEvent) -> RequestTimeline:
        """Take in what a step computed of a sequence after the step of its admission."""
        found, admission = self._holding(event, "computes in")
        left = admission.left
        if not left and admission.may_compute:
            left = event.tokens + event.left
        is_late = event.step > admission.event.step
        if not is_late or event.tokens < 1 or left - event.tokens != event.left:
            raise InvariantError(
                f"{found.label!r} computes {event.tokens} tokens in step {event.step} and leaves "
                f"{event.left}, but {left} were left"
            )
        admission.left, admission.may_compute = event.left, False
        admission.chunks = admission.chunks or []
        admission.chunks.append(event.step)
        if admission.first_token is not None:
            admission.num_still += (event.left > 0) - (admission.told_still == event.step)
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
            self._num_back += 1
            found.number = self.num_arrived + self._num_back
        if self.news is not None:
            self.news.preempted.append((found, admission))
        return found

    def _block(self, event: BlockedEvent) -> RequestTimeline:
        """Take note of why the first of the queue is not admitted."""
        found = self._open.get(key_of(event.id, event.index, "sample"))
        label = label_of(event.id, event.index, "sample")
        if found is None or found.admission is not None:
            raise InvariantError(f"{label!r} is blocked in step {event.step}, but does not wait")
        if self.blocked is not None and event.step < self.blocked.step:
            raise InvariantError(f"{label!r} is blocked in step {event.step}, after a later one")
        self.blocked = event
        return found

    def _jump(self, event: JumpEvent) -> RequestTimeline:
        """Add the tokens that a constraint forced to those of a sequence."""
        found, admission = self._in_slot(event)
        if event.tokens < 1:
            raise InvariantError(f"{event.id!r} jumps over {event.tokens} tokens")
        admission.num_jumped += event.tokens
        admission.may_compute = True
        admission.jumps = admission.jumps or []
        admission.jumps.append(event.step)
        partner = self._open.get((event.id, event.index, "negative"))
        if partner is not None and partner.admission is not None:
            partner.admission.may_compute = True
        return found

    def _receive(self, event: ReceiveEvent) -> RequestTimeline:
        """Add the tokens that a server has sent to those of a sequence."""
        found, admission = self._in_slot(event)
        if event.tokens < 0 or event.step < admission.event.step:
            raise InvariantError(
                f"{event.id!r} receives {event.tokens} tokens in step {event.step}"
            )
        admission.left = 0
        if admission.first_token is None:
            admission.first_token = event.step
        admission.num_received = (admission.num_received or 0) + event.tokens
        return found

    def _retry(self, event: RetryEvent) -> RequestTimeline:
        """Note that a sequence is asked for again."""
        found, admission = self._in_slot(event)
        if admission.num_received is not None:
            raise InvariantError(f"{event.id!r} is asked for again, and has tokens")
        admission.retries = admission.retries or []
        admission.retries.append(event)
        return found

    def _speculate(
        self, event: DraftEvent | AcceptEvent | RollbackEvent | SpeculateEvent
    ) -> RequestTimeline:
        """Take in what a step drafted for a sequence, or what became of that."""
        found, admission = self._in_slot(event)
        drafts = admission.drafts
        if drafts is None:
            drafts = admission.drafts = DraftRecord()
        match event:
            case DraftEvent():
                drafts.draft(event, found.label)
                self.num_drafted += event.tokens
                if self.news is not None and drafts.latest is not None:
                    self.news.drafts.append(drafts.latest)
            case AcceptEvent():
                drafts.accept(event, found.label)
                admission.may_compute = True
                self.num_accepted += event.tokens
            case RollbackEvent():
                drafts.reject(event, found.label)
            case SpeculateEvent():
                drafts.change(event)
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
            for slot, found in self.slots.items() if not num_decodes else ():
                admission = found.admission
                if admission is None or found.finish is not None or admission.event.slot != slot:
                    continue  # it has left the slot, perhaps for another one
                first_token = admission.first_token
                if first_token is None or first_token >= step or admission.computes_in(step):
                    continue
                admission.num_still += 1
                admission.told_still = step

    def _restart(self, event: RestartEvent) -> None:
        """End all that has not ended, and go on with nothing."""
        for end in self.ends_at(event):
            self.finish(end)
        self.blocked = None
        if self.news is not None:
            self.news.restarts.append(event)

    def _withdraw(self, event: RejectEvent | DropEvent) -> None:
        """Take note of what has no sequence, or none any more."""
        if self.news is not None:
            self.news.withdrawn.append(event)

    def _holding(
        self, event: PrefillEvent | PreemptEvent, verb: str
    ) -> tuple[RequestTimeline, AdmissionRecord]:
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

    def _in_slot(
        self,
        event: JumpEvent
        | ReceiveEvent
        | RetryEvent
        | ForkEvent
        | DraftEvent
        | AcceptEvent
        | RollbackEvent
        | SpeculateEvent,
    ) -> tuple[RequestTimeline, AdmissionRecord]:
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


def _check_tokens(
    event: FinishEvent, found: RequestTimeline, admission: AdmissionRecord, drafts: DraftRecord
) -> None:
    """Make sure that a sequence ends with as many tokens as its steps and drafts can have given it.

    Steps in which it stood still may be told of later, so there may be fewer than steps would give.
    """
    if found.role != "sample":
        return
    counts = drafts.counts
    least = admission.event.generated + admission.num_jumped
    least += counts.num_steps + counts.num_accepted - (event.reason == "error")
    most = found.tokens_after(event.step)
    if not least <= event.tokens <= most:
        raise InvariantError(
            f"{found.label!r} ends in step {event.step} with {event.tokens} tokens, but its steps "
            f"and drafts gave it {least} to {most}"
        )
