"""What tells others of a run, where it is asked to: Prometheus, or a collector of OpenTelemetry."""

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

from batcher.errors import BatchdecodeError

from ..screen.terminal import printable_lines
from .problems import say
from .run_options import RunOptions

if TYPE_CHECKING:
    from .exposing import Exposition
    from .out_file import OutFile
    from .spans import SpanSender


def opened_exposition(
    options: RunOptions, file: "OutFile | None"
) -> "AbstractContextManager[Exposition | None]":
    """Return what tells Prometheus of a run, None if nobody asks for it.

    file: that of --metrics-file.

    Raises:
        BatchdecodeError: see Exposition.
    """
    if not options.is_exposed:
        return nullcontext()
    from .exposing import Exposition  # noqa: PLC0415 - few runs are asked for it

    exposition = Exposition(options.metrics_address, file)
    if exposition.url is not None and not options.quiet:
        say(f"metrics at {exposition.url}\n")
    return exposition


def opened_spans(options: RunOptions, num_workers: int = 1) -> "SpanSender | None":
    """Return what sends the requests of a run as traces, None if nobody asks for it.

    Raises:
        BatchdecodeError: OpenTelemetry is missing.
    """
    if options.otel is None:
        return None
    try:
        from .spans import SpanSender  # noqa: PLC0415 - an extra
    except ModuleNotFoundError as error:
        raise BatchdecodeError(
            "--otel needs opentelemetry-sdk and opentelemetry-exporter-otlp-proto-http: "
            "install them with `pip install 'batchdecode[otel]'`"
        ) from error
    endpoint = None if options.otel == "env" else options.otel
    return SpanSender(endpoint, options.model, num_workers)


def close_spans(spans: "SpanSender | None", num_steps: list[int], *, is_quiet: bool) -> None:
    """Send what is left of a run, of which each worker took so many steps, and say what became."""
    if spans is not None:
        spans.close(num_steps)
        if spans.num_dropped or not is_quiet:
            say(printable_lines(f"{spans.describe()}\n"))
