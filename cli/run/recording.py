"""The files of a run, held open from its start to its end, and the writers of its results.

A run in one process and a run by workers use the same files, in the same order.
"""

import os
import re
import stat
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from io import BytesIO
from typing import TYPE_CHECKING, Generic, NamedTuple, TypeVar

from batcher.errors import BatchdecodeError
from batcher.events import Event, TokenEvent
from batcher.page import is_page_start
from batcher.requests.results import encode_tokens
from batcher.trace.files import encode_events, is_trace

from ..errors import WriteError
from ..options import STDOUT
from ..screen.terminal import is_same_terminal
from ..screen.view import View
from ..signals import StopSignals, stdout_descriptor
from .files import (
    BESIDE_RESULTS,
    OutFile,
    OutputError,
    ResumeError,
    Sink,
    TerminalJson,
    UploadedResults,
    check_can_open,
    check_distinct,
    check_replaceable,
    check_writable,
    is_alone,
    may_be_file,
    stdout_sink,
)
from .input import OpenInput, open_requests
from .problems import say
from .results import ResultText
from .resume import Resumption
from .run_options import RunOptions
from .urls import is_url, shown

if TYPE_CHECKING:
    from .exporters import Exposition
    from .spans import SpanSender

RESULT_SECONDS, TRACE_SECONDS = 0.02, 0.2  # for which lines may be held back
MAX_EVENTS = 1000  # held back at most
_WRITTEN_ANEW: dict[str, Callable[[bytes], object]] = {  # recognizes files that a run has written
    "--trace": is_trace,
    "--summary-json": re.compile(rb'\{\s*"requests":').match,
    "--report": is_page_start,
    "--metrics-file": re.compile(b"# HELP (vllm:|batchdecode_)").match,
    "--timeseries": re.compile(b"(worker,)?time,steps,running,").match,
}

Item = TypeVar("Item")


