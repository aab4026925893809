"""What the steps of a run used of what is limited: blocks, tokens, the prefix cache.

Rule: nothing here depends on who was given a token, only on what was computed and held.
"""

from typing import ClassVar

from msgspec import Struct, field

from batcher.events import AdmitEvent, Event, PreemptEvent
from batcher.metrics.steps import WholeStep
from batcher.settings import SchedulingSettings
from batcher.totals import Totals
from batcher.trace.records import RequestTimeline, is_follower

NUM_DIGITS = 6


class KvUse(Struct, frozen=True, kw_only=True):
    """Blocks that sequences held; means are over the time that steps took.

    total, and shares of it: None if their number is not limited.
    """

    block_size: int
    total: int | None
    mean_blocks: float
    max_blocks: int
    mean_share: float | None
    max_share: float | None


class BudgetUse(Struct, frozen=True, kw_only=True):
    """How many of the tokens that a step may compute were computed.

    mean_share: over the steps.  full_steps: steps that computed as many as they may.
    """

    max_batch_tokens: int
    mean_share: float
    full_steps: int


class PrefixHits(Struct, frozen=True, kw_only=True):
    """How many tokens were found in blocks, of all that samples were admitted with.

    share: found of asked, by those admitted the first time.  again: by those admitted after a
    preemption.
    """

    asked: int
    found: int
    share: float
    asked_again: int
    found_again: int


class Preemptions(Struct, frozen=True, kw_only=True):
    """count: how often a sample, or all beams of a request, lost its slot.

    recomputed_tokens: those computed before, which were not found when it was admitted again.
    """

    count: int
    recomputed_tokens: int


class BlockedSteps(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Steps in which a slot was free for the first of the queue, and it was not admitted."""

    kv: int
    tokens: int
    preemption: int
    batch: int
    rate: int = 0
    concurrency: int = 0


class Computed(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Tokens that were computed, and positions that other layouts would compute or read beside.

    prefill_tokens: of prompts, and again after preemptions.  decode_tokens: one after another.
    right_padding: more tokens computed if all rows of a prefill were as long as the longest.
    left_padding: more positions read if all decoding rows were.  A ragged layout has neither.
    prefill_share: of what a right-padded prefill computes, the part that is padding.
    draft_tokens: drafts, whatever became of them.
    """

    prefill_tokens: int
    decode_tokens: int
    right_padding: int
    left_padding: int
    prefill_share: float
    draft_tokens: int = 0


class StepUse(Totals):
    """Adds up what each step computed and held; the settings are those of the run.

    num_full: steps that computed as many tokens as they may.  seconds, block_seconds: how long all
    took, and the sum of the blocks held in each times how long it took.
    """

    LARGEST: ClassVar = frozenset({"max_blocks"})

    num_steps: int = 0
    num_full: int = 0
    prefill_tokens: int = 0
    decode_tokens: int = 0
    draft_tokens: int = 0
    right_padding: int = 0
    left_padding: int = 0
    max_blocks: int = 0
    seconds: float = 0.0
    block_seconds: float = 0.0

    def observe(self, step: WholeStep, settings: SchedulingSettings) -> None:
        """Take in the next step."""
        duration = step.end - step.start
        self.num_steps += 1
        self.num_full += step.decodes + step.prefills == settings.max_batch_tokens
        self.prefill_tokens += step.prefills
        if step.drafts:
            self.prefill_tokens -= step.drafts
            self.draft_tokens += step.drafts
        self.decode_tokens += step.decodes
        self.right_padding += step.prefill_padding
        self.left_padding += step.decode_padding
        self.max_blocks = max(self.max_blocks, step.blocks)
        self.seconds += duration
        self.block_seconds += step.blocks * duration

    def kv(self, settings: SchedulingSettings) -> KvUse | None:
        """Return how many blocks were held, None where there are no blocks."""
        if not settings.is_paged:
            return None
        total = settings.kv_blocks
        mean = self.block_seconds / self.seconds if self.seconds else 0.0
        return KvUse(
            block_size=settings.block_size,
            total=total,
            mean_blocks=round(mean, 3),
            max_blocks=self.max_blocks,
            mean_share=None if total is None else round(mean / total, NUM_DIGITS),
            max_share=None if total is None else round(self.max_blocks / total, NUM_DIGITS),
        )

    def budget(self, settings: SchedulingSettings) -> BudgetUse | None:
        """Return how far the token budget was used, None where there is none."""
        budget = settings.max_batch_tokens
        if budget is None:
            return None
        num_tokens = self.prefill_tokens + self.decode_tokens + self.draft_tokens
        mean = num_tokens / max(1, self.num_steps)
        return BudgetUse(
            max_batch_tokens=budget,
            mean_share=round(mean / budget, NUM_DIGITS),
            full_steps=self.num_full,
        )

    def computed(self) -> Computed:
        """Return what was computed, and what padding would have cost."""
        padded = self.prefill_tokens + self.right_padding
        return Computed(
            prefill_tokens=self.prefill_tokens,
            decode_tokens=self.decode_tokens,
            right_padding=self.right_padding,
            left_padding=self.left_padding,
            prefill_share=round(self.right_padding / padded, NUM_DIGITS) if padded else 0.0,
            draft_tokens=self.draft_tokens,
        )


class CacheUse(Totals):
    """Counts what was found in blocks at admissions, and what preemptions threw away.

    hits: as in PrefixHits, by name.
    """

    hits: dict[str, int] = field(
        default_factory=lambda: dict.fromkeys(("asked", "found", "asked_again", "found_again"), 0)
    )
    num_preempted: int = 0
    recomputed: int = 0

    def observe(self, event: Event, request: RequestTimeline) -> None:
        """Take in the next event of a sequence."""
        if isinstance(event, PreemptEvent):
            self.num_preempted += not is_follower(event)
        elif isinstance(event, AdmitEvent):
            preempts = [admission.preempt for admission in request.admissions[-2:-1]]
            lost = preempts[0] if preempts else None
            if lost is not None:
                self.recomputed += max(0, lost.tokens - event.cached)
            if request.arrive is None:  # it came along with another one
                return
            again = "" if lost is None else "_again"
            self.hits[f"asked{again}"] += request.arrive.prompt_tokens + event.generated
            self.hits[f"found{again}"] += event.cached

    def prefix(self) -> PrefixHits:
        """Return how often prefixes were found."""
        asked, found = self.hits["asked"], self.hits["found"]
        return PrefixHits(share=round(found / asked, NUM_DIGITS) if asked else 0.0, **self.hits)

    def preemptions(self) -> Preemptions:
        """Return what preemptions cost."""
        return Preemptions(count=self.num_preempted, recomputed_tokens=self.recomputed)
