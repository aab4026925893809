"""Prometheus metrics, the time series and the report of a run.

Metrics are served and written by their own threads, which the run waits for only at its end.
"""

import csv
import io
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, suppress
from threading import Event as Flag
from threading import Thread
from typing import TYPE_CHECKING

from msgspec.structs import astuple

from batcher.errors import BatchdecodeError
from batcher.events import RunEvent
from batcher.metrics.summary import Summary, unit_of
from batcher.metrics.times import SeriesRow, TimeSeries, with_one_interval

from ..errors import WriteError, reason_of
from ..screen.summary import BLOCKED_CAUSES, idle_causes, key_numbers
from .files import OutFile, OutputError, Sink, write_lines

if TYPE_CHECKING:
    from batcher.metrics.prometheus import RunCollector, WorkersCollector
    from batcher.page.page import PageTimeline

WRITE_SECONDS = 5.0  # between two versions of the metrics file


class Exposition(AbstractContextManager["Exposition"]):
    """Serves the metrics of a collector to Prometheus and writes them to a file.

    It has none until `tell` is called, while a model loads.  where: (address, port); port 0
    picks a free one.  url: of the metrics, or None.

    Raises:
        BatchdecodeError: prometheus_client is missing, or the address cannot be used.
        OutputError, WriteError: the file cannot be written.
    """

    def __init__(self, where: tuple[str, int] | None, file: OutFile | None) -> None:
        try:
            from prometheus_client import (  # noqa: PLC0415 - an extra
                CollectorRegistry,
                make_wsgi_app,
                start_http_server,
            )
        except ImportError as error:
            raise BatchdecodeError(
                "--metrics-port and --metrics-file need prometheus-client: "
                "install it with `pip install 'batchdecode[metrics]'`"
            ) from error
        self._registry, self._file = CollectorRegistry(), file
        self._is_over = Flag()
        self._writer = Thread(target=self._keep_writing, name="metrics-file", daemon=True)
        self._server, self.url = None, None
        if file is not None and not file.is_plain:
            raise OutputError(f"cannot write {file.name}: it is not a regular file")
        if where is not None:
            address, port = where
            try:
                self._server, _ = start_http_server(port, address, self._registry)
            except OSError as error:
                raise BatchdecodeError(
                    f"--metrics-port: cannot listen on {address}, port {port}: {reason_of(error)}"
                ) from error
            answer = make_wsgi_app(self._registry)
            # In OpenMetrics, which Prometheus asks for, the library writes vllm_x for vllm:x.
            self._server.set_app(lambda asked, begin: answer(asked | {"HTTP_ACCEPT": ""}, begin))
            host = f"[{address}]" if ":" in address else address
            self.url = f"http://{host}:{self._server.server_port}/metrics"

    def tell(self, collector: "RunCollector | WorkersCollector") -> None:
        """Report the metrics of `collector` from now on, and write the file at once."""
        self._registry.register(collector)
        if self._file is not None and not self._writer.is_alive():
            self._write(self._file)
            self._writer.start()

    def __exit__(self, *_: object) -> None:
        """Close the server, and write the file a last time."""
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
        if self._file is not None:
            self._is_over.set()
            if self._writer.is_alive():
                self._writer.join()
            self._write(self._file)

    def _keep_writing(self) -> None:
        while self._file is not None and not self._is_over.wait(WRITE_SECONDS):
            with suppress(OutputError, WriteError):  # the last write reports it
                self._write(self._file)

    def _write(self, file: OutFile) -> None:
        from prometheus_client import generate_latest  # noqa: PLC0415 - an extra

        with file.replace() as sink:
            sink.write(generate_latest(self._registry))


class SeriesWriter:
    """Writes time series as CSV, one per worker, each row as soon as it is done.

    interval: seconds, or None for that of TimeSeries.
    """

    def __init__(self, sink: Sink, interval: float | None, num_workers: int = 1) -> None:
        self._sink = sink
        self.all_series = [TimeSeries(interval) for _ in range(num_workers)]
        self._has_header = False

    def write_known(self) -> None:
        if rows := [(n, row) for n, series in enumerate(self.all_series) for row in series.rows()]:
            self._write(rows)

    def close(self) -> None:
        """Write the remaining rows by time, and close the file."""
        try:
            with_one_interval(self.all_series)
            rest = [(n, row) for n, series in enumerate(self.all_series) for row in series.finish()]
            self._write(sorted(rest, key=lambda numbered: numbered[1].time))
        finally:
            self._sink.close()

    def _write(self, rows: Iterable[tuple[int, SeriesRow]]) -> None:
        columns = ("worker", *self.all_series[0].columns)
        first, end = 0 if len(self.all_series) > 1 else 1, len(columns)
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        if not self._has_header:
            writer.writerow(columns[first:])
            self._has_header = True
        writer.writerows((number, *astuple(row))[first:end] for number, row in rows)
        self._sink.write(text.getvalue().encode())


def write_report(
    file: OutFile,
    timelines: "Sequence[PageTimeline]",
    summary: Summary,
    run: RunEvent,
    source_name: str,
) -> None:
    """Write the HTML report of a finished or interrupted run; timelines: of its workers."""
    from batcher.page.page import PageFacts, encode_run  # noqa: PLC0415 - plain runs do without
    from batcher.page.report import render_report  # noqa: PLC0415 - as above

    from ..views.story_text import PAGE_WORDS  # noqa: PLC0415 - as above

    for timeline in timelines:
        timeline.close()
    name = source_name.rpartition("/")[2]
    numbers = key_numbers(summary, unit_of(summary, is_timed=bool(run.step_time)))
    blocked = {reason: f"blocked: {cause}" for reason, cause in BLOCKED_CAUSES.items()}
    report = render_report(summary, run, name, numbers, idle_causes(summary) | blocked)
    facts = PageFacts(is_part=True)
    with file.replace() as sink:
        write_lines(encode_run(source_name, timelines, facts, PAGE_WORDS, *report), sink)
