"""The knee: from which batch size on more slots hardly serve more.

Rule: nothing is fitted.  A size is the knee if it is the smallest of its row of sizes that no
larger one beats by the asked share for each doubling.
"""

from collections.abc import Sequence
from math import log2

from batcher.whatif.deployments import AXES, Deployment

DEFAULT_GROWTH = 0.1  # for each doubling of the batch


def knee_of(curve: Sequence[tuple[int, float]], growth: float) -> int | None:
    """Return the place of the knee in a curve of (batch, what it serves), None if there is none.

    There is none if all it serves is nothing, or if only the last one would be it: then nobody
    knows what comes after it.
    """
    if not any(served for _, served in curve):
        return None
    for place, (batch, served) in enumerate(curve[:-1]):
        if all(
            later < served * (1 + growth) ** log2(larger / batch)
            for larger, later in curve[place + 1 :]
        ):
            return place
    return None


def knees_of(cells: Sequence[tuple[Deployment, float | None]], growth: float) -> set[int]:
    """Return the places of the cells that are knees, each among those that differ in batch only.

    cells: in any order, with what each serves, None if that is not known.
    """
    batch = AXES["batch"]
    families: dict[Deployment, list[tuple[int, float, int]]] = {}
    for place, (deployment, served) in enumerate(cells):
        if served is not None:
            family = families.setdefault(batch.set(deployment, 1), [])
            family.append((deployment.batch, served, place))
    knees = set()
    for family in families.values():
        family.sort()
        found = knee_of([(size, served) for size, served, _ in family], growth)
        if found is not None:
            knees.add(family[found][2])
    return knees
