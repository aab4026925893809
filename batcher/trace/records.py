"""What is kept of a run: its sequences with all that happened to them, and the rows of a timeline.

Rule: a sequence is known by its request's id, its index and its role; nothing else tells two apart.
"""

from bisect import bisect_left
from typing import Literal, Protocol

from msgspec import Struct

from batcher.events import (
    AdmitEvent,
    ArriveEvent,
    BlockedReason,
    EndReason,
    FinishEvent,
    PreemptEvent,
    PreemptReason,
    RetryEvent,
    Role,
    SequenceName,
)
from batcher.trace.drafts import DraftRecord

SequenceKey = str | tuple[str, int, Role]
"""What tells a sequence from all others: most often the id alone, which takes the least time."""

SpanOutcome = EndReason | Literal["preempted"]
"""What a sequence left its slot for."""

FAILURES: frozenset[SpanOutcome] = frozenset({"error", "aborted"})
"""The bad ends that one may come to."""


class Fork(Struct, frozen=True):
    """After `step` a beam went on as what the beam `parent` of its request was."""

    step: int
    parent: int


class SpanPreemption(Struct, frozen=True):
    """Why a sequence lost its slot: for_id and for_index are those of the one that needed room.

    tokens: how many have to be computed again.  generated: how many of its own it had by then.
    """

    reason: PreemptReason
    for_id: str
    for_index: int
    tokens: int
    generated: int

    @classmethod
    def by(cls, event: PreemptEvent) -> "SpanPreemption":
        """Return what `event` tells of it."""
        return cls(event.reason, event.for_id, event.for_index, event.tokens, event.generated)

    @property
    def for_label(self) -> str:
        """What the sequence that needed room is called."""
        return label_of(self.for_id, self.for_index, "sample")


class SlotSpan(Struct, frozen=True, omit_defaults=True):
    """The steps [start, end) over which a sequence held a slot without a break.

    outcome: None if the events break off while it runs; its end is then theirs.
    jumped: how many tokens a constraint forced, beside those that the steps chose.
    drafted, accepted: how many drafts steps verified for it, and how many it was given.
    dropped: whether it has no result, since other samples of its request are better.
    forks: by step.
    prefill: how many steps it took to compute what it began with, the one that gave its first token
    included.
    cached: how many tokens it began with were found computed.  cached_from: whose these were.
    generated: how many tokens it had from the slots it held before.
    resumed: whether it held a slot before, and lost it to a preemption.
    preemption: that which ended this one.
    worker: whose slot it was; None in a run of one.
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
        """What the sequence is called."""
        return label_of(self.id, self.index, self.role)


class Wait(Struct, frozen=True):
    """The steps [start, end), at least one, over which a sequence was in the waiting queue.

    A sample waits with its negative prompt, and all beams of a request wait as one, as index 0.
    """

    id: str
    index: int
    start: int
    end: int

    @property
    def label(self) -> str:
        """What the sequence that leads those who wait is called."""
        return label_of(self.id, self.index, "sample")


class BlockedSpan(Wait, frozen=True):
    """Why a slot stayed free over the steps [start, end): the first in the queue was not admitted.

    blocks: how many it needed, if the reason is "kv".
    """

    reason: BlockedReason
    blocks: int


class StepRow(Struct, frozen=True, omit_defaults=True):
    """The batch in one step: the label in each slot (None: empty), and how many waited.

    Where the trace has figures of its steps: the time when it began and when it ended, in seconds,
    how many tokens it computed, and how many blocks were held.
    drafted, accepted: how many drafts it verified, and how many of these were given.
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
    """Return what a sequence is called in all views: a, a#1, and a~, a#1~ for negative prompts."""
    name = f"{request_id}#{index}" if index else request_id
    return f"{name}~" if role == "negative" else name


def label_of_name(name: SequenceName) -> str:
    """Return what the sequence of this name is called."""
    return label_of(name.id, name.index, name.role)


def key_of(request_id: str, index: int, role: Role) -> SequenceKey:
    """Return the key of a sequence; a request's first beam has that of a first sample.

    So what arrives has the key of the first sequence of its group, whether a sample or beams.
    """
    if not index and role != "negative":
        return request_id
    return request_id, index, role


