"""A comparison as text: a table for people, CSV, or a line of JSON for each cell."""

import csv
import io
from collections.abc import Iterator, Sequence

import msgspec

from batcher.whatif.comparing import Cell, settings_of, varied
from batcher.whatif.deployments import AXES, show_value

from ..screen.cells import cell_width, counted, printable, whole_percent
from .columns import COLUMNS, ONLY_IF_NOT_0, TABLE, Column

GAP = "  "
BINDS = {
    "slots": "slots",
    "kv": "KV",
    "tokens": "token budget",
    "static": "static batch",
    "compute": "compute",
    "arrivals": "arrivals",
}


def table_of(cells: Sequence[Cell]) -> str:
    """Return a table with a row for each cell, and below it what no combination can be, or run."""
    names = varied(cell.deployment for cell in cells) or ["batch"]
    axes = [AXES[name] for name in AXES if name in names]
    columns = [COLUMNS[name] for name in TABLE if _has_news(COLUMNS[name], cells)]
    rows = [
        [*("" for _ in axes), *(column.group for column in columns), "", ""],
        [*(axis.title for axis in axes), *(column.title for column in columns), "binds", ""],
    ]
    for cell in cells:
        settings = [printable(show_value(axis, axis.value_of(cell.deployment))) for axis in axes]
        numbers = [column.text_of(cell) for column in columns]
        rows.append([*settings, *numbers, _binding(cell), "knee" if cell.is_knee else ""])
    lines = _aligned(rows, num_right=len(axes) + len(columns))
    notes = dict.fromkeys(note for cell in cells for note in _notes(cell))
    return "".join(f"{line}\n" for line in [*lines, *notes])


def csv_of(cells: Sequence[Cell]) -> str:
    """Return a row for each cell, with all settings and numbers, exactly as JSON has them."""
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    names = [column.replace("-", "_") for column in COLUMNS]
    writer.writerow([*AXES, *names, "binding", "binding_share", "is_knee", "problem"])
    for cell in cells:
        settings = [show_value(axis, axis.value_of(cell.deployment)) for axis in AXES.values()]
        numbers = [column.value_of(cell) for column in COLUMNS.values()]
        binding = None if cell.outcome is None else cell.outcome.binding
        found = ("", "") if binding is None else (binding.constraint, binding.share)
        writer.writerow([*settings, *numbers, *found, str(cell.is_knee).lower(), cell.problem])
    return file.getvalue()


def json_of(cells: Sequence[Cell]) -> str:
    """Return a line of JSON for each cell: settings, problem, is_knee and outcome."""
    return "".join(
        msgspec.json.encode(
            {
                "settings": settings_of(cell.deployment),
                "problem": cell.problem,
                "is_knee": cell.is_knee,
                "outcome": cell.outcome,
            }
        ).decode()
        + "\n"
        for cell in cells
    )


def _has_news(column: Column, cells: Sequence[Cell]) -> bool:
    """Return whether a column tells something of any of the cells."""
    values = [column.value_of(cell) for cell in cells]
    if column.name in ONLY_IF_NOT_0:
        return any(values)
    return any(value is not None for value in values)


def _notes(cell: Cell) -> Iterator[str]:
    """Yield why a cell has no numbers, or not those of all requests."""
    if cell.problem is not None:
        yield f"impossible: {cell.problem}"
    outcome, scheduling = cell.outcome, cell.deployment.scheduling
    if outcome is not None and outcome.failed:
        total = outcome.served + outcome.failed
        blocks = counted(scheduling.kv_blocks or 0, "block")
        yield (
            f"failed: {outcome.failed:,} of {counted(total, 'request')} can never run, "
            f"they do not fit into {blocks} of {counted(scheduling.block_size, 'token')}"
        )


def _binding(cell: Cell) -> str:
    if cell.outcome is None:
        return "-"
    binding = cell.outcome.binding
    return f"{BINDS[binding.constraint]} {whole_percent(binding.share)}"


def _aligned(rows: Sequence[Sequence[str]], num_right: int) -> list[str]:
    """Return rows as lines; the first `num_right` columns are set to the right."""
    widths = [max(map(cell_width, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = []
        for place, (text, width) in enumerate(zip(row, widths, strict=True)):
            room = " " * (width - cell_width(text))
            cells.append(room + text if place < num_right else text + room)
        lines.append(GAP.join(cells).rstrip())
    return lines
