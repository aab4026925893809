"""The columns of a comparison: what they are called, what they read and which value is the best.

Rule: this is quick to import, since a shell that completes a line asks for their names.
"""

from collections.abc import Callable, Iterable
from difflib import get_close_matches
from typing import TYPE_CHECKING

from msgspec import Struct
from msgspec.structs import replace

from batcher.errors import BatchdecodeError

from ..screen.terminal import number, whole_percent

if TYPE_CHECKING:
    from batcher.planning.compare import GridCell
    from batcher.planning.measure import Outcome

Number = float | None
UNITS = {"queue": ("s", 1), "ttft": ("s", 1), "tpot": ("ms", 1000), "e2e": ("s", 1)}
"""The unit of each latency, and how many of it a second has."""


class Column(Struct, frozen=True):
    """A number of an outcome; None where it is not known.

    group, title: the two lines of its head; a group is told over its first column.
    best: 1 if the largest number is, -1 if the least.
    """

    name: str
    group: str
    title: str
    read: Callable[["Outcome"], Number]
    show: Callable[[float], str]
    best: int = 1

    def value_of(self, cell: "GridCell") -> Number:
        """Return its number for `cell`."""
        return None if cell.outcome is None else self.read(cell.outcome)

    def in_steps(self) -> "Column":
        """Return the same where a step is all that is known of time."""
        metric, _, unit = self.group.rpartition(" ")
        if unit in ("s", "ms"):
            return replace(self, group=metric, show=number)
        if self.title == "tokens/s":
            return replace(self, group="in steps", title="tokens/step")
        return self

    def text_of(self, cell: "GridCell") -> str:
        """Return its number for `cell` as people read it."""
        value = self.value_of(cell)
        return "-" if value is None else self.show(value)


class SpeedupColumn(Column, frozen=True):
    """How many times as fast a cell is as the same without drafts."""

    def value_of(self, cell: "GridCell") -> Number:
        """Return its number for `cell`."""
        return cell.speedup


def _latency(metric: str, percent: str) -> Column:
    def read(outcome: "Outcome") -> Number:
        times = getattr(outcome.latencies, metric)
        value: Number = None if times is None else getattr(times, percent)
        return value

    unit, scale = UNITS[metric]
    group, show = f"{metric} {unit}", lambda value: number(value * scale)
    return Column(f"{metric}-{percent}", group, percent, read, show, -1)


def time_text(metric: str, seconds: float, *, in_steps: bool) -> str:
    """Return a latency in the unit that the columns have it in."""
    if in_steps:
        return f"{number(seconds)} step{'' if seconds == 1 else 's'}"
    unit, scale = UNITS[metric]
    return f"{number(seconds * scale)} {unit}"


def _part(part: str, name: str) -> Callable[["Outcome"], Number]:
    """Return what reads a number of a part of an outcome, which may be None."""

    def read(outcome: "Outcome") -> Number:
        found = getattr(outcome, part)
        value: Number = None if found is None else getattr(found, name)
        return value

    return read


def good_percent(share: float) -> str:
    """Return a share rounded down to a tenth of a per cent, so that a miss is not rounded away."""
    return f"{int(share * 1000 + 1e-6) / 10:g}%"


def _count(value: float) -> str:
    return f"{int(value):,}"


COLUMNS = {
    column.name: column
    for column in (
        Column("throughput", "", "tokens/s", lambda outcome: outcome.tokens_per_s, number),
        Column("requests", "", "outputs/s", lambda outcome: outcome.requests_per_s, number),
        *(_latency(metric, percent) for metric in UNITS for percent in ("p50", "p99")),
        Column(
            "goodput", "", "good", lambda o: o.goodput.share if o.goodput else None, good_percent
        ),
        Column("slots", "used", "slots", lambda outcome: outcome.slots_used, whole_percent),
        Column("kv", "used", "KV", lambda outcome: outcome.kv_used, whole_percent),
        Column("budget", "used", "budget", lambda outcome: outcome.budget_used, whole_percent),
        Column("mean-replicas", "replicas", "mean", _part("fleet", "mean_replicas"), number, -1),
        Column("preemptions", "", "preempt", lambda outcome: outcome.preemptions, _count, -1),
        Column("hits", "prefix", "hits", lambda outcome: outcome.prefix_hits, whole_percent),
        Column(
            "accepted",
            "drafts",
            "accepted",
            lambda o: o.drafts.acceptance if o.drafts else None,
            whole_percent,
        ),
        SpeedupColumn(
            "speedup", "drafts", "speedup", lambda _: None, lambda value: f"{value:.3g}x"
        ),
        Column("price", "$ an", "hour", _part("cost", "dollars_per_hour"), number, -1),
        Column("cost", "a million", "$", _part("cost", "dollars_per_million_tokens"), number, -1),
        Column("energy", "a million", "kWh", _part("cost", "kwh_per_million_tokens"), number, -1),
        Column("lost", "", "lost", _part("fleet", "lost"), _count, -1),
        Column("refused", "", "refused", lambda outcome: outcome.refused, _count, -1),
        Column("failed", "", "failed", lambda outcome: outcome.failed, _count, -1),
    )
}


def class_columns(cells: "Iterable[GridCell]") -> list[Column]:
    """Return a column for the goodput of each class of requests that a comparison tells apart."""
    outcomes = [cell.outcome for cell in cells if cell.outcome is not None]

    def of(name: str) -> Column:
        def read(outcome: "Outcome") -> Number:
            return outcome.classes[name].goodput.share

        return Column(f"goodput-{name}", "good of", name, read, good_percent)

    return [of(name) for name in (outcomes[0].classes if outcomes else ())]


def column_of(name: str) -> Column:
    """Return the column called `name`.

    Raises:
        BatchdecodeError: there is none.
    """
    if name in COLUMNS:
        return COLUMNS[name]
    near = get_close_matches(name, COLUMNS, n=1)
    hint = f"; did you mean {near[0]}?" if near else ""
    raise BatchdecodeError(f"--sort: unknown column {name!r}{hint} (known: {', '.join(COLUMNS)})")
