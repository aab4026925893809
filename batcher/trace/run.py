"""Fold the events of a run, as they arrive, into its sequences.

Every reader of events uses this fold and keeps no sequences of its own.  The fold keeps sequences
that have not ended, and rejects events that contradict each other.
"""

from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Callable, Collection, Mapping
from copy import deepcopy
from operator import add
from typing import Any, ClassVar, Literal, Protocol, Self, get_args

from msgspec import Struct, convert, field
from msgspec.structs import replace

from batcher.errors import InvariantError
from batcher.events import (
    AcceptEvent,
    AdmitEvent,
    ArriveEvent,
    BlockedEvent,
    BlockedReason,
    DraftEvent,
    DropEvent,
    EndEvent,
    EndReason,
    Event,
    FinishEvent,
    ForkEvent,
    JumpEvent,
    PreemptEvent,
    PreemptReason,
    PrefillEvent,
    ReceiveEvent,
    RejectEvent,
    RequestEvent,
    RestartEvent,
    RetryEvent,
    Role,
    RollbackEvent,
    RunEvent,
    SampleEvent,
    SequenceName,
    SpeculateEvent,
    StepsEvent,
)
from batcher.settings import DEFAULT_AGING, DEFAULT_SCHEDULING


class Totals(Struct):
    """Numbers of part of a run that can be added up, so no means or percentiles.

    LARGEST, LEAST: fields of which the largest, or the least known, value counts instead.
    """

    LARGEST: ClassVar[frozenset[str]] = frozenset()
    LEAST: ClassVar[frozenset[str]] = frozenset()

    def merge(self, other: Self) -> None:
        """Add the numbers of another part, which stays unchanged."""
        for name in self.__struct_fields__:
            choose = max if name in self.LARGEST else min if name in self.LEAST else add
            setattr(self, name, _merged(getattr(self, name), getattr(other, name), choose))

    def copy(self) -> Self:
        return deepcopy(self)


def _merged(own: Any, others: Any, choose: Callable[[Any, Any], Any]) -> Any:
    if own is None or others is None:
        return deepcopy(others) if own is None else own
    if isinstance(own, Totals):
        own.merge(others)
        return own
    if isinstance(own, dict):
        for key, value in others.items():
            own[key] = _merged(own.get(key), value, choose)
        return own
    return choose(own, others)


SequenceKey = str | tuple[str, int, Role, int | None]
"""The id, index, role and worker of a sequence; usually the id alone, which is faster."""

SpanOutcome = EndReason | Literal["preempted"]  # why a sequence left its slot
SpanEnding = Literal["", "failed", "preempted", "lost", "dropped"]  # the ends that views mark

InSlotEvent = (
    JumpEvent
    | ReceiveEvent
    | RetryEvent
    | DraftEvent
    | AcceptEvent
    | RollbackEvent
    | SpeculateEvent
    | ForkEvent
)
"""Events of a sequence in its slot, without its role."""

FAILURES: frozenset[SpanOutcome] = frozenset({"error", "aborted"})

# -- drafts: a step accepts or rejects only its own drafts, each once ----------------------------

MAX_POSITIONS = 64  # acceptance by position is counted up to here


class StepDrafts(Struct, gc=False):
    """The drafts of one step for the sequence in a slot, from `position` on.

    parents: as in a DraftEvent.  depth: the most that can be accepted, which is the number of
    drafts or the longest path of a tree.  An interrupted step neither accepts nor rejects drafts.
    """

    step: int
    slot: int
    position: int
    drafted: int
    accepted: int = 0
    rejected: int = 0
    depth: int = 0
    parents: tuple[int, ...] = ()


