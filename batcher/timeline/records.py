"""The rows of a timeline: who held a slot, who waited and why, and what the sequences are called.

Rule: a sequence is known by its request's id, its index and its role; nothing else tells two apart.
"""

from typing import Literal, Protocol

from msgspec import Struct

from batcher.events import BlockedReason, EndReason, PreemptEvent, PreemptReason, Role

SequenceKey = str | tuple[str, int, Role]
"""What tells a sequence from all others: most often the id alone, which takes the least time."""

SpanOutcome = EndReason | Literal["preempted"]
"""What a sequence left its slot for."""


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
    dropped: whether it has no result, since other samples of its request are better.
    forks: by step.
    prefill: how many steps it took to compute what it began with, the one that gave its first token
    included.
    cached: how many tokens it began with were found computed.
    generated: how many tokens it had from the slots it held before.
    resumed: whether it held a slot before, and lost it to a preemption.
    preemption: that which ended this one.
    """

    slot: int
    id: str
    index: int
    start: int
    end: int
    outcome: SpanOutcome | None
    role: Role = "sample"
    jumped: int = 0
    dropped: bool = False
    forks: tuple[Fork, ...] = ()
    prefill: int = 1
    cached: int = 0
    generated: int = 0
    resumed: bool = False
    preemption: SpanPreemption | None = None

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


class BlockedSpan(Struct, frozen=True):
    """Why a slot stayed free over the steps [start, end): the first in the queue was not admitted.

    blocks: how many it needed, if the reason is "kv".
    """

    id: str
    index: int
    start: int
    end: int
    reason: BlockedReason
    blocks: int

    @property
    def label(self) -> str:
        """What the sequence that was not admitted is called."""
        return label_of(self.id, self.index, "sample")


class StepRow(Struct, frozen=True, omit_defaults=True):
    """The batch in one step: the label in each slot (None: empty), and how many waited.

    Where the trace has figures of its steps: the time when it began and when it ended, in seconds,
    how many tokens it computed, and how many blocks were held.
    """

    step: int
    slots: list[str | None]
    waiting: int
    begin: float | None = None
    end: float | None = None
    tokens: int | None = None
    blocks: int | None = None


def label_of(request_id: str, index: int, role: Role) -> str:
    """Return what a sequence is called in all views: a, a#1, and a~, a#1~ for negative prompts."""
    name = f"{request_id}#{index}" if index else request_id
    return f"{name}~" if role == "negative" else name


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
