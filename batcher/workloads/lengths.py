"""Lengths by what an option says of them: a distribution, or the lengths of a file."""

from collections.abc import Callable, Iterable

import numpy as np

from batcher.workloads.distributions import (
    LENGTHS,
    Distribution,
    Empirical,
    parse_distribution,
)
from batcher.workloads.rows import WorkloadError
from batcher.workloads.trace_checks import NumberedLine
from batcher.workloads.traces import Side, read_lengths

ReadLines = Callable[[str], Iterable[NumberedLine]]
_FROM_FILE = "empirical"


def parse_lengths(text: str, option: str, side: Side, read_lines: ReadLines) -> Distribution:
    """Return the distribution that `text`, the value of `option`, names.

    side: which lengths of a trace count.  read_lines: gives the lines of a file.

    Raises:
        WorkloadError: it names none, or the file is not right.
    """
    name, _, path = text.partition(":")
    if name != _FROM_FILE:
        return parse_distribution(text, option, LENGTHS, f"{_FROM_FILE}:FILE")
    if not path:
        raise WorkloadError(f"{option} {text}: expected {_FROM_FILE}:FILE")
    return Empirical(np.array(read_lengths(read_lines(path), path, side), dtype=np.float64))