class DraftCounts(Totals):
    """Numbers of steps by their drafts; num_drafted: all drafts.

    lengths: steps by StepDrafts.depth.  accepted_lengths: steps by accepted drafts, without 0.
    num_rejecting: steps that accepted fewer than they could.  blocks: returned for rejected drafts.
    """

    lengths: Counter[int] = field(default_factory=Counter)
    accepted_lengths: Counter[int] = field(default_factory=Counter)
    num_drafted: int = 0
    num_rejecting: int = 0
    num_rejected: int = 0
    blocks: int = 0

    @property
    def num_steps(self) -> int:
        return self.lengths.total()

    @property
    def num_accepted(self) -> int:
        return sum(length * number for length, number in self.accepted_lengths.items())

    @property
    def num_on_end(self) -> int:
        """How many drafts could be accepted in all steps; without trees, all drafts."""
        return sum(length * number for length, number in self.lengths.items())

    def draft(self, drafts: StepDrafts) -> None:
        self.lengths[drafts.depth] += 1
        self.num_drafted += drafts.drafted

    def settle(self, event: AcceptEvent | RollbackEvent, drafts: StepDrafts) -> None:
        if isinstance(event, AcceptEvent):
            self.accepted_lengths[event.tokens] += 1
        else:
            self.num_rejecting += drafts.accepted < drafts.depth
            self.num_rejected += event.tokens
            self.blocks += event.blocks

    def by_position(self) -> list[tuple[int, int]]:
        """Return how many drafts had each position from 0 to 63, and how many were accepted."""
        longest = min(max(self.lengths, default=0), MAX_POSITIONS)

        def longer_than(place: int, lengths: Mapping[int, int]) -> int:
            return sum(number for length, number in lengths.items() if length > place)

        return [
            (longer_than(place, self.lengths), longer_than(place, self.accepted_lengths))
            for place in range(longest)
        ]


class DraftRecord(Struct):
    """The drafts of a sequence in a slot; latest: of the newest step with drafts.

    num_changes, last_change: how often the wanted number of drafts changed, and the last change.
    """

    counts: DraftCounts = field(default_factory=DraftCounts)
    latest: StepDrafts | None = None
    num_changes: int = 0
    last_change: SpeculateEvent | None = None

    def draft(self, event: DraftEvent, label: str) -> StepDrafts:
        """Add and return the drafts of the next step.

        InvariantError: there are none, they are not a tree, or do not follow known tokens.
        """
        latest, where = self.latest, f"in step {event.step}"
        if event.tokens < 1:
            raise InvariantError(
                f"{label!r} drafts {event.tokens} tokens {where}; expected at least 1"
            )
        if latest is not None and event.step <= latest.step:
            raise InvariantError(f"{label!r} drafts {where}; expected a step after {latest.step}")
        earliest = 1 if latest is None else latest.position + latest.accepted + 1
        if event.position < earliest:
            raise InvariantError(
                f"{label!r} drafts from position {event.position} {where}, but already has the "
                f"tokens before {earliest}"
            )
        depths = [0]  # of a tree whose root is the last known token
        for draft, parent in enumerate(event.parents, 1):
            if not 0 <= parent < draft:
                raise InvariantError(f"{label!r} has draft {draft} follow draft {parent} {where}")
            depths.append(depths[parent] + 1)
        if event.parents and len(event.parents) != event.tokens:
            raise InvariantError(
                f"{label!r} drafts {event.tokens} tokens {where} with {len(event.parents)} parents"
            )
        depth, parents = max(depths) or event.tokens, event.parents
        name = event.step, event.slot, event.position, event.tokens
        self.latest = StepDrafts(*name, depth=depth, parents=parents)
        self.counts.draft(self.latest)
        return self.latest

    def settle(self, event: AcceptEvent | RollbackEvent, label: str) -> StepDrafts:
        """Count accepted or rejected drafts of a step, and return all drafts of that step.

        InvariantError: the step has no such drafts for the sequence.
        """
        latest, where = self.latest, f"in step {event.step}"
        verb = "accepts" if isinstance(event, AcceptEvent) else "rejects"
        if latest is None or latest.step != event.step:
            raise InvariantError(f"{label!r} {verb} drafts {where}, which has no drafts for it")
        left = latest.drafted - latest.accepted - latest.rejected
        if not 1 <= event.tokens <= left:
            raise InvariantError(
                f"{label!r} {verb} {event.tokens} drafts {where}, and {left} are left"
            )
        if isinstance(event, AcceptEvent):
            if latest.accepted or event.position != latest.position:
                raise InvariantError(
                    f"{label!r} accepts drafts from position {event.position} {where}, but the "
                    f"next draft is at {latest.position + latest.accepted}"
                )
            parents = dict(enumerate(latest.parents, 1))
            follows = zip((0, *event.drafts), event.drafts, strict=False)
            is_path = all(parents.get(draft) == before for before, draft in follows)
            is_tree = bool(parents or event.drafts)
            if is_tree and not (is_path and len(event.drafts) == event.tokens):
                raise InvariantError(
                    f"{label!r} accepts drafts {[*event.drafts]} {where}, which are not a path of "
                    f"{event.tokens}"
                )
            latest.accepted = event.tokens
        else:
            end = latest.position + latest.drafted - latest.rejected
            if latest.rejected or event.position + event.tokens != end:
                raise InvariantError(
                    f"{label!r} rejects drafts up to position {event.position + event.tokens} "
                    f"{where}, but the drafts end at {end}"
                )
            latest.rejected = event.tokens
        self.counts.settle(event, latest)
        return latest


