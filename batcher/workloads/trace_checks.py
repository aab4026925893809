"""What all recorded traces have in common: times that do not go back, and lengths."""

from collections.abc import Iterable, Iterator

from msgspec.structs import replace

from batcher.request import MAX_TIME
from batcher.workloads.rows import MAX_LENGTH, WorkloadError, WorkloadRow

NumberedLine = tuple[int, bytes]
"""A line of a file and its number, from 1 on, as errors tell it."""

_DIGITS = 9  # of times, after the point: traces are recorded in nanoseconds at best


class TraceChecks:
    """Checks the rows of one trace, in their order.

    source: how errors call the file.  num_raised: how many lengths were 0, and became 1.
    """

    def __init__(self, source: str) -> None:
        self.source = source
        self.num_raised = 0
        self._first: float | None = None
        self._last = 0.0

    def arrival_time(self, value: float, unit: float, number: int, field: str) -> float:
        """Return the seconds from the first row to this one.

        value: when it came, counted in `unit`s a second from anywhere.

        Raises:
            WorkloadError: that is before the row before it, or too far from the first.
        """
        if self._first is None:
            self._first = value
        elif value < self._last:
            back = (self._last - value) / unit
            raise self.error(
                number, f"{field} goes back by {back:.9g} s: sort the trace by {field}"
            )
        self._last = value
        time = (value - self._first) / unit
        if not time <= MAX_TIME:
            raise self.error(number, f"{field} is {time:g} s after the first; at most {MAX_TIME:g}")
        return round(time, _DIGITS)

    def length(self, value: int, number: int, field: str) -> int:
        """Return a length in tokens; 0 becomes 1, since a model is given one and gives one.

        Raises:
            WorkloadError: it is negative, or too large.
        """
        if not 0 <= value <= MAX_LENGTH:
            raise self.error(number, f"{field} {value}: expected 0 to {MAX_LENGTH:,} tokens")
        self.num_raised += value == 0
        return max(value, 1)

    def error(self, number: int, message: str) -> WorkloadError:
        """Return the error that says what is wrong with a line."""
        return WorkloadError(f"{self.source}:{number}: {message}")


def scale_times(rows: Iterable[WorkloadRow], factor: float) -> Iterator[WorkloadRow]:
    """Yield `rows` with their arrival times multiplied by `factor`."""
    for row in rows:
        yield replace(row, arrival_time=round(row.arrival_time * factor, _DIGITS))


def factor_for_rate(rows: Iterable[WorkloadRow], rate: float, source: str) -> float:
    """Return the factor for times by which `rows` come at `rate`, their mean in requests a second.

    Raises:
        WorkloadError: they have no mean rate.
    """
    num_rows, last = 0, 0.0
    for row in rows:
        num_rows, last = num_rows + 1, row.arrival_time
    if not last:
        raise WorkloadError(
            f"{source}: no rate to scale: all of its {num_rows:,} requests come at once"
        )
    return (num_rows - 1) / rate / last
