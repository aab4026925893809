"""Who held a slot and who waited for one, as records, and what the sequences in them are called.

Rule: a sequence is known by its request's id, its index and its role; nothing else tells two apart.
"""

from msgspec import Struct

from batcher.events import AdmitEvent, EndReason, FinishEvent, Role

SequenceKey = str | tuple[str, int, Role]
"""What tells a sequence from all others: most often the id alone, which takes the least time."""


class Fork(Struct, frozen=True):
    """After `step` a beam went on as what the beam `parent` of its request was."""

    step: int
    parent: int


class Span(Struct, frozen=True, omit_defaults=True):
    """One stay of a sequence in a slot, over the steps [start, end).

    outcome: None if the events break off while it runs; its end is then theirs.
    jumped: how many tokens a constraint forced, beside those that the steps chose.
    dropped: whether it has no result, since other samples of its request are better.
    forks: by step.
    """

    slot: int
    id: str
    index: int
    start: int
    end: int
    outcome: EndReason | None
    role: Role = "sample"
    jumped: int = 0
    dropped: bool = False
    forks: tuple[Fork, ...] = ()

    @property
    def label(self) -> str:
        """What the sequence is called."""
        return label_of(self.id, self.index, self.role)


class Wait(Struct, frozen=True):
    """One stay in the waiting queue, over the steps [start, end), at least one.

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


class StepRow(Struct, frozen=True):
    """The batch in one step: the label in each slot (None: empty), and how many waited."""

    step: int
    slots: list[str | None]
    waiting: int


def label_of(request_id: str, index: int, role: Role) -> str:
    """Return what a sequence is called in all views: a, a#1, and a~, a#1~ for negative prompts."""
    name = f"{request_id}#{index}" if index else request_id
    return f"{name}~" if role == "negative" else name


def key_of(request_id: str, index: int, role: Role) -> SequenceKey:
    """Return the key of a sequence; a request's first beam has that of a first sample.

    So what arrives has the key of the sequence that leads it, whether a sample or beams.
    """
    if not index and role != "negative":
        return request_id
    return request_id, index, role


def is_follower(sequence: AdmitEvent | FinishEvent | Span) -> bool:
    """Return whether it came along with a leader: a beam but the first, or a negative prompt.

    Only leaders have arrive events.
    """
    return sequence.role == "negative" or (sequence.role == "beam" and sequence.index > 0)