# -- what views read -----------------------------------------------------------------------------


class Fork(Struct, frozen=True):
    """After `step` a beam continues the beam `parent` of its request."""

    step: int
    parent: int


class SpanPreemption(Struct, frozen=True):
    """Why a sequence lost its slot, and to which sequence (for_id, for_index).

    tokens: how many must be computed again.  generated: how many it had generated.
    """

    reason: PreemptReason
    for_id: str
    for_index: int
    tokens: int
    generated: int

    @classmethod
    def by(cls, event: PreemptEvent | None) -> "SpanPreemption | None":
        return None if event is None else convert(event, cls, from_attributes=True)

    @property
    def for_label(self) -> str:
        return label_of(self.for_id, self.for_index, "sample")


class SlotSpan(Struct, frozen=True, omit_defaults=True):
    """The steps [start, end) in which a sequence held a slot.

    outcome: None if the events end while it runs.  jumped: tokens forced by a constraint.  drafted,
    accepted: verified and accepted drafts.  dropped: it has no result because other samples of its
    request are better.  prefill: steps up to and including the first token.  cached: tokens found
    in the cache, computed by cached_from.  generated: tokens from earlier slots.  resumed: it was
    preempted before.  preemption: the one that ended this span.  worker: None in a run of one.
    """

    slot: int
    id: str
    index: int
    start: int
    end: int
    outcome: SpanOutcome | None
    role: Role = "sample"
    jumped: int = 0
    drafted: int = 0
    accepted: int = 0
    dropped: bool = False
    forks: tuple[Fork, ...] = ()
    prefill: int = 1
    cached: int = 0
    generated: int = 0
    resumed: bool = False
    preemption: SpanPreemption | None = None
    cached_from: SequenceName | None = None
    worker: int | None = None

    @property
    def label(self) -> str:
        return label_of(self.id, self.index, self.role)

    @property
    def ending(self) -> SpanEnding:
        if self.outcome in FAILURES:
            return "failed"
        if self.outcome == "preempted":
            return "preempted"
        if self.outcome == "lost":
            return "lost"
        return "dropped" if self.dropped else ""

    @property
    def prefill_end(self) -> int:
        """The step after the first token, or the end without one."""
        return min(self.start + self.prefill, self.end)

    def clip(self, steps: range) -> range:
        return range(max(self.start, steps.start), min(self.end, steps.stop))


class Wait(Struct, frozen=True):
    """The steps [start, end), at least one, in which a sequence was in the waiting queue.

    A negative prompt waits with its sample, and all beams of a request wait as index 0.
    """

    id: str
    index: int
    start: int
    end: int

    @property
    def label(self) -> str:
        return label_of(self.id, self.index, "sample")


class BlockedSpan(Wait, frozen=True):
    """The steps [start, end) in which the head of the queue could not take a free slot, and why.

    blocks: how many KV blocks it needed, if the reason is "kv".
    """

    reason: BlockedReason
    blocks: int


class StepRow(Struct, frozen=True, omit_defaults=True):
    """The batch in one step: the label in each slot (None: empty), and the length of the queue.

    begin, end (seconds), tokens and blocks are None if the trace has no figures of steps.
    """

    step: int
    slots: list[str | None]
    waiting: int
    begin: float | None = None
    end: float | None = None
    tokens: int | None = None
    blocks: int | None = None
    drafted: int = 0
    accepted: int = 0


def label_of(request_id: str, index: int, role: Role) -> str:
    """Return the name of a sequence in all views: a, a#1, and a~, a#1~ for negative prompts."""
    name = f"{request_id}#{index}" if index else request_id
    return f"{name}~" if role == "negative" else name


