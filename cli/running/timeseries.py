"""The file of `--timeseries`: the run over time, as CSV."""

import csv
import io
from collections.abc import Iterable, Sequence
from typing import Any

from msgspec.structs import astuple

from batcher.events import Event
from batcher.metrics.timeseries import SeriesRow, TimeSeries

from .output import Sink


class SeriesWriter:
    """Takes events, and writes the rows of a time series as they become known.

    interval: in seconds, None for what TimeSeries takes.

    Raises, in all but its constructor:
        WriteError, BrokenPipeError: see Sink.
    """

    def __init__(self, sink: Sink, interval: float | None) -> None:
        self._sink, self._series = sink, TimeSeries(interval)
        self._has_header = False

    def write(self, events: Sequence[Event]) -> None:
        """Take in the next events, and write the rows that are known by them."""
        for event in events:
            self._series.observe(event)
        rows = self._series.take()
        if rows:
            self._write(map(astuple, rows))

    def close(self, num_steps: int) -> None:
        """Write the rest of a run that took so many steps, and end the file."""
        try:
            self._write(map(astuple, self._series.finish(num_steps)))
        finally:
            self._sink.close()

    def _write(self, rows: Iterable[tuple[Any, ...]]) -> None:
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        if not self._has_header:
            writer.writerow(SeriesRow.__struct_fields__)
            self._has_header = True
        writer.writerows(rows)
        self._sink.write(text.getvalue().encode())
