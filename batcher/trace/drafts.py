"""The drafts of a sequence: which each step had the model verify, and what became of them.

Rule: nothing is accepted or rejected but what the same step drafted, and none of it twice.
"""

from collections import Counter
from collections.abc import Mapping

from msgspec import Struct, field

from batcher.errors import InvariantError
from batcher.events import AcceptEvent, DraftEvent, RollbackEvent, SpeculateEvent
from batcher.totals import Totals

MAX_POSITIONS = 64
"""Of so many drafts on end it is told by position what became of them."""


class StepDrafts(Struct, gc=False):
    """The drafts of one step for the sequence in a slot; the first is at `position`.

    parents: as in a DraftEvent.  depth: how many of them could be accepted: all of a line, those of
    the longest way through a tree.
    What is neither accepted nor rejected is of a step, or of a row, that broke off.
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
    """How many steps verified drafts, by how many on end, and by how many of these were accepted.

    lengths: how many drafts could be accepted, as StepDrafts.depth -> number of steps.
    accepted_lengths: how many were -> number of steps; 0 is not in it.  num_drafted: all drafts.
    num_rejecting: how many steps accepted fewer than they could.  blocks: given back for those that
    were rejected.
    """

    lengths: Counter[int] = field(default_factory=Counter)
    accepted_lengths: Counter[int] = field(default_factory=Counter)
    num_drafted: int = 0
    num_rejecting: int = 0
    num_rejected: int = 0
    blocks: int = 0

    @property
    def num_steps(self) -> int:
        """How many steps verified drafts."""
        return self.lengths.total()

    @property
    def num_accepted(self) -> int:
        """How many drafts were accepted."""
        return _sum(self.accepted_lengths)

    @property
    def num_on_end(self) -> int:
        """How many could be accepted, of all steps: without trees, all drafts."""
        return _sum(self.lengths)

    def draft(self, drafts: StepDrafts) -> None:
        """Take in what a step verifies."""
        self.lengths[drafts.depth] += 1
        self.num_drafted += drafts.drafted

    def reject(self, event: RollbackEvent, drafts: StepDrafts) -> None:
        """Take in that a step has rejected some of its drafts."""
        self.num_rejecting += drafts.accepted < drafts.depth
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
            InvariantError: there are none, they are no tree, or the tokens before them were not
                given yet.
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
        self.latest = StepDrafts(
            event.step,
            event.slot,
            event.position,
            event.tokens,
            depth=_depth(event, label),
            parents=event.parents,
        )
        self.counts.draft(self.latest)

    def accept(self, event: AcceptEvent, label: str) -> None:
        """Take in how many drafts of its step were accepted; see `_of_step` for what is raised."""
        latest = self._of_step(event, label, "accepts")
        if latest.accepted or event.position != latest.position:
            raise InvariantError(
                f"{label!r} accepts drafts from position {event.position} on in step {event.step}, "
                f"and those of the step begin at {latest.position + latest.accepted}"
            )
        _check_way(event, latest, label)
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
        self.counts.reject(event, latest)

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


def _depth(event: DraftEvent, label: str) -> int:
    """Return how many of the drafts of a step may be accepted.

    Raises:
        InvariantError: one follows another that is not before it.
    """
    if not event.parents:
        return event.tokens
    depths = [0]
    for draft, parent in enumerate(event.parents, 1):
        if not 0 <= parent < draft:
            raise InvariantError(
                f"{label!r} has draft {draft} follow draft {parent} in step {event.step}"
            )
        depths.append(depths[parent] + 1)
    if len(event.parents) != event.tokens:
        raise InvariantError(
            f"{label!r} drafts {event.tokens} tokens in step {event.step}, and "
            f"{len(event.parents)} have parents"
        )
    return max(depths)


def _check_way(event: AcceptEvent, drafts: StepDrafts, label: str) -> None:
    """Make sure that what is accepted of a tree is a way through it.

    Raises:
        InvariantError: it is not.
    """
    if not drafts.parents and not event.drafts:
        return
    parents = dict(enumerate(drafts.parents, 1))
    follows = zip((0, *event.drafts), event.drafts, strict=False)
    is_way = all(parents.get(draft) == before for before, draft in follows)
    if not is_way or len(event.drafts) != event.tokens:
        raise InvariantError(
            f"{label!r} accepts drafts {[*event.drafts]} in step {event.step}, which are not "
            f"{event.tokens} on end"
        )


def _sum(lengths: Mapping[int, int]) -> int:
    return sum(length * number for length, number in lengths.items())


def _longer_than(lengths: Mapping[int, int], length: int) -> int:
    return sum(number for drafted, number in lengths.items() if drafted > length)
