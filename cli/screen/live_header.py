"""How far a run is, in a line: the header of the live view, and the progress line of a log."""

from collections.abc import Callable
from typing import NamedTuple

from cli.screen.cells import cell_width, counted, cut_middle
from cli.screen.live_state import RunState
from cli.screen.summary_timed import HOLD_CAUSES

GAP = "  "
MIN_TITLE_WIDTH = 8


class Moment(NamedTuple):
    """When a run is looked at; `total` (of requests) and `num_queued` are None if nobody knows."""

    step: int
    total: int | None
    num_queued: int | None
    tokens_per_step: float
    seconds: float


class Fact(NamedTuple):
    """One entry of the line.  Where there is no room for all, the lowest rank goes first."""

    rank: int
    name: str
    text: str


def facts(run: RunState, moment: Moment) -> list[Fact]:
    """Return what there is to say, but for the run's title, from left to right."""
    of_total = "" if moment.total is None else f"/{moment.total:,}"
    found = [
        Fact(6, "step", f"step {moment.step:,}"),
        Fact(5, "done", f"{run.num_done:,}{of_total} done"),
    ]
    if run.num_failed:
        found.append(Fact(4, "failed", f"{run.num_failed:,} failed"))
    if moment.num_queued is not None:
        found.append(Fact(3, "queued", f"{moment.num_queued:,} queued"))
    if run.held is not None:
        needs = f", needs {counted(run.held.blocks, 'block')}" if run.held.blocks else ""
        found.append(Fact(3, "held", f"held back: {HOLD_CAUSES[run.held.reason]}{needs}"))
    found.append(Fact(2, "rate", f"{moment.tokens_per_step:.1f} tok/step"))
    found.append(Fact(1, "elapsed", format_seconds(moment.seconds)))
    return found


def header(
    title: str, known: list[Fact], width: int, mark: str, paint: Callable[[str, str], str]
) -> str:
    """Return `title` and the facts `known` in at most `width` cells, the speed at the right edge.

    `mark` stands for what is cut from the title; `paint(name, text)` colours one entry.
    """
    kept = list(known)
    while len(kept) > 1 and _width(kept) > width:
        kept.remove(min(kept))
    room = width - _width(kept) - len(GAP)
    if room >= min(MIN_TITLE_WIDTH, cell_width(title)):
        kept.insert(0, Fact(7, "title", cut_middle(title, room, mark)))
    spare = width - _width(kept)
    texts = [paint(fact.name, fact.text) for fact in kept]
    names = [fact.name for fact in kept]
    if "rate" in names:
        texts[names.index("rate")] = " " * spare + texts[names.index("rate")]
    return GAP.join(texts) if spare >= 0 else cut_middle(kept[0].text, width, mark)


def progress_line(title: str, known: list[Fact]) -> str:
    """Return the same for a log: one plain line of whatever length."""
    return GAP.join([title, *(fact.text for fact in known)])


def format_seconds(seconds: float) -> str:
    """Return `seconds` as 0:03, 12:34 or 1:02:03."""
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def _width(entries: list[Fact]) -> int:
    return sum(cell_width(fact.text) for fact in entries) + len(GAP) * (len(entries) - 1)
