"""What a run writes beside its results: Prometheus metrics, CSV, JSON and an HTML report.

Rule of the metrics: threads of their own answer and write, and the run waits for them only at its
end.
"""

import csv
import io
from collections.abc import Iterable, Sequence
from contextlib import suppress
from importlib.util import find_spec
from threading import Event as Flag
from threading import Thread
from typing import TYPE_CHECKING, Any, Self

from msgspec.structs import astuple

from batcher.errors import BatchdecodeError
from batcher.events import RunEvent
from batcher.metrics.summary import Summary, unit_of
from batcher.metrics.times import (
    COLUMNS,
    NUM_DRAFT_COLUMNS,
    SeriesRow,
    TimeSeries,
    with_one_interval,
)

from ..errors import WriteError, reason_of
from ..screen.summary import BLOCKED_CAUSES, PER, UNICODE, headline, idle_causes
from ..screen.terminal import counted, duration
from ..screen.terminal import number as short
from .files import OutFile, OutputError, Sink, write_lines

if TYPE_CHECKING:
    from batcher.metrics.prometheus import RunCollector, WorkersCollector
    from batcher.page.page import PageTimeline

METRICS_PATH = "/metrics"
WRITE_SECONDS = 5.0  # between two versions of the file


def _answer(answer: Any, asked: dict[str, Any], begin: Any) -> Any:
    if asked["PATH_INFO"] != METRICS_PATH:
        begin("404 Not Found", [("Content-Type", "text/plain; charset=utf-8")])
        return [f"nothing here; the metrics are at {METRICS_PATH}\n".encode()]
    # As OpenMetrics, which Prometheus likes best, the library tells vllm_x for vllm:x.
    return answer(asked | {"HTTP_ACCEPT": ""}, begin)


class Exposition:
    """Tells Prometheus what the collector has that it is given: nothing yet, while a model loads.

    where: (address, port); port 0 is one that is free.  file: replaced as a whole.
    url: where Prometheus is answered; None if it is not.

    Raises:
        BatchdecodeError: prometheus_client is missing, or the address cannot be had.
        OutputError, WriteError: the file cannot be written.
    """

    def __init__(self, where: tuple[str, int] | None, file: OutFile | None) -> None:
        if find_spec("prometheus_client") is None:
            raise BatchdecodeError(
                "--metrics-port and --metrics-file need prometheus-client: "
                "install it with `pip install 'batchdecode[metrics]'`"
            )
        from prometheus_client import (  # noqa: PLC0415 - an extra
            CollectorRegistry,
            make_wsgi_app,
            start_http_server,
        )

        self._registry = CollectorRegistry()
        self._file = file
        self._is_over = Flag()
        self._writer = Thread(target=self._keep_writing, name="metrics-file", daemon=True)
        self._server, self.url = None, None
        if file is not None and not file.is_plain:
            raise OutputError(f"cannot write {file.name}: it is no file that could be replaced")
        if where is not None:
            address, port = where
            try:
                self._server, _ = start_http_server(port, address, self._registry)
            except OSError as error:
                raise BatchdecodeError(
                    f"--metrics-port: cannot listen at {address}, port {port}: {reason_of(error)}"
                ) from error
            answer = make_wsgi_app(self._registry)
            self._server.set_app(lambda asked, begin: _answer(answer, asked, begin))
            host = f"[{address}]" if ":" in address else address
            self.url = f"http://{host}:{self._server.server_port}{METRICS_PATH}"

    def tell(self, collector: "RunCollector | WorkersCollector") -> None:
        """Report what `collector` counts; a file that cannot hold it is an error at once."""
        self._registry.register(collector)
        if self._file is not None and not self._writer.is_alive():
            self._write()
            self._writer.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Write the file a last time, and answer no more."""
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
        if self._file is not None:
            self._is_over.set()
            if self._writer.is_alive():
                self._writer.join()
            self._write()

    def _keep_writing(self) -> None:
        while not self._is_over.wait(WRITE_SECONDS):
            with suppress(OutputError, WriteError):  # the last time it would be told
                self._write()

    def _write(self) -> None:
        from prometheus_client import generate_latest  # noqa: PLC0415 - as above

        if self._file is not None:
            with self._file.replace() as sink:
                sink.write(generate_latest(self._registry))


# The run over time as a file: a row for each interval, and of several workers for each of them.


class SeriesWriter:
    """Writes the rows of `all_series`, the run over time, as CSV, as they become known.

    interval: in seconds, None for what TimeSeries takes.  all_series: one for each worker, of which
    the rows tell if there are several.
    """

    def __init__(self, sink: Sink, interval: float | None, num_workers: int = 1) -> None:
        self._sink = sink
        self.all_series = [TimeSeries(interval) for _ in range(num_workers)]
        self._has_header = False

    def write_known(self) -> None:
        if rows := [(n, row) for n, series in enumerate(self.all_series) for row in series.rows()]:
            self._write(rows)

    def close(self) -> None:
        """Write the rest of a run that is over, by time, and end the file."""
        try:
            with_one_interval(self.all_series)
            rest = [(n, row) for n, series in enumerate(self.all_series) for row in series.finish()]
            self._write(sorted(rest, key=lambda of_worker: of_worker[1].time))
        finally:
            self._sink.close()

    def _write(self, rows: Iterable[tuple[int, SeriesRow]]) -> None:
        has_drafts, has_workers = self.all_series[0].has_drafts, len(self.all_series) > 1
        num_columns = len(COLUMNS) - NUM_DRAFT_COLUMNS * (not has_drafts)
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        if not self._has_header:
            names = COLUMNS[:num_columns]
            writer.writerow(["worker", *names] if has_workers else names)
            self._has_header = True
        for number, row in rows:
            cells: tuple[Any, ...] = astuple(row)[:num_columns]
            writer.writerow((number, *cells) if has_workers else cells)
        self._sink.write(text.getvalue().encode())


# `run --report`: what a run came to as a page for a colleague, its timeline included.


def write_report(
    file: OutFile,
    timelines: "Sequence[PageTimeline]",
    summary: Summary,
    run: RunEvent,
    source_name: str,
) -> None:
    """Write the report of a run that is over, or was broken off, from its workers' timelines."""
    from batcher.page.page import PageFacts, encode_run  # noqa: PLC0415 - plain runs start faster
    from batcher.page.report import render_report  # noqa: PLC0415 - as above

    from ..views.story_text import PAGE_WORDS  # noqa: PLC0415 - as above

    for timeline in timelines:
        timeline.close()
    name = source_name.rpartition("/")[2]
    more = [counted(summary.generated_tokens, "generated token")]
    if summary.wall is not None:
        speed = f"{short(summary.wall.tokens_per_second)} tokens/s"
        more += [duration(summary.wall.seconds), speed]
    elif summary.throughput is not None:
        unit = PER[unit_of(summary, is_timed=bool(run.step_time))]
        more.append(f"{short(summary.throughput.output_tokens)} tokens/{unit}")
    blocked = {reason: f"blocked: {cause}" for reason, cause in BLOCKED_CAUSES.items()}
    first = headline(summary, UNICODE.separator, more)
    report = render_report(summary, run, name, first, idle_causes(summary) | blocked)
    facts = PageFacts(is_part=True)
    with file.replace() as sink:
        write_lines(encode_run(source_name, timelines, facts, PAGE_WORDS, *report), sink)
