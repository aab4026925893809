"""The knee: from which batch size on more slots hardly serve more, or sooner.

Rule: nothing is fitted.  A size is the knee if it is the smallest of its row of sizes that no
larger one beats: by the asked share of what it serves for each doubling; or, where arrivals bind,
by a shorter tail of TTFT.  For where arrivals bind, what is served is what arrives, whatever the
size (job flow balance: Denning and Buzen, The Operational Analysis of Queueing Network Models, ACM
Computing Surveys 10(3), 1978), so only times tell sizes apart; the knee is where more gains little
throughput and response times are still short (Jain, The Art of Computer Systems Performance
Analysis, 1991, section 3.3).
"""

from collections.abc import Sequence
from math import log2

from msgspec import Struct

from batcher.whatif.deployments import AXES, Deployment

DEFAULT_GROWTH = 0.1  # for each doubling of the batch


class Size(Struct, frozen=True, kw_only=True):
    """A batch size, and what it comes to.

    served: in a second.  ttft: its p99, None if nothing was given a token.
    is_fed: whether it serves all that arrives, so that more slots could hardly serve more.
    """

    batch: int
    served: float
    ttft: float | None = None
    is_fed: bool = False


def knee_of(sizes: Sequence[Size], growth: float) -> int | None:
    """Return the place of the knee among `sizes`, which ascend; None if there is none.

    There is none if all they serve is nothing, or if only the last one would be it: then nobody
    knows what comes after it.
    """
    if not any(size.served for size in sizes):
        return None
    for place, size in enumerate(sizes[:-1]):
        if not any(_beats(larger, size, growth) for larger in sizes[place + 1 :]):
            return place
    return None


def _beats(larger: Size, size: Size, growth: float) -> bool:
    """Return whether a `larger` size is worth its slots."""
    if larger.served >= size.served * (1 + growth) ** log2(larger.batch / size.batch):
        return True
    if not (larger.is_fed or size.is_fed) or larger.ttft is None or size.ttft is None:
        return False
    return larger.ttft < size.ttft


def knees_of(cells: Sequence[tuple[Deployment, Size | None]], growth: float) -> set[int]:
    """Return the places of the cells that are knees, each among those that differ in batch only.

    cells: in any order, with what each comes to, None if that is not known.
    """
    batch = AXES["batch"]
    families: dict[Deployment, list[tuple[Size, int]]] = {}
    for place, (deployment, size) in enumerate(cells):
        if size is not None:
            families.setdefault(batch.set(deployment, 1), []).append((size, place))
    knees = set()
    for family in families.values():
        family.sort(key=lambda found: found[0].batch)
        found = knee_of([size for size, _ in family], growth)
        if found is not None:
            knees.add(family[found][1])
    return knees
