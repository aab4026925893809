"""What a benchmark tells: a line of the table in docs/benchmarks.md."""

from typing import NamedTuple


class Row(NamedTuple):
    """What was measured, the figure, and what it should be."""

    name: str
    figure: str
    target: str