def label_of_name(name: SequenceName) -> str:
    return label_of(name.id, name.index, name.role)


def key_of(request_id: str, index: int, role: Role, worker: int | None = None) -> SequenceKey:
    """Return the key of a sequence; the first beam shares it with its arrival, a first sample."""
    if index or role == "negative":
        return request_id, index, role, worker
    return request_id if worker is None else (request_id, 0, "sample", worker)


class Named(Protocol):
    """An event, a row or a record of a sequence."""

    @property
    def index(self) -> int: ...
    @property
    def role(self) -> Role: ...


def is_follower(sequence: Named) -> bool:
    """Return whether only its leader, a sample or the first beam, has an arrive event."""
    return sequence.role == "negative" or (sequence.role == "beam" and sequence.index > 0)


class AdmissionRecord(Struct, gc=False):
    """An admission, up to the preemption or the end of the sequence.

    waits_from, number: when it joined the queue, and its number among all that joined.  left:
    tokens to compute before it generates.  first_token: the step that completed them, or None.
    chunks: later steps with a part of them.  jumps: steps in which a constraint forced tokens.
    chunks, jumps and forks are None if empty, which is faster.  num_still: steps since the first
    token without a token.  known_still: the last of them known from a StepsEvent.  may_compute:
    a chunk may follow without being announced, for forced tokens or accepted drafts.
    num_received: tokens sent by a server, or None.  retries: requests that the server failed.
    """

    event: AdmitEvent
    waits_from: int
    number: int
    left: int
    first_token: int | None
    chunks: list[int] | None = None
    jumps: list[int] | None = None
    num_jumped: int = 0
    num_still: int = 0
    known_still: int = -1
    may_compute: bool = False
    forks: list[Fork] | None = None
    drafts: DraftRecord | None = None
    num_received: int | None = None
    retries: list[RetryEvent] | None = None
    preempt: PreemptEvent | None = None

    def has_chunk(self, step: int) -> bool:
        """Return whether `step`, after the admission, computed a part of its prefill."""
        return _has(self.chunks or [], step)

    @property
    def num_drafted(self) -> int:
        return 0 if self.drafts is None else self.drafts.counts.num_drafted

    @property
    def num_accepted(self) -> int:
        return 0 if self.drafts is None else self.drafts.counts.num_accepted


def _has(ascending: list[int], step: int) -> bool:
    number = bisect_left(ascending, step)
    return ascending[number : number + 1] == [step]


class RequestTimeline(Struct, gc=False, eq=False):
    """The life of a sequence; the leader of a sequence group stands for all of it.

    arrive: None for followers, and if the events begin later.  waits_from, number: when it joined
    the queue last, and its number among all that joined.  admission: of the slot it holds or held
    at its end; None while it waits.  max_tokens: 0 for a negative prompt.  num_rows: the slots of
    its group.  TokenTimes sets, in seconds: queue, ttft: from arrival to admission and first token;
    last_token: the last one before it decodes; ended: the end of its last step.
    """

    id: str
    index: int
    role: Role
    worker: int | None = None
    arrive: ArriveEvent | None = None
    waits_from: int = 0
    number: int = 0
    max_tokens: int = 0
    admissions: list[AdmissionRecord] = []
    admission: AdmissionRecord | None = None
    finish: FinishEvent | None = None
    num_rows: int = 1
    queue: float | None = None
    ttft: float | None = None
    last_token: float = 0.0
    is_decoding: bool = False
    ended: float | None = None

    @property
    def label(self) -> str:
        return label_of(self.id, self.index, self.role)

    @property
    def first_event(self) -> ArriveEvent | AdmitEvent | FinishEvent | None:
        return self.arrive or (self.admissions[0].event if self.admissions else self.finish)

    @property
    def first_token(self) -> int | None:
        for admission in reversed(self.admissions):
            if not admission.event.generated:
                return admission.first_token
        return None

    def tokens_after(self, step: int) -> int:
        """Return the number of tokens after `step`, the newest; a beam has one for each step."""
        if not self.admissions or self.role == "negative":
            return 0
        admission = self.admissions[-1]
        if admission.preempt is not None:
            return admission.preempt.generated
        if self.finish is not None:
            if self.role != "beam":
                return self.finish.tokens
            step = self.finish.step
        if admission.num_received is not None:
            return admission.num_received
        start = step + 1 if admission.first_token is None else admission.first_token
        num_steps = step + 1 - start - admission.num_still
        num_tokens = num_steps + admission.event.generated + admission.num_jumped
        return num_tokens if admission.drafts is None else num_tokens + admission.num_accepted

    def end(self, num_steps: int) -> int:
        if self.finish is None:
            return num_steps
        return min(self.finish.step + (self.admission is not None), num_steps)

    def steps(self, num_steps: int) -> range:
        return range(self.arrive.step, self.end(num_steps)) if self.arrive else range(0)

    def slot_span(
        self, admission: AdmissionRecord, end: int, outcome: SpanOutcome | None
    ) -> SlotSpan:
        admit, preempt = admission.event, admission.preempt
        first_token = end - 1 if admission.first_token is None else admission.first_token
        held = admit.slot, admit.id, admit.index, admit.step, end, outcome, admit.role
        numbers = admission.num_jumped, admission.num_drafted, admission.num_accepted
        return SlotSpan(
            *held,
            *numbers,
            forks=tuple(admission.forks or ()),
            prefill=first_token + 1 - admit.step,
            cached=admit.cached,
            generated=admit.generated,
            resumed=admission is not self.admissions[0],
            preemption=SpanPreemption.by(preempt),
            cached_from=admit.cached_from,
            worker=admit.worker,
        )


