"""A comparison as text: the table for people, the CSV and the JSON of its columns."""

import csv
import io
from collections.abc import Callable, Iterable, Iterator, Sequence
from math import inf

import msgspec

from batcher.planning.compare import GridCell, settings_of, varied
from batcher.planning.deployments import AXES, Axis, Deployment, show_value
from batcher.planning.drafting import off_from
from batcher.planning.fleets import engines_of
from batcher.planning.prices import Cost

from ..screen.terminal import (
    aligned,
    cell_width,
    counted,
    cut_middle,
    cut_path,
    listed,
    number,
    printable,
    whole_percent,
    wrapped,
)
from .changes_text import refusals_of
from .columns import COLUMNS, Column, class_columns

TABLE = [name for name in COLUMNS if name not in {"requests", "queue-p50", "queue-p99"}]
LEAST_WANTED = (  # where there is no room for all, in the order in which they go
    "hits",
    "slots",
    "budget",
    "e2e-p50",
    "tpot-p50",
    "kv",
    "ttft-p50",
    "preemptions",
    "e2e-p99",
    "energy",
    "lost",
    "price",
    "mean-replicas",
)
SHORT_SETTINGS = (
    32,
    28,
    24,
    20,
    16,
    12,
)  # cells of a setting, where leaving out columns does not do
ONLY_IF_NOT_0 = {"preemptions", "lost", "refused", "failed"}


def best_first(cells: list[GridCell], column: Column) -> list[GridCell]:
    """Return `cells` with the best of a column first; equal ones in their order, unknown last."""

    def key(cell: GridCell) -> float:
        value = column.value_of(cell)
        return inf if value is None else -column.best * value

    return sorted(cells, key=key)


BINDS = {
    "slots": "slots",
    "kv": "KV",
    "tokens": "token budget",
    "static": "static batch",
    "compute": "compute",
    "arrivals": "arrivals",
}


def is_in_steps(deployments: Iterable[Deployment]) -> bool:
    """Return whether no step time is known, so that times are steps."""
    return all(each.profile == Deployment().profile for each in engines_of(deployments))


WAITS = {
    "slots": "waiting for slots",
    "kv": "waiting for KV",
    "tokens": "waiting for the token budget",
    "static": "waiting for the static batch",
    "compute": "computing",
    "arrivals": "waiting for arrivals",
}


def table_of(cells: Sequence[GridCell], width: int | None = None, wanted: str = "") -> str:
    """Return a table with a row for each cell, and below it what no combination can be, or run.

    width: how many cells a line may have, None for any number; columns that have no room are left
    out, but not the one called `wanted`.
    """
    differing = varied(cell.deployment for cell in cells)
    has_files = any(cell.deployment.fleet is not None for cell in cells)
    names = differing or ["fleet" if has_files else "batch"]
    axes = [AXES[name] for name in AXES if name in names]
    has_steps = is_in_steps(cell.deployment for cell in cells)
    known = {name: COLUMNS[name].in_steps() if has_steps else COLUMNS[name] for name in TABLE}
    columns = [
        column
        for name in TABLE
        for column in (known[name], *(class_columns(cells) if name == "goodput" else ()))
        if _has_news(column, cells)
    ]
    lines = _rows(cells, axes, columns)
    spare = [name for name in LEAST_WANTED if name != wanted]
    without: list[str] = []
    while spare and width is not None and max(map(cell_width, lines)) > width:
        name = spare.pop(0)
        if known[name] in columns:
            columns.remove(known[name])
            without.append(name)
            lines = _rows(cells, axes, columns)
    named = [AXES[name] for name in AXES if name in differing]
    lines = _fitting(lines, width, lambda cut: _rows(cells, axes, columns, cut))
    lines += _fitting(_group_rows(cells, named), width, lambda cut: _group_rows(cells, named, cut))
    notes = list(dict.fromkeys(note for cell in cells for note in _notes(cell)))
    notes += refusals_of(cells, named)
    notes += dict.fromkeys(_where_drafts_gain(cells, axes))
    costs = [cell.outcome.cost for cell in cells if cell.outcome and cell.outcome.cost]
    notes += [sources_text(costs)] * bool(costs)
    if without:
        notes.insert(0, f"no room for {listed(without, 'and')}: a pipe, --csv and --json have them")
    if width is not None:
        notes = [line for note in notes for line in wrapped(note, width)]
    return "".join(f"{line}\n" for line in [*lines, *notes])


def _fitting(lines: list[str], width: int | None, draw: Callable[[int], list[str]]) -> list[str]:
    """Return lines of a table, drawn with settings cut shorter where they are wider than that."""
    for cut in SHORT_SETTINGS:
        if width is None or max(map(cell_width, lines), default=0) <= width:
            break
        lines = draw(cut)
    return lines


def _rows(
    cells: Sequence[GridCell],
    axes: Sequence[Axis],
    columns: Sequence[Column],
    cut: int | None = None,
) -> list[str]:
    """Return the lines of a table: two of its head, and one for each cell.

    cut: see _settings.
    """
    before = [None, *(column.group for column in columns)]
    groups = [
        "" if column.group == last else column.group
        for column, last in zip(columns, before, strict=False)
    ]
    rows = [
        [*("" for _ in axes), *groups, "", ""],
        [*(axis.title for axis in axes), *(column.title for column in columns), "time", ""],
    ]
    for cell in cells:
        numbers = [column.text_of(cell) for column in columns]
        rows.append(
            [*_settings(cell, axes, cut), *numbers, _binding(cell), "knee" if cell.is_knee else ""]
        )
    return aligned(rows, range(len(axes) + len(columns)))