class Named(Protocol):
    """An event, a row or a record of a sequence."""

    @property
    def index(self) -> int:
        """Which of its request's samples or beams it is."""

    @property
    def role(self) -> Role:
        """Whose row it is."""


def is_follower(sequence: Named) -> bool:
    """Return whether it came along with another one: a beam but the first, or a negative prompt.

    Only the first of a sequence group has an arrive event.
    """
    return sequence.role == "negative" or (sequence.role == "beam" and sequence.index > 0)


class AdmissionRecord(Struct, gc=False):
    """What came of an admission, up to the preemption or the end of the sequence.

    waits_from: when it had joined the queue.
    left: how many tokens are left to compute before it generates.
    first_token: the step that was through with what it began with; None while none was.
    chunks: the steps after the admission that computed tokens of that.  jumps: those in which a
    constraint forced tokens.  forks: by step.  None for none: most have none of these, and a list
    for each would take time.
    num_still: how many steps after that one gave it no token.  told_still: the last of them that is
    known from what steps computed alone.
    may_compute: whether a constraint has forced tokens on it that are not known to be computed, or
    drafts were accepted, which some models compute again.
    drafts: None if no step drafted for it, and none was to.
    num_received: how many tokens a server has sent; None before the first, and where there is none.
    retries: how often it was asked before it answered; None for never.
    """

    event: AdmitEvent
    waits_from: int
    left: int
    first_token: int | None
    chunks: list[int] | None = None
    jumps: list[int] | None = None
    num_jumped: int = 0
    num_still: int = 0
    told_still: int = -1
    may_compute: bool = False
    forks: list[Fork] | None = None
    drafts: DraftRecord | None = None
    num_received: int | None = None
    retries: list[RetryEvent] | None = None
    preempt: PreemptEvent | None = None

    def has_chunk(self, step: int) -> bool:
        """Return whether `step`, one after the admission, computed tokens of what it began with."""
        return _has(self.chunks or [], step)

    def computes_in(self, step: int) -> bool:
        """Return whether `step` computed such tokens, or what was forced in the step before."""
        return self.has_chunk(step) or _has(self.jumps or [], step - 1)

    @property
    def num_drafted(self) -> int:
        """How many drafts steps verified for it."""
        return 0 if self.drafts is None else self.drafts.counts.num_drafted

    @property
    def num_accepted(self) -> int:
        """How many of them it was given."""
        return 0 if self.drafts is None else self.drafts.counts.num_accepted


def _has(ascending: list[int], step: int) -> bool:
    number = bisect_left(ascending, step)
    return ascending[number : number + 1] == [step]


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
        if admission.num_received is not None:
            return admission.num_received
        start = step + 1 if admission.first_token is None else admission.first_token
        num_steps = step + 1 - start - admission.num_still
        num_tokens = num_steps + admission.event.generated + admission.num_jumped
        return num_tokens if admission.drafts is None else num_tokens + admission.num_accepted

    def end(self, num_steps: int) -> int:
        """Return the step after its last one, of a run of `num_steps`."""
        if self.finish is None:
            return num_steps
        return min(self.finish.step + (self.admission is not None), num_steps)

    def steps(self, num_steps: int) -> range:
        """Return the steps from its arrival to its end, of a run of `num_steps`."""
        return range(self.arrive.step, self.end(num_steps)) if self.arrive else range(0)

    def slot_span(
        self, admission: AdmissionRecord, end: int, outcome: SpanOutcome | None
    ) -> SlotSpan:
        """Return the span that began with one of its admissions."""
        admit, preempt = admission.event, admission.preempt
        has_drafts = admission.drafts is not None
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
            admission.num_drafted if has_drafts else 0,
            admission.num_accepted if has_drafts else 0,
            forks=tuple(admission.forks or ()),
            prefill=first_token + 1 - admit.step,
            cached=admit.cached,
            generated=admit.generated,
            resumed=admission is not self.admissions[0],
            preemption=None if preempt is None else SpanPreemption.by(preempt),
            cached_from=admit.cached_from,
        )


def first_index(index: int, role: Role) -> int:
    """Return the index of the first of the group that a sequence of this index and role is in."""
    return 0 if role == "beam" else index
