"""Every step of a request's life, each explained once: what it waited for, or what it did.

Rule: a step belongs to exactly one part, and the parts follow each other without a gap.
"""

from bisect import bisect_left
from collections.abc import Iterator
from typing import Literal

from msgspec import Struct
from msgspec.structs import replace

from batcher.events import HoldReason
from batcher.explaining.lives import Life, Visit
from batcher.timeline import Selection, Timeline
from batcher.timeline.stays import Hold, StepRow, is_follower

Phase = Literal["wait", "prefill", "decode"]
Cause = Literal["", "slots", "queue", "prefill"] | HoldReason


class Part(Struct, frozen=True, omit_defaults=True):
    """Steps [start, end) that went the same way.

    phase: "wait" for a slot; "prefill" up to and including the first token; then "decode".
    cause: of a wait, "slots" (too few were free), what held it or the one `behind` which it stood
    ("kv", "tokens", "preemption", "batch"), or "queue" (others before it needed more slots than
    were free).  Of a standstill in a slot, "tokens" (others used up what a step may compute) or
    "prefill" (the step computed prompts of others alone).  "" if it had its share.
    blocks: how many the one that was held needed.
    by: who had slots in the first of the steps, if it waited; a label for each slot.
    num_passed: how many were let in before it meanwhile.
    """

    start: int
    end: int
    phase: Phase
    cause: Cause = ""
    behind: str | None = None
    blocks: int = 0
    by: tuple[str, ...] = ()
    num_passed: int = 0

    @property
    def num_steps(self) -> int:
        """How many steps these are."""
        return self.end - self.start


def explain(timeline: Timeline, life: Life) -> list[Part]:
    """Return the parts of `life`, from its arrival to its end."""
    steps = life.steps(timeline.num_steps)
    parts: list[Part] = []
    if not steps:
        return parts
    views = _steps_of(timeline, life, steps)
    for row, visit, hold in views:
        part = _part_of(timeline, life, row, visit, hold)
        if parts and _is_same(parts[-1], part):
            parts[-1] = replace(parts[-1], end=part.end)
        else:
            parts.append(part)
    return _with_passed(timeline, parts)


def _steps_of(
    timeline: Timeline, life: Life, steps: range
) -> Iterator[tuple[StepRow, Visit | None, Hold | None]]:
    """Yield each of `steps` with the visit of `life` and the hold that it falls into, if any."""
    visits, holds = iter(life.visits), iter(timeline.holds)
    visit, hold = next(visits, None), next(holds, None)
    for row in timeline.select_steps(Selection(start=steps.start, stop=steps.stop)):
        while visit is not None and visit.preempt is not None and visit.preempt.step <= row.step:
            visit = next(visits, None)
        while hold is not None and hold.end <= row.step:
            hold = next(holds, None)
        is_in_slot = visit is not None and visit.admit.step <= row.step
        is_held = hold is not None and hold.start <= row.step
        yield row, visit if is_in_slot else None, hold if is_held else None


def _part_of(
    timeline: Timeline, life: Life, row: StepRow, visit: Visit | None, hold: Hold | None
) -> Part:
    """Return the part that is one step."""
    step = row.step
    if visit is None:
        return _wait(life, row, hold)
    if visit.first_token is None or step <= visit.first_token:
        if step in visit.computed_steps or (step == visit.admit.step and _computes(life, visit)):
            return Part(step, step + 1, "prefill")
        return Part(
            step, step + 1, "prefill", "prefill" if _is_prefill_first(timeline) else "tokens"
        )
    is_standstill = timeline.figures.is_standstill(step)
    return Part(step, step + 1, "decode", "prefill" if is_standstill else "")


def _computes(life: Life, visit: Visit) -> bool:
    """Return whether the step of its admission computed any of its tokens."""
    admit = visit.admit
    if life.arrive is None:
        return True
    return life.arrive.prompt_tokens + admit.generated - admit.cached > admit.left


def _is_prefill_first(timeline: Timeline) -> bool:
    """Return whether steps compute prompts alone, where there are some to compute."""
    return timeline.run.scheduling.get("prefill_order") == "prefill-first"


def _wait(life: Life, row: StepRow, hold: Hold | None) -> Part:
    """Return the part that is one step of a wait.

    Where no slot is free, nothing else counts.
    """
    by = tuple(label for label in row.slots if label is not None)
    num_free = len(row.slots) - len(by)
    if num_free and hold is not None:
        behind = None if (hold.id, hold.index) == (life.id, life.index) else hold.label
        return Part(row.step, row.step + 1, "wait", hold.reason, behind, hold.blocks, by)
    cause: Cause = "slots" if num_free < life.num_rows else "queue"
    return Part(row.step, row.step + 1, "wait", cause, by=by)


def _is_same(before: Part, after: Part) -> bool:
    """Return whether the two went the same way."""
    return (before.phase, before.cause, before.behind, before.blocks) == (
        after.phase,
        after.cause,
        after.behind,
        after.blocks,
    )


def _with_passed(timeline: Timeline, parts: list[Part]) -> list[Part]:
    """Return `parts`, the waits with how many were let in meanwhile.

    What is let in at the end of a wait, or after it, did not come before it.
    """
    starts = [span.start for span in timeline.spans if not is_follower(span)]
    return [
        replace(part, num_passed=bisect_left(starts, part.end) - bisect_left(starts, part.start))
        if part.phase == "wait"
        else part
        for part in parts
    ]