class BufferedWriter(Generic[Item]):
    """Writes items soon, not at once, which would cost each step a system call or two."""

    def __init__(
        self,
        sink: Sink,
        encode: Callable[[list[Item]], bytes],
        max_seconds: float,
        max_items: float = float("inf"),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._sink, self._encode, self._clock = sink, encode, clock
        self._max_seconds, self._max_items = max_seconds, max_items
        self._held: list[Item] = []
        self._last_flush = clock()

    def write(self, items: Sequence[Item]) -> None:
        self._held += items
        waited = self._clock() - self._last_flush
        if waited > self._max_seconds or len(self._held) >= self._max_items:
            self.flush()

    def flush(self) -> None:
        if self._held:
            held, self._held = self._held, []
            self._write_out(held)
        self._last_flush = self._clock()

    def _write_out(self, items: list[Item]) -> None:
        self._sink.write(self._encode(items))

    def close(self) -> None:
        try:
            self.flush()
        finally:
            self._sink.close()


class TraceWriter(BufferedWriter[Event]):
    """Writes the events of a trace."""

    def __init__(self, sink: Sink, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(sink, encode_events, TRACE_SECONDS, MAX_EVENTS, clock)


class ResultWriter(BufferedWriter[bytes]):
    """Writes lines of results, at once unless they go to a file; an item may hold several lines.

    num_written: result lines in the output.  num_token_events: those of a stream.
    """

    def __init__(self, sink: Sink, clock: Callable[[], float] = time.monotonic) -> None:
        self.num_written = self.num_token_events = 0
        max_items = float("inf") if sink.is_file else 0
        super().__init__(sink, b"".join, RESULT_SECONDS, max_items, clock)

    def write_tokens(self, tokens: Sequence[TokenEvent]) -> None:
        """Write the token events of a step at once, before its results."""
        self.flush()
        self._sink.write(encode_tokens(tokens))
        self.num_token_events += len(tokens)

    def _write_out(self, items: list[bytes]) -> None:
        """Write the items, or on a full disk as many of them as fit."""
        try:
            super()._write_out(items)
        except WriteError:
            if not self._sink.is_file:
                raise
            for item in items:
                self._sink.write(item)
                self._count(item)
        else:
            self._count(b"".join(items))

    def _count(self, lines: bytes) -> None:
        self.num_written += len(BytesIO(lines).readlines())  # bytes.count() takes much longer


def stdout_beside(view: View, options: RunOptions) -> Sink:
    """Return the sink for results without a file: stdout, above a live view on that terminal."""
    sink, is_terminal = stdout_sink(), os.isatty(stdout_descriptor())
    write: Callable[[bytes], object] = sink.write
    if is_same_terminal(stdout_descriptor(), 2):
        from ..screen.live import LiveView  # noqa: PLC0415 - a run without a terminal starts faster

        if isinstance(view, LiveView):
            write = view.write_results
    if not options.stream and (options.format or ("text" if is_terminal else "")) == "text":
        return ResultText(write)
    return TerminalJson(write) if is_terminal else sink


class OpenRun(NamedTuple):
    """The files of a run, held until it has ended.

    options: `output` is a local file here.  files: all others, by option.
    """

    options: RunOptions
    requests: OpenInput
    files: Mapping[str, OutFile]
    results: OutFile
    resumption: Resumption
    exposition: "Exposition | None"
    spans: "SpanSender | None"


@contextmanager
def opened_run(options: RunOptions, stop: StopSignals) -> Iterator[OpenRun]:
    """Open and lock every file of a run, before a model loads, which may take minutes.

    Raises:
        BatchdecodeError: the input cannot be read, or a file cannot be written, is used twice, or
            would lose its content.
        ResumeError: the results cannot be resumed, or --resume is missing.
    """
    output = options.output
    named = {
        "--trace": options.trace,
        "--summary-json": None if options.summary_json == STDOUT else options.summary_json,
        "--report": options.report,
        "--metrics-file": options.metrics_file,
        "--timeseries": options.timeseries,
    }
    with ExitStack() as stack:
        requests = stack.enter_context(open_requests(options, stop.waiting))
        _check_files(options, requests.statuses, named)
        files = {
            name: stack.enter_context(OutFile(path))
            for name, path in named.items()
            if path is not None
        }
        spans = exposition = None
        if options.otel is not None:
            try:
                from .spans import SpanSender  # noqa: PLC0415 - an extra
            except ModuleNotFoundError as error:
                raise BatchdecodeError(
                    "--otel needs opentelemetry-sdk and opentelemetry-exporter-otlp-proto-http: "
                    "install them with `pip install 'batchdecode[otel]'`"
                ) from error
            endpoint = None if options.otel == "env" else options.otel
            spans = SpanSender(endpoint, options.model, options.workers or 1)
        results = OutFile(output)
        if output is not None and is_url(output):
            if options.resume:
                raise ResumeError(
                    f"--resume needs a local --output: download {shown(output)} with its "
                    ".run.json and .run.sums, resume there, and upload it when it is complete"
                )
            results = UploadedResults(output, stop.waiting)
        stack.enter_context(results)
        if options.is_exposed:
            from .exporters import Exposition  # noqa: PLC0415 - rare

            exposition = Exposition(options.metrics_address, files.get("--metrics-file"))
            if exposition.url is not None and not options.quiet:
                say(f"metrics at {exposition.url}\n")
            stack.enter_context(exposition)
        options = replace(options, output=results.path)
        resumption = Resumption(options, requests, results)
        yield OpenRun(options, requests, files, results, resumption, exposition, spans)


def _check_files(
    options: RunOptions, input_statuses: list[os.stat_result], named: Mapping[str, str | None]
) -> None:
    """Raise an OutputError if a run cannot write its files, or one of them would lose its content.

    The content of a local --output is checked by Resumption.
    """
    output, beside = options.output, list[str]()
    if output is not None and may_be_file(output):
        beside = [f"{shown(output)}{ending}" for ending in BESIDE_RESULTS]
    outputs = [("--output", output)]
    check_distinct(
        input_statuses,
        [*outputs, *(("the file next to --output,", path) for path in beside), *named.items()],
        [*(options.input or ()), *(options.prompts or ())],
    )
    if options.metrics_file is not None and is_url(options.metrics_file):
        raise OutputError(
            f"--metrics-file {shown(options.metrics_file)}: must be a local file, for the node "
            "exporter of this machine"
        )
    if options.open:
        check_can_open(options.report)
    for name, path in (*outputs, *named.items()):
        if path is not None:
            check_writable(path)
            if name in _WRITTEN_ANEW and not options.force:
                check_replaceable(name, path, _WRITTEN_ANEW[name])
    if output is not None and is_url(output) and not options.force:
        check_replaceable("--output", output)
    for path in beside:  # links are not followed: no option names these files
        try:
            status = os.lstat(path)
        except OSError:
            check_writable(path)
            continue
        if stat.S_ISDIR(status.st_mode) or not (options.force or is_alone(status)):
            raise OutputError(
                f"{path} is a link, or not a regular file, and a run with this --output writes "
                "there: remove it, or use another --output"
            )