class RequestFold:
    """Folds events into sequences; an id may come again once its sequences have ended.

    unblocked: the block that ended last, to be taken by a reader.  slots: the newest sequence of
    each used slot.  num_arrived, num_wanted: arrived samples, or beams together, and the sum of
    their max_tokens.  drafts: of all steps.  news: events and sequences for a view, which takes
    them from here; None without a view, in which case step_drafts, num_asked and num_found (tokens
    looked up and found in the prefix cache) are not counted either.
    """

    def __init__(self) -> None:
        self._takers: dict[type[Event], Callable[[Any], RequestTimeline | None]] = {
            ArriveEvent: self.arrive,
            AdmitEvent: self.admit,
            PrefillEvent: self._compute,
            PreemptEvent: self._preempt,
            BlockedEvent: self._block,
            FinishEvent: self.finish,
            StepsEvent: self._tell,
            RejectEvent: self._note,
            DropEvent: self._note,
            RestartEvent: self._restart,
            **dict.fromkeys(get_args(InSlotEvent), self._take_in_slot),
        }
        self._open: dict[SequenceKey, RequestTimeline] = {}
        self.num_arrived = self.num_wanted = self._num_back = 0
        self.drafts = DraftCounts()
        self._blocked: dict[int | None, BlockedEvent] = {}  # by worker
        self.unblocked: BlockedSpan | None = None
        self.slots: dict[int, RequestTimeline] = {}
        self.news: list[tuple[Event, RequestTimeline | None]] | None = None
        self.step_drafts: deque[StepDrafts] = deque(maxlen=0)
        self.num_asked = self.num_found = 0
        self._is_received = False

    @property
    def blocked(self) -> BlockedEvent | None:
        """Why the head of the queue of a worker is not admitted, or None."""
        return next(iter(self._blocked.values()), None)

    @property
    def open(self) -> Collection[RequestTimeline]:
        return self._open.values()

    def find(self, name: SequenceName) -> RequestTimeline | None:
        return self._open.get(key_of(name.id, name.index, name.role))

    def ends_at(self, restart: RestartEvent) -> list[FinishEvent]:
        """Return the ends of the sequences that their worker lost when it died.

        InvariantError: one of them was admitted later.
        """
        ends = []
        for found in self._open.values():
            if found.worker != restart.worker:
                continue
            slot, step = None, restart.step
            if found.admission is not None:
                slot, step = found.admission.event.slot, restart.step - 1
                if found.admission.event.step > step:
                    raise InvariantError(
                        f"{found.label!r} is admitted in step {found.admission.event.step}, and "
                        f"the worker replaced before step {restart.step}"
                    )
            name, tokens = (found.id, found.index, slot), max(found.tokens_after(step), 0)
            end = FinishEvent(
                step, restart.time, *name, "lost", None, tokens, found.role, worker=found.worker
            )
            ends.append(end)
        return ends

    def take(self, event: Event) -> RequestTimeline | None:
        """Take the next event, and return its sequence, if any.

        InvariantError: it contradicts earlier events.
        """
        taker = self._takers.get(type(event))
        return None if taker is None else taker(event)

    def arrive(self, event: ArriveEvent) -> RequestTimeline:
        if event.step < 0:
            raise InvariantError(f"{event.id!r} arrives in step {event.step}")
        self.num_arrived += 1
        self.num_wanted += event.max_tokens
        found = RequestTimeline(
            event.id,
            event.index,
            "sample",
            event.worker,
            event,
            event.step,
            self.num_arrived + self._num_back,
            event.max_tokens,
        )
        self._open[key_of(event.id, event.index, "sample", event.worker)] = found
        if event.index and self.news is not None:
            self.news.append((event, found))
        return found

    def admit(self, event: AdmitEvent) -> RequestTimeline:
        key = key_of(event.id, event.index, event.role, event.worker)
        found = self._open.get(key)
        if found is None:  # a follower, or the events begin in the middle of a run
            found = RequestTimeline(event.id, event.index, event.role, event.worker)
            self._open[key] = found
        if is_follower(event):
            index = 0 if event.role == "beam" else event.index
            first = self._open.get(key_of(event.id, index, "sample", event.worker))
            if first is not None:
                first.num_rows += len(first.admissions) == 1
                found.max_tokens = first.max_tokens if event.role == "beam" else 0
        elif self._blocked:
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
        found.admission = AdmissionRecord(
            event, found.waits_from, found.number, event.left, first_token
        )
        found.admissions.append(found.admission)
        self.slots[event.slot] = found
        if self.news is not None and event.role == "sample" and found.arrive is not None:
            self.num_asked += found.arrive.prompt_tokens + event.generated
            self.num_found += event.cached
        return found

    def finish(self, event: FinishEvent) -> RequestTimeline:
        found = self._open.pop(key_of(event.id, event.index, event.role, event.worker), None)
        if found is None:
            found = RequestTimeline(event.id, event.index, event.role, event.worker)
        admission = found.admission
        if admission is not None:
            if admission.event.slot != event.slot or found.role != event.role:
                raise _not_held(event, "leaves")
            has_outputs = found.role == "beam" and admission.event.generated  # from an earlier stay
            if admission.left and event.reason in {"stop", "length"} and not has_outputs:
                raise InvariantError(
                    f"{found.label!r} ends ({event.reason}) before its prompt was computed"
                )
            if admission.known_still > event.step:  # it was aborted before that step
                admission.num_still -= 1
            drafts, is_sample = admission.drafts, found.role == "sample"
            if drafts is not None and is_sample and event.reason != "lost":
                # Standstills may be reported later, so there may be fewer.
                counts, most = drafts.counts, found.tokens_after(event.step)
                least = admission.event.generated + admission.num_jumped
                least += counts.num_steps + counts.num_accepted - (event.reason == "error")
                if not least <= event.tokens <= most:
                    raise InvariantError(
                        f"{found.label!r} ends in step {event.step} with {event.tokens} tokens, "
                        f"but its steps and drafts gave it {least} to {most}"
                    )
        elif event.slot is not None and not found.admissions:
            raise _not_held(event, "leaves")
        elif self._blocked:
            self._unblock(event)
        found.finish = event
        if self.news is not None:
            self.news.append((event, found))
        return found

    def _unblock(self, event: AdmitEvent | FinishEvent) -> None:
        blocked = self._blocked.get(event.worker)
        if blocked is not None and blocked.id == event.id and blocked.index == event.index:
            self.end_block(event.worker, event.step)

    def end_block(self, worker: int | None, end: int) -> None:
        """End what blocks the head of a worker's queue at the step `end`."""
        blocked = self._blocked.pop(worker, None)
        if blocked is not None and blocked.step < end:
            self.unblocked = BlockedSpan(
                blocked.id, blocked.index, blocked.step, end, blocked.reason, blocked.blocks
            )

    def _compute(self, event: PrefillEvent) -> RequestTimeline:
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
            admission.num_still += (event.left > 0) - (admission.known_still == event.step)
        elif not event.left:
            admission.first_token = event.step
        return found

    def _preempt(self, event: PreemptEvent) -> RequestTimeline:
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
            self.news.append((event, found))
        return found

    def _block(self, event: BlockedEvent) -> RequestTimeline:
        found = self._open.get(key_of(event.id, event.index, "sample", event.worker))
        label = label_of(event.id, event.index, "sample")
        if found is None or found.admission is not None:
            raise InvariantError(f"{label!r} is blocked in step {event.step}, but does not wait")
        before = self._blocked.get(event.worker)
        if before is not None and event.step < before.step:
            raise InvariantError(f"{label!r} is blocked in step {event.step}, after a later one")
        self.end_block(event.worker, event.step)
        self._blocked[event.worker] = event
        return found

    def _take_in_slot(self, event: InSlotEvent) -> RequestTimeline:
        for role in get_args(Role):
            found = self._open.get(key_of(event.id, event.index, role, event.worker))
            admission = None if found is None else found.admission
            if found is not None and admission is not None:
                admit = admission.event
                if admit.slot == event.slot and admit.step <= event.step:
                    break
        else:
            label = label_of(event.id, event.index, "sample")
            raise InvariantError(
                f"{label!r} does not run in slot {event.slot} in step {event.step}"
            )
        match event:
            case JumpEvent():
                if event.tokens < 1:
                    raise InvariantError(
                        f"{event.id!r} jumps over {event.tokens} tokens; expected at least 1"
                    )
                admission.num_jumped += event.tokens
                admission.may_compute = True
                admission.jumps = admission.jumps or []
                admission.jumps.append(event.step)
                partner = self._open.get((event.id, event.index, "negative", event.worker))
                if partner is not None and partner.admission is not None:
                    partner.admission.may_compute = True
            case ReceiveEvent():
                if event.tokens < 0:
                    raise InvariantError(
                        f"{event.id!r} receives {event.tokens} tokens in step {event.step}"
                    )
                admission.left, self._is_received = 0, True
                if admission.first_token is None:
                    admission.first_token = event.step
                admission.num_received = (admission.num_received or 0) + event.tokens
            case RetryEvent():
                if admission.num_received is not None:
                    raise InvariantError(f"{event.id!r} is asked for again, and has tokens")
                admission.retries = [*(admission.retries or ()), event]
            case ForkEvent():
                parent = self._open.get(key_of(event.id, event.parent, "beam", event.worker))
                is_beam = parent is not None and parent.admission and parent.role == "beam"
                if found.role != "beam" or not is_beam:
                    raise InvariantError(
                        f"{found.label!r} forks in step {event.step} from "
                        f"{label_of(event.id, event.parent, 'beam')!r}; both have to be running "
                        "beams"
                    )
                admission.forks = admission.forks or []
                admission.forks.append(Fork(event.step, event.parent))
            case _:
                drafts = admission.drafts = admission.drafts or DraftRecord()
                if isinstance(event, DraftEvent):
                    latest = drafts.draft(event, found.label)
                    self.drafts.draft(latest)
                    self.step_drafts.append(latest)
                elif isinstance(event, SpeculateEvent):
                    drafts.num_changes += 1
                    drafts.last_change = event
                else:
                    self.drafts.settle(event, drafts.settle(event, found.label))
                    admission.may_compute |= isinstance(event, AcceptEvent)
        return found

    def _tell(self, event: StepsEvent) -> None:
        """Count the steps in which sequences past their prefill had no token."""
        if 0 not in event.decodes or self._is_received:  # a server reports all its tokens
            return
        for step, num_decodes in enumerate(event.decodes, event.step):
            for slot, found in self.slots.items() if not num_decodes else ():
                admission = found.admission
                if admission is None or found.finish is not None or admission.event.slot != slot:
                    continue  # it has left the slot
                if found.worker != event.worker:
                    continue
                first_token = admission.first_token
                if first_token is None or first_token >= step or admission.has_chunk(step):
                    continue
                if _has(admission.jumps or [], step - 1):
                    continue  # it computed the tokens forced in the step before
                admission.num_still += 1
                admission.known_still = step

    def _restart(self, event: RestartEvent) -> None:
        for end in self.ends_at(event):
            self.finish(end)
        self.end_block(event.worker, event.step)
        self._note(event)

    def _note(self, event: RestartEvent | RejectEvent | DropEvent) -> None:
        if self.news is not None:
            self.news.append((event, None))

    def _holding(
        self, event: PrefillEvent | PreemptEvent, verb: str
    ) -> tuple[RequestTimeline, AdmissionRecord]:
        found = self._open.get(key_of(event.id, event.index, event.role, event.worker))
        if found is not None and found.admission is not None:
            admit = found.admission.event
            if admit.slot == event.slot and admit.role == event.role:
                return found, found.admission
        raise _not_held(event, verb)


