"""What run a picture of it shows, in figures."""

from collections.abc import Collection

from batcher.trace.timeline import Timeline

from ..screen.terminal import counted, listed, whole_percent

MAX_NAMED = 3  # stretches of slots


def headline(timeline: Timeline, slots: Collection[int] = ()) -> list[str]:
    """Return how much a run was, and what became of it, part by part.

    slots: those that are shown, all if there are none.
    """
    num_busy = num_preemptions = num_drafted = num_accepted = 0
    num_workers, running = timeline.run.workers, set()
    for span in timeline.spans:
        num_busy += span.end - span.start
        num_preemptions += span.preemption is not None
        num_drafted += span.drafted
        num_accepted += span.accepted
        if span.outcome is None:
            running.add(span.id)
    parts = [
        counted(timeline.num_steps, "step"),
        *([counted(num_workers, "worker")] if num_workers > 1 else []),
        counted(timeline.num_slots, "slot") + _shown(slots, timeline),
        f"{percent_of(num_busy, timeline.num_steps * timeline.num_slots)} busy",
        counted(timeline.num_requests, "request"),
    ]
    if timeline.num_outputs != timeline.num_requests:
        parts.append(counted(timeline.num_outputs, "output"))
    failures = timeline.failures
    if failures["error"]:
        parts.append(f"{failures['error']:,} failed")
    if failures["aborted"]:
        parts.append(f"{failures['aborted']:,} aborted")
    if num_preemptions:
        parts.append(counted(num_preemptions, "preemption"))
    if timeline.restarts:
        parts.append(counted(len(timeline.restarts), "restart"))
    if num_drafted:
        parts.append(f"{num_accepted:,} of {counted(num_drafted, 'draft')} accepted")
    if running:
        parts.append(f"{len(running):,} still running")
    return parts


def _shown(slots: Collection[int], timeline: Timeline) -> str:
    """Return which slots are shown of all, to follow their number."""
    if not slots or len(slots) == timeline.num_slots:
        return ""
    stretches: list[list[int]] = []
    for slot in sorted(slots):
        if stretches and stretches[-1][-1] == slot - 1:
            stretches[-1].append(slot)
        else:
            stretches.append([slot])
    if len(stretches) > MAX_NAMED:
        return f", {len(slots):,} of them shown"
    names = [f"{s[0]}" if len(s) == 1 else f"{s[0]}-{s[-1]}" for s in stretches]
    return f", {listed(names, 'and')} shown"


def percent_of(part: int, whole: int) -> str:
    """Return a share such that 0% is nothing and 100% is all."""
    return whole_percent(part / whole) if whole else "0%"