def _group_rows(
    cells: Sequence[GridCell], axes: Sequence[Axis], cut: int | None = None
) -> list[str]:
    """Return the lines of a second table: what each group of a fleet did; none without groups."""
    uses = [(cell, use) for cell in cells for use in (cell.outcome and cell.outcome.groups) or ()]
    has_gone = any(use.replicas != use.most_replicas for _, use in uses)
    counted_as = ["at once", "started"] if has_gone else ["replicas"]
    head = [*(axis.title for axis in axes), "group", *counted_as]
    head += ["outputs", "busy", "slots", "KV"]
    rows = []
    for cell, use in uses:
        kv_used = "-" if use.kv_used is None else whole_percent(use.kv_used)
        shares = [whole_percent(use.busy), whole_percent(use.slots_used), kv_used]
        counts = [f"{use.most_replicas:,}", f"{use.replicas:,}"][: len(counted_as)]
        group = [printable(use.name), *counts, f"{use.served:,}"]
        rows.append([*_settings(cell, axes, cut), *group, *shares])
    return ["", *aligned([head, *rows], range(len(head)))] if rows else []


def _settings(cell: GridCell, axes: Sequence[Axis], cut: int | None) -> list[str]:
    """Return the values of `axes` as people give them, in at most `cut` cells."""
    values = [printable(show_value(axis, axis.value_of(cell.deployment))) for axis in axes]
    if cut is None:
        return values
    return [
        cut_path(value, cut, "~") if axis is AXES["fleet"] else cut_middle(value, cut, "~")
        for axis, value in zip(axes, values, strict=True)
    ]


def csv_of(cells: Sequence[GridCell]) -> str:
    """Return a row for each cell, with all settings and numbers, exactly as JSON has them."""
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    columns = [*COLUMNS.values(), *class_columns(cells)]
    names = [column.name.replace("-", "_") for column in columns]
    writer.writerow([*AXES, *names, "binding", "binding_share", "is_knee", "problem"])
    for cell in cells:
        settings = [show_value(axis, axis.value_of(cell.deployment)) for axis in AXES.values()]
        numbers = [column.value_of(cell) for column in columns]
        binding = None if cell.outcome is None else cell.outcome.binding
        found = ("", "") if binding is None else (binding.constraint, binding.share)
        writer.writerow([*settings, *numbers, *found, str(cell.is_knee).lower(), cell.problem])
    return file.getvalue()


def json_of(cells: Sequence[GridCell]) -> str:
    """Return a line of JSON for each cell: settings, problem, is_knee and outcome."""
    return "".join(
        msgspec.json.encode(
            {
                "settings": settings_of(cell.deployment),
                "problem": cell.problem,
                "is_knee": cell.is_knee,
                "speedup": cell.speedup,
                "outcome": cell.outcome,
            }
        ).decode()
        + "\n"
        for cell in cells
    )


def _has_news(column: Column, cells: Sequence[GridCell]) -> bool:
    """Return whether a column tells something of any of the cells."""
    values = [column.value_of(cell) for cell in cells]
    if column.name in ONLY_IF_NOT_0:
        return any(values)
    return any(value is not None for value in values)


def _notes(cell: GridCell) -> Iterator[str]:
    """Yield why a cell has no numbers, or not those of all requests."""
    if cell.problem is not None:
        yield f"impossible: {cell.problem}"
    outcome, scheduling = cell.outcome, cell.deployment.scheduling
    if outcome is not None and outcome.failed:
        total = outcome.served + outcome.failed
        failed = f"failed: {outcome.failed:,} of {counted(total, 'output')} can never run, they "
        if cell.deployment.fleet is not None:
            yield f"{failed}do not fit into the blocks where they were sent"
            return
        blocks = counted(scheduling.kv_blocks or 0, "block")
        yield f"{failed}do not fit into {blocks} of {counted(scheduling.block_size, 'token')}"


def cost_text(cost: Cost) -> list[str]:
    """Return what the GPUs of all replicas cost and draw."""
    parts = [f"{counted(cost.gpus, 'GPU')} for ${number(cost.dollars_per_hour)} an hour"]
    if cost.dollars_per_million_tokens is not None:
        parts.append(f"${number(cost.dollars_per_million_tokens)} a million output tokens")
    if cost.kwh_per_million_tokens is not None:
        parts.append(f"{number(cost.kwh_per_million_tokens)} kWh a million")
    return [*parts, sources_text([cost])]


def sources_text(costs: Sequence[Cost]) -> str:
    """Return where the prices are from."""
    sources = dict.fromkeys(source for cost in costs for source in cost.price_sources)
    return f"source of the prices: {', '.join(map(printable, sources))}"


def _where_drafts_gain(cells: Sequence[GridCell], axes: Sequence[Axis]) -> Iterator[str]:
    """Yield for each row of batches with drafts from which on they are to be left out."""
    batch = AXES["batch"]
    families: dict[Deployment, list[tuple[int, float]]] = {}
    for cell in cells:
        if cell.speedup is not None:
            family = families.setdefault(batch.set(cell.deployment, 1), [])
            family.append((cell.deployment.batch, cell.speedup))
    for deployment, gains in families.items():
        settings = (
            f"{axis.title} {show_value(axis, axis.value_of(deployment))}"
            for axis in axes
            if axis is not batch
        )
        least, smallest = off_from(gains), min(gains)[0]
        if least is None:
            told = "worth it at the largest batch, too"
        else:
            told = "never worth it" if least == smallest else f"off from batch {least:,} on"
        yield f"{printable(', '.join(settings))}: {told}"


def _binding(cell: GridCell) -> str:
    if cell.outcome is None:
        return "-"
    binding = cell.outcome.binding
    return f"{BINDS[binding.constraint]} {whole_percent(binding.share)}"
