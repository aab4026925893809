"""The part of a story that tells of drafts, as records: what they brought a sequence in a slot."""

from msgspec import Struct

from batcher.events import SpeculateEvent, SpeculateReason
from batcher.trace.drafts import DraftRecord


class DraftChange(Struct, frozen=True):
    """From the step after `step` on, `tokens` drafts were wanted in each."""

    step: int
    tokens: int
    reason: SpeculateReason

    @classmethod
    def by(cls, event: SpeculateEvent) -> "DraftChange":
        """Return what `event` tells of it."""
        return cls(event.step, event.tokens, event.reason)


class StoryDrafts(Struct, frozen=True, omit_defaults=True):
    """What drafts brought a sequence in a slot.

    steps: how many verified some.  by_position: how many i-th drafts of a step there were, and how
    many were accepted, as in a DraftCounts.  changes: how often another number was wanted, and the
    last time.
    """

    steps: int
    drafted: int
    accepted: int
    by_position: list[tuple[int, int]]
    changes: int = 0
    last_change: DraftChange | None = None

    @classmethod
    def of(cls, record: DraftRecord) -> "StoryDrafts":
        """Return what the fold has kept of it."""
        counts, change = record.counts, record.last_change
        return cls(
            counts.num_steps,
            counts.num_drafted,
            counts.num_accepted,
            counts.by_position(),
            record.num_changes,
            None if change is None else DraftChange.by(change),
        )
