"""The columns of a comparison: names, paths, formats and directions.

Rule: this module is quick to import, since shell completion reads the names.
"""

from collections.abc import Callable, Iterable
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any

from msgspec import Struct
from msgspec.structs import replace

from batcher.errors import BatchdecodeError

from ..screen.terminal import number, whole_percent

if TYPE_CHECKING:
    from batcher.planning.compare import GridCell

Number = float | None
# The unit of each latency, and its number per second.
UNITS = {"queue": ("s", 1), "ttft": ("s", 1), "tpot": ("ms", 1000), "e2e": ("s", 1)}


class Column(Struct, frozen=True):
    """A number of a cell.

    group, title: the two lines of its head; a group is shown above its first column.
    path: attributes from the cell.  best: 1 for the largest number, -1 for the least.
    """

    name: str
    group: str
    title: str
    path: str
    show: Callable[[float], str]
    best: int = 1

    def value_of(self, cell: "GridCell") -> Number:
        found: Any = cell
        for name in self.path.split("."):
            if found is None:
                return None
            found = found.get(name) if isinstance(found, dict) else getattr(found, name)
        value: Number = found
        return value

    def in_steps(self) -> "Column":
        metric, _, unit = self.group.rpartition(" ")
        if unit in ("s", "ms"):
            return replace(self, group=metric, show=number)
        if self.title == "tokens/s":
            return replace(self, group="in steps", title="tokens/step")
        return self

    def text_of(self, cell: "GridCell") -> str:
        value = self.value_of(cell)
        return "-" if value is None else self.show(value)


def _latency(metric: str, percent: str) -> Column:
    unit, scale = UNITS[metric]
    path = f"outcome.latencies.{metric}.{percent}"
    name, group = f"{metric}-{percent}", f"{metric} {unit}"
    return Column(name, group, percent, path, lambda value: number(value * scale), -1)


def time_text(metric: str, seconds: float, *, in_steps: bool) -> str:
    if in_steps:
        return f"{number(seconds)} step{'' if seconds == 1 else 's'}"
    unit, scale = UNITS[metric]
    return f"{number(seconds * scale)} {unit}"


def good_percent(share: float) -> str:
    """Return a share rounded down to a tenth of a per cent, so that 100% means all."""
    return f"{int(share * 1000 + 1e-6) / 10:g}%"


def _count(value: float) -> str:
    return f"{int(value):,}"


COLUMNS = {
    column.name: column
    for column in (
        Column("throughput", "", "tokens/s", "outcome.tokens_per_s", number),
        Column("requests", "", "outputs/s", "outcome.requests_per_s", number),
        *(_latency(metric, percent) for metric in UNITS for percent in ("p50", "p99")),
        Column("goodput", "", "good", "outcome.goodput.share", good_percent),
        Column("slots", "used", "slots", "outcome.slots_used", whole_percent),
        Column("kv", "used", "KV", "outcome.kv_used", whole_percent),
        Column("budget", "used", "budget", "outcome.budget_used", whole_percent),
        Column("mean-replicas", "replicas", "mean", "outcome.fleet.mean_replicas", number, -1),
        Column("preemptions", "", "preempt", "outcome.preemptions", _count, -1),
        Column("hits", "prefix", "hits", "outcome.prefix_hits", whole_percent),
        Column("accepted", "drafts", "accepted", "outcome.drafts.acceptance", whole_percent),
        Column("speedup", "drafts", "speedup", "speedup", lambda value: f"{value:.3g}x"),
        Column("price", "$ an", "hour", "outcome.cost.dollars_per_hour", number, -1),
        Column("cost", "a million", "$", "outcome.cost.dollars_per_million_tokens", number, -1),
        Column("energy", "a million", "kWh", "outcome.cost.kwh_per_million_tokens", number, -1),
        Column("lost", "", "lost", "outcome.fleet.lost", _count, -1),
        Column("refused", "", "refused", "outcome.refused", _count, -1),
        Column("failed", "", "failed", "outcome.failed", _count, -1),
    )
}


def class_columns(cells: "Iterable[GridCell]") -> list[Column]:
    outcomes = [cell.outcome for cell in cells if cell.outcome is not None]
    paths = {
        name: f"outcome.classes.{name}.goodput.share"
        for name in (outcomes[0].classes if outcomes else ())
    }
    return [Column(f"goodput-{n}", "good of", n, path, good_percent) for n, path in paths.items()]


def column_of(name: str) -> Column:
    if name in COLUMNS:
        return COLUMNS[name]
    near = get_close_matches(name, COLUMNS, n=1)
    hint = f"; did you mean {near[0]}?" if near else ""
    raise BatchdecodeError(f"--sort: unknown column {name!r}{hint} (known: {', '.join(COLUMNS)})")
