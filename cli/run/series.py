"""The run over time as a file: a row for each interval, and of several workers for each of them."""

import csv
import io
from collections.abc import Iterable
from typing import Any

from msgspec.structs import astuple

from batcher.metrics.times import DRAFT_COLUMNS, SeriesRow, TimeSeries, with_one_interval

from .output import Sink


class SeriesWriter:
    """Writes the rows of `all_series`, the run over time, as CSV, as they become known.

    interval: in seconds, None for what TimeSeries takes.  all_series: one for each worker, of which
    the rows tell if there are several.

    Raises, in all but its constructor:
        WriteError, BrokenPipeError: see Sink.
    """

    def __init__(self, sink: Sink, interval: float | None, num_workers: int = 1) -> None:
        self._sink = sink
        self.all_series = [TimeSeries(interval) for _ in range(num_workers)]
        self._has_header = False

    @property
    def only(self) -> TimeSeries:
        """That of a run of one engine."""
        (series,) = self.all_series
        return series

    def write_known(self) -> None:
        """Write the rows that are known by now."""
        rows = [
            (number, row) for number, series in enumerate(self.all_series) for row in series.rows()
        ]
        if rows:
            self._write(rows)

    def close(self) -> None:
        """Write the rest of a run that is over, by time, and end the file."""
        try:
            with_one_interval(self.all_series)
            rows = [
                (number, row)
                for number, series in enumerate(self.all_series)
                for row in series.finish()
            ]
            rows.sort(key=lambda of_worker: of_worker[1].time)
            self._write(rows)
        finally:
            self._sink.close()

    def _write(self, rows: Iterable[tuple[int, SeriesRow]]) -> None:
        has_drafts, has_workers = self.all_series[0].has_drafts, len(self.all_series) > 1
        num_columns = len(SeriesRow.__struct_fields__) - len(DRAFT_COLUMNS) * (not has_drafts)
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        if not self._has_header:
            names = SeriesRow.__struct_fields__[:num_columns]
            writer.writerow(["worker", *names] if has_workers else names)
            self._has_header = True
        for number, row in rows:
            cells: tuple[Any, ...] = astuple(row)[:num_columns]
            writer.writerow((number, *cells) if has_workers else cells)
        self._sink.write(text.getvalue().encode())
