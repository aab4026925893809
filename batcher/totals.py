"""Numbers that add up: those of the parts of a run, put together, are those of the whole.

Rule: what cannot be put together, such as a mean or a percentile, is no field of them.
"""

from copy import deepcopy
from typing import Any, ClassVar, Self

from msgspec import Struct


class Totals(Struct):
    """Numbers of a part of a run; in those of several parts each field is the sum, but for some.

    LARGEST, LEAST: fields of which the largest, or the least one that there is, counts.
    """

    LARGEST: ClassVar[frozenset[str]] = frozenset()
    LEAST: ClassVar[frozenset[str]] = frozenset()

    def merge(self, other: Self) -> None:
        """Take in the numbers of another part, which stays as it is."""
        for name in self.__struct_fields__:
            own, others = getattr(self, name), getattr(other, name)
            if name in self.LARGEST:
                merged = _chosen(max, own, others)
            elif name in self.LEAST:
                merged = _chosen(min, own, others)
            else:
                merged = _added(own, others)
            setattr(self, name, merged)

    def copy(self) -> Self:
        """Return the same numbers, to merge others into."""
        return deepcopy(self)


def _chosen(choose: Any, own: Any, others: Any) -> Any:
    """Return one of two numbers, or of the numbers under each key of two mappings."""
    if own is None or others is None:
        return others if own is None else own
    if not isinstance(own, dict):
        return choose(own, others)
    for key, value in others.items():
        own[key] = choose(own.get(key, value), value)
    return own


def _added(own: Any, others: Any) -> Any:
    """Return the sum of two numbers, or of what is under each key of two mappings."""
    if own is None or others is None:
        return deepcopy(others) if own is None else own
    if isinstance(own, Totals):
        own.merge(others)
        return own
    if not isinstance(own, dict):
        return own + others
    for key, value in others.items():
        own[key] = _added(own.get(key), value)
    return own
