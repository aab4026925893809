"""The columns of a comparison: what each one holds, how it is shown, and which value is best."""

from collections.abc import Callable
from difflib import get_close_matches
from math import inf

from msgspec import Struct

from batcher.errors import BatchdecodeError
from batcher.whatif.comparing import Cell
from batcher.whatif.measuring import Outcome

from ..screen.cells import number, whole_percent

Number = float | None


class Column(Struct, frozen=True):
    """A number of an outcome; None where it is not known.

    group, title: the two lines of its head.  best: 1 if the largest number is, -1 if the least.
    """

    name: str
    group: str
    title: str
    read: Callable[[Outcome], Number]
    show: Callable[[float], str]
    best: int = 1

    def value_of(self, cell: Cell) -> Number:
        """Return its number for `cell`."""
        return None if cell.outcome is None else self.read(cell.outcome)

    def text_of(self, cell: Cell) -> str:
        """Return its number for `cell` as people read it."""
        value = self.value_of(cell)
        return "-" if value is None else self.show(value)


def _percentile(metric: str, name: str) -> Callable[[Outcome], Number]:
    def read(outcome: Outcome) -> Number:
        times = getattr(outcome.latencies, metric)
        value: Number = None if times is None else getattr(times, name)
        return value

    return read


def _latency(metric: str, percent: str) -> Column:
    read = _percentile(metric, percent)
    group = f"{metric} s" if percent == "p50" else ""
    return Column(f"{metric}-{percent}", group, percent, read, number, -1)


def _count(value: float) -> str:
    return f"{int(value):,}"


def _goodput(outcome: Outcome) -> Number:
    return None if outcome.goodput is None else outcome.goodput.share


COLUMNS = {
    column.name: column
    for column in (
        Column("throughput", "", "tokens/s", lambda outcome: outcome.tokens_per_s, number),
        Column("requests", "", "req/s", lambda outcome: outcome.requests_per_s, number),
        *(
            _latency(metric, percent)
            for metric in ("queue", "ttft", "tpot", "e2e")
            for percent in ("p50", "p99")
        ),
        Column("goodput", "", "good", _goodput, whole_percent),
        Column("slots", "used", "slots", lambda outcome: outcome.slots_used, whole_percent),
        Column("kv", "", "KV", lambda outcome: outcome.kv_used, whole_percent),
        Column("budget", "", "budget", lambda outcome: outcome.budget_used, whole_percent),
        Column("preemptions", "", "preempt", lambda outcome: outcome.preemptions, _count, -1),
        Column("hits", "prefix", "hits", lambda outcome: outcome.prefix_hits, whole_percent),
        Column("failed", "", "failed", lambda outcome: outcome.failed, _count, -1),
    )
}
TABLE = [name for name in COLUMNS if name not in {"requests", "queue-p50", "queue-p99"}]
ONLY_IF_NOT_0 = {"preemptions", "failed"}


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


def best_first(cells: list[Cell], column: Column) -> list[Cell]:
    """Return `cells` with the best of a column first; equal ones in their order, unknown last."""

    def key(cell: Cell) -> float:
        value = column.value_of(cell)
        return inf if value is None else -column.best * value

    return sorted(cells, key=key)
