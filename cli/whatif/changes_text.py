"""What is told of a fleet that is managed: its failures, and why requests were refused."""

from collections.abc import Iterator, Sequence

from batcher.planning.compare import GridCell
from batcher.planning.deployments import Axis, show_value
from batcher.planning.fleet_file import FleetFile
from batcher.planning.spread import FleetUse

from ..screen.terminal import counted, printable

_REASONS = {
    "queue_full": "found no room in the queue",
    "max_wait": "waited longer than max_wait",
    "deadline": "waited until their deadline",
    "retries": "were lost too often",
    "router": "were sent nowhere by the router",
    "no_replica": "came while no replica served",
}


def failures_text(use: FleetUse, fleet: FleetFile | None) -> list[str]:
    """Return what failed, nothing of a fleet that has no failures."""
    management = None if fleet is None else fleet.management
    if management is None or management.failures is None:
        return []
    if not use.failures:
        return ["none fell into the run"]
    return [f"{counted(use.failures, 'replica')} failed", f"{counted(use.lost, 'request')} lost"]


def refusals_text(use: FleetUse) -> list[str]:
    """Return how many requests were refused for each reason; nothing if none were."""
    refusals = use.refusals
    return [f"{refusals[name]:,} {words}" for name, words in _REASONS.items() if name in refusals]


def refusals_of(cells: Sequence[GridCell], axes: Sequence[Axis]) -> Iterator[str]:
    """Yield why requests were refused in each cell in which some were.

    axes: on which the cells differ.
    """
    for cell in cells:
        use = None if cell.outcome is None else cell.outcome.fleet
        if use is not None and use.refusals:
            settings = (
                f"{each.title} {show_value(each, each.value_of(cell.deployment))}" for each in axes
            )
            name = f"{printable(', '.join(settings))}: " * bool(axes)
            yield f"{name}refused: {', '.join(refusals_text(use))}"