def _not_held(event: PrefillEvent | PreemptEvent | FinishEvent, verb: str) -> InvariantError:
    label = label_of(event.id, event.index, event.role)
    return InvariantError(f"{label!r} {verb} slot {event.slot}, which it does not hold")


def aging_of(run: RunEvent) -> float | None:
    """Return the aging limit in steps or seconds; None without aging."""
    if run.policy == DEFAULT_SCHEDULING.policy or run.scheduling.get("preempt_for") is not None:
        return None
    return float(run.scheduling.get("aging", DEFAULT_AGING))


def is_aged(admit: AdmitEvent, arrive: ArriveEvent | None, aging: float) -> bool:
    """Return whether a sequence with an arrival had waited for `aging` at its admission."""
    return arrive is not None and admit.time - arrive.time >= aging


class TraceChecks:
    """Checks that samples of a trace arrive, and end with as many tokens as their steps allow."""

    def __init__(self) -> None:
        # By worker, id and index: max_tokens, the step of the admission (None without a slot), and
        # the tokens in addition to one for each step since then.
        self._open: dict[tuple[int | None, str, int], tuple[int, int | None, int]] = {}
        self._is_remote = False

    def complaint(self, event: Event) -> str | None:
        if isinstance(event, RunEvent):
            self._is_remote = event.layout == "remote"
        if not isinstance(event, SampleEvent):
            return None
        key = event.worker, event.id, event.index
        match event:
            case ArriveEvent():
                self._open[key] = event.max_tokens, None, 0
            case AdmitEvent() if not is_follower(event):
                if key not in self._open:
                    label = label_of(event.id, event.index, event.role)
                    return f"{label!r} is admitted, and has not arrived"
                self._open[key] = self._open[key][0], event.step, event.generated
            case JumpEvent() | AcceptEvent() if key in self._open:
                max_tokens, step, num_tokens = self._open[key]
                self._open[key] = max_tokens, step, num_tokens + event.tokens
            case PreemptEvent(role="sample") if key in self._open:
                self._open[key] = self._open[key][0], None, event.generated
            case FinishEvent(role="sample"):
                why, most = "has not arrived", 0
                if key in self._open:
                    max_tokens, step, num_tokens = self._open.pop(key)
                    num_steps = 0 if step is None else event.step + 1 - step
                    most = min(max_tokens, num_tokens + num_steps)
                    why = f"can have {most:,} at most"
                if event.tokens > most and not self._is_remote:
                    label = label_of(event.id, event.index, event.role)
                    return f"{label!r} ends with {event.tokens:,} tokens, and {why}"
            case _:
                pass
        return None


def check_worker(event: RequestEvent | EndEvent, run: RunEvent) -> None:
    """Raise InvariantError if an event has a wrong worker, or the slot of another worker."""
    worker, batch = event.worker, run.batch
    if worker is None and run.workers == 1:
        return
    if worker is None or not 0 <= worker < run.workers or run.workers == 1:
        name = "no worker" if worker is None else f"worker {worker}"
        raise InvariantError(f"an event has {name}, but the number of workers is {run.workers}")
    slot: int | None = getattr(event, "slot", None)
    if slot is not None and not 0 <= slot - worker * batch < batch:
        raise InvariantError(
            f"worker {worker} has {batch} slots, and slot {slot} is not one of them"
        )


def event_of_worker(event: Event, worker: int, batch: int) -> Event:
    """Return an event of a worker of `batch` slots as an event of the whole run."""
    slot: int | None = getattr(event, "slot", None)
    place = {} if slot is None else {"slot": worker * batch + slot}
    return replace(event, worker=worker, **place)
