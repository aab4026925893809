"""The drafts of a sequence: which each step had the model verify, and what became of them.

Rule: nothing is accepted or rejected but what the same step drafted, and none of it twice.
"""

from collections import Counter
from collections.abc import Mapping

from msgspec import Struct, field

from batcher.errors import InvariantError
from batcher.events import AcceptEvent, DraftEvent, RollbackEvent, SpeculateEvent

MAX_POSITIONS = 64
"""Of so many drafts of a step it is told by position what became of them."""


class StepDrafts(Struct, gc=False):
    """The drafts of one step for the sequence in a slot; the first is at `position`.

    What is neither accepted nor rejected is of a step, or of a row, that broke off.
    """

    step: int
    slot: int
    position: int
    drafted: int
    accepted: int = 0
    rejected: int = 0


class DraftCounts(Struct):
    """How many steps verified drafts, by how many, and by how many of these were accepted.

    lengths, accepted_lengths: number of drafts -> number of steps; 0 is not in accepted_lengths.
    num_rejecting: how many steps rejected some.  blocks: how many were given back for that.
    """

    lengths: Counter[int] = field(default_factory=Counter)
    accepted_lengths: Counter[int] = field(default_factory=Counter)
    num_rejecting: int = 0
    num_rejected: int = 0
    blocks: int = 0

    @property
    def num_steps(self) -> int:
        """How many steps verified drafts."""
        return self.lengths.total()

    @property
    def num_drafted(self) -> int:
        """How many drafts there were."""
        return _sum(self.lengths)

    @property
    def num_accepted(self) -> int:
        """How many of them were accepted."""
        return _sum(self.accepted_lengths)

    def reject(self, event: RollbackEvent) -> None:
        """Take in that a step has rejected some."""
        self.num_rejecting += 1
        self.num_rejected += event.tokens
        self.blocks += event.blocks

    def by_position(self) -> list[tuple[int, int]]:
        """Return how many i-th drafts there were, and how many were accepted; the first for i = 0.

        Those behind the 64th of a step are left out.
        """
        longest = min(max(self.lengths, default=0), MAX_POSITIONS)
        return [
            (_longer_than(self.lengths, i), _longer_than(self.accepted_lengths, i))
            for i in range(longest)
        ]


class DraftRecord(Struct):
    """What drafts brought a sequence while it held a slot.

    latest: those of the newest step that had any.  num_changes: how often another number of them
    was wanted; last_change: since when, and why.
    """

    counts: DraftCounts = field(default_factory=DraftCounts)
    latest: StepDrafts | None = None
    num_changes: int = 0
    last_change: SpeculateEvent | None = None

    def draft(self, event: DraftEvent, label: str) -> None:
        """Take in the drafts of the next step.

        Raises:
            InvariantError: there are none, or the tokens before them were not given yet.
        """
        latest = self.latest
        if event.tokens < 1:
            raise InvariantError(f"{label!r} drafts {event.tokens} tokens in step {event.step}")
        if latest is not None and event.step <= latest.step:
            raise InvariantError(
                f"{label!r} drafts in step {event.step} again, or after step {latest.step}"
            )
        earliest = 1 if latest is None else latest.position + latest.accepted + 1
        if event.position < earliest:
            raise InvariantError(
                f"{label!r} drafts from position {event.position} on in step {event.step}, "
                f"where it was given all before {earliest}"
            )
        self.latest = StepDrafts(event.step, event.slot, event.position, event.tokens)
        self.counts.lengths[event.tokens] += 1

    def accept(self, event: AcceptEvent, label: str) -> None:
        """Take in how many drafts of its step were accepted; see `_of_step` for what is raised."""
        latest = self._of_step(event, label, "accepts")
        if latest.accepted or event.position != latest.position:
            raise InvariantError(
                f"{label!r} accepts drafts from position {event.position} on in step {event.step}, "
                f"and those of the step begin at {latest.position + latest.accepted}"
            )
        latest.accepted = event.tokens
        self.counts.accepted_lengths[event.tokens] += 1

    def reject(self, event: RollbackEvent, label: str) -> None:
        """Take in how many drafts of its step were rejected; see `_of_step` for what is raised."""
        latest = self._of_step(event, label, "rejects")
        end = latest.position + latest.drafted - latest.rejected
        if latest.rejected or event.position + event.tokens != end:
            raise InvariantError(
                f"{label!r} rejects drafts up to position {event.position + event.tokens} in step "
                f"{event.step}, and those of the step end at {end}"
            )
        latest.rejected = event.tokens
        self.counts.reject(event)

    def change(self, event: SpeculateEvent) -> None:
        """Take in how many drafts are wanted from the next step on."""
        self.num_changes += 1
        self.last_change = event

    def _of_step(self, event: AcceptEvent | RollbackEvent, label: str, verb: str) -> StepDrafts:
        """Return the drafts that `event` tells of.

        Raises:
            InvariantError: its step drafted nothing for the sequence, or less than that.
        """
        latest = self.latest
        if latest is None or latest.step != event.step:
            raise InvariantError(
                f"{label!r} {verb} drafts in step {event.step}, which has none for it"
            )
        left = latest.drafted - latest.accepted - latest.rejected
        if not 1 <= event.tokens <= left:
            raise InvariantError(
                f"{label!r} {verb} {event.tokens} drafts in step {event.step}, and {left} are left"
            )
        return latest


def _sum(lengths: Mapping[int, int]) -> int:
    return sum(length * number for length, number in lengths.items())


def _longer_than(lengths: Mapping[int, int], length: int) -> int:
    return sum(number for drafted, number in lengths.items() if drafted > length)
