"""What is said where more arrives than is served: what is seen then depends on how long it runs."""

from collections.abc import Iterator, Sequence

from batcher.planning.backlog import Backlog
from batcher.planning.compare import GridCell
from batcher.planning.deployments import Axis, show_value

from ..screen.cells import counted, number, printable


def backlog_text(backlog: Backlog) -> list[str]:
    """Return how much was served of what was offered, and what that means."""
    served, offered = number(backlog.served_per_s), number(backlog.offered_per_s)
    if backlog.is_short:
        what = "in too short a run to tell whether the queue grows"
    else:
        what = "so the queue grows and a longer run is worse"
    return [f"served {served} requests/s of {offered} offered", what]


def named_by(cell: GridCell, axes: Sequence[Axis]) -> str:
    """Return the settings of a cell on `axes`, as a note of it begins; nothing without any."""
    settings = (f"{axis.title} {show_value(axis, axis.value_of(cell.deployment))}" for axis in axes)
    return f"{printable(', '.join(settings))}: " * bool(axes)


def backlogs_of(cells: Sequence[GridCell], axes: Sequence[Axis]) -> Iterator[str]:
    """Yield of the cells in which less is served than arrives the first, and how many there are.

    axes: on which the cells differ.
    """
    found: dict[bool, list[tuple[GridCell, Backlog]]] = {False: [], True: []}
    for cell in cells:
        backlog = None if cell.outcome is None else cell.outcome.backlog
        if backlog is not None:
            found[backlog.is_short].append((cell, backlog))
    for alike in filter(None, found.values()):
        cell, backlog = alike[0]
        told = named_by(cell, axes) + ", ".join(backlog_text(backlog))
        if len(alike) > 1:
            told += f"; the same in {counted(len(alike) - 1, 'other')}: see backlog of --json"
        yield told
