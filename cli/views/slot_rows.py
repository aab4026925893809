"""Which slots a picture gives a row, where there are more slots than it has room for."""

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from batcher.events import RunEvent
from batcher.trace.run import FAILURES, SlotSpan

from ..screen.terminal import counted


class ShownSlots(NamedTuple):
    """The slots that have a row, ascending, and in words why these; "" where all have one."""

    slots: list[int]
    reason: str


def in_groups(slots: Sequence[int], max_groups: int) -> list[Sequence[int]]:
    """Return `slots` in at most `max_groups` runs of the same size, the last one may be shorter."""
    size = -(-len(slots) // max_groups)
    return [slots[start : start + size] for start in range(0, len(slots), size)]


def group_name(group: Sequence[int], run: RunEvent) -> str:
    """Return what a row is called that stands for the slots of `group`, w2 being worker 2."""
    first, last = group[0], group[-1]
    slots = f"slot {first}" if len(group) == 1 else f"{first}-{last}"
    if run.workers == 1:
        return slots
    first_worker, last_worker = first // run.batch, last // run.batch
    others = "" if first_worker == last_worker else f"-{last_worker}"
    return f"w{first_worker}{others} {slots}"


def has_failed(span: SlotSpan) -> bool:
    """Return whether the request came to a bad end."""
    return span.outcome in FAILURES


def choose_slots(
    held: Mapping[int, Sequence[SlotSpan]],
    busy: Mapping[int, int],
    num_rows: int,
    request_ids: Collection[str] = frozenset(),
) -> ShownSlots:
    """Return the `num_rows` slots that tell the most.

    First those that held `request_ids`, then those with the most preemptions and failures, for half
    of the rows at most; the others are the idlest and the busiest.  A slot that was never used says
    nothing, and comes last; of equal ones the first is taken.

    held: by slot, what is shown of it.  busy: in how many of the shown steps it held something.
    """
    slots = list(held)
    if len(slots) <= num_rows:
        return ShownSlots(slots, "")
    used = [slot for slot in slots if busy[slot]]
    if len(used) <= num_rows:
        unused = [slot for slot in slots if not busy[slot]]
        chosen = sorted([*used, *unused[: num_rows - len(used)]])
        return ShownSlots(chosen, f"{counted(len(used), 'slot')} in use")
    wanted = {slot: sum(span.id in request_ids for span in held[slot]) for slot in used}
    trouble = {
        slot: sum(has_failed(span) or span.preemption is not None for span in held[slot])
        for slot in used
    }
    taken: list[int] = []
    words: list[str] = []

    def take(ranked: Sequence[int], most: int, what: str) -> None:
        found = [slot for slot in ranked if slot not in taken][:most]
        taken.extend(found)
        if found:
            words.append(f"{len(found)} {what}")

    take([slot for slot in used if wanted[slot]], num_rows, "asked for")
    troubled = sorted(filter(trouble.__getitem__, used), key=lambda slot: -trouble[slot])
    take(troubled, (num_rows - len(taken)) // 2, "with most preemptions or failures")
    if len({busy[slot] for slot in used if slot not in taken}) > 1:
        take(sorted(used, key=lambda slot: busy[slot]), (num_rows - len(taken)) // 2, "idlest")
        take(sorted(used, key=lambda slot: -busy[slot]), num_rows - len(taken), "busiest")
    else:
        take(used, num_rows - len(taken), "equally busy")
    return ShownSlots(sorted(taken), f"slots: {', '.join(words)}")
