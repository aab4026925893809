"""The file of `--timeseries`: the run over time, as CSV."""

import csv
import io
from collections.abc import Iterable
from typing import Any

from msgspec.structs import astuple

from batcher.metrics.timeseries import SeriesRow, TimeSeries

from .output import Sink


class SeriesWriter:
    """Writes the rows of `series` as they become known.

    interval: in seconds, None for what TimeSeries takes.

    Raises, in all but its constructor:
        WriteError, BrokenPipeError: see Sink.
    """

    def __init__(self, sink: Sink, interval: float | None) -> None:
        self._sink, self.series = sink, TimeSeries(interval)
        self._has_header = False

    def write_known(self) -> None:
        """Write the rows that are known by now."""
        rows = self.series.rows()
        if rows:
            self._write(map(astuple, rows))

    def close(self) -> None:
        """Write the rest of a run that is over, and end the file."""
        try:
            self._write(map(astuple, self.series.finish()))
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
