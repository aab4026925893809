"""The options of `batchdecode run`, and which of them exclude each other."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any

from batcher.errors import BatchdecodeError
from batcher.events import MAX_WORKERS

from ..command import DECODING, DISPLAY, ERRORS, INPUT, OUTPUT, flag, option
from ..options import (
    MAX_DELAY,
    MIN_INTERVAL,
    Color,
    Config,
    DecodingOptions,
    Input,
    Live,
    SchedulingOptions,
    SloLimits,
    output_file,
    output_option,
    scheduling_group,
)

if TYPE_CHECKING:
    from batcher.metrics.slo import Slo

SERVER = "Server"
_OF_ONE_ENGINE = ("stream", "step-delay")
_EXCLUDING = (
    ("stream", "keep-order", "a stream is in the order of the steps"),
    ("stream", "resume", "what was streamed is not repeated"),
    ("force", "resume", "one starts over, the other continues"),
    ("stats", "quiet", "one shows more, the other less"),
    *((name, "workers", "it is about one engine") for name in _OF_ONE_ENGINE),
)
MAX_PORT = 2**16 - 1


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)  # each would take time to make
class RunOptions(DecodingOptions):
    """The options of `batchdecode run`, and what --config holds for the models.

    call_timeout: in seconds; goes before the one in llm_settings.
    """

    input: Input = None
    follow: Annotated[
        bool, flag(INPUT, "Start the next step without waiting for the next line of a pipe.")
    ] = False
    config: Config = None
    workers: Annotated[
        int | None,
        option(
            DECODING,
            "Worker processes, each with a model and --batch slots; a dead one is replaced.  "
            "[default: none, decode in this process]",
            "N",
            min=1,
            max=MAX_WORKERS,
        ),
    ] = None
    on: Annotated[
        str | None,
        option(
            DECODING,
            "Cluster for the workers: ray, or ray:ADDRESS.  [default: this machine]",
            "ENGINE",
        ),
    ] = None
    call_timeout: Annotated[
        float | None,
        option(
            DECODING,
            "Time limit for one call of an LLM.  [default: 120]",
            "SECONDS",
            min=MIN_INTERVAL,
            max=MAX_DELAY,
        ),
    ] = None
    scheduling: Annotated[SchedulingOptions, scheduling_group()] = field(
        default_factory=SchedulingOptions
    )
    output: Annotated[
        str | None, output_option("Write results to FILE (gzipped if it ends in .gz).")
    ] = None
    keep_order: Annotated[
        bool, flag(OUTPUT, "Write results in input order, not as they finish.", common=True)
    ] = False
    resume: Annotated[
        bool,
        flag(
            OUTPUT,
            "Resume the run that wrote --output; --resume=repair first removes foreign lines.",
            common=True,
        ),
    ] = False
    repair: Annotated[bool, option(OUTPUT, "", hidden=True)] = False  # of --resume=repair
    retry_failed: Annotated[bool, flag(OUTPUT, "With --resume: retry the failed requests.")] = False
    force: Annotated[bool, flag(OUTPUT, "Overwrite existing files.")] = False
    stream: Annotated[bool, flag(OUTPUT, "Print the text of each row after every step.")] = False
    trace: Annotated[
        str | None,
        output_file(
            "Write every scheduling decision to FILE (gzipped if it ends in .gz).", common=True
        ),
    ] = None
    summary_json: Annotated[
        str | None,
        option(
            OUTPUT, "Write the numbers of the run as JSON; - is stdout, with --output FILE.", "FILE"
        ),
    ] = None
    report: Annotated[str | None, output_file("Write an HTML report for a browser.")] = None
    slo: SloLimits = None
    metrics_port: Annotated[
        str | None,
        option(OUTPUT, "Serve Prometheus metrics on PORT (0 picks a free one).", "[ADDRESS:]PORT"),
    ] = None
    metrics_file: Annotated[
        str | None,
        output_file("Write the metrics to FILE.prom every few seconds, for the node exporter."),
    ] = None
    otel: Annotated[
        str | None,
        option(
            OUTPUT,
            "Send a trace of each request to this OTLP/HTTP collector; env: to the one in "
            "OTEL_EXPORTER_OTLP_ENDPOINT.",
            "URL",
        ),
    ] = None
    timeseries: Annotated[
        str | None, output_file("Write the run over time as CSV (gzipped if it ends in .gz).")
    ] = None
    timeseries_interval: Annotated[
        float | None,
        option(
            OUTPUT,
            "Engine time per row of --timeseries.  [default: 1, more in a long run]",
            "SECONDS",
            min=MIN_INTERVAL,
            max=MAX_DELAY,
        ),
    ] = None
    keep_going: Annotated[
        bool,
        flag(ERRORS, "Report invalid lines as error results instead of stopping.", common=True),
    ] = False
    max_errors: Annotated[
        int | None,
        option(ERRORS, "Stop reading after N failed requests; implies --keep-going.", "N", min=1),
    ] = None
    live: Annotated[
        Live,
        option(
            DISPLAY,
            "Live view of the batch: auto (on a terminal), always, plain (lines of text) or never.",
            "WHEN",
            common=True,
        ),
    ] = "auto"
    step_delay: Annotated[
        float,
        option(
            DISPLAY,
            "Pause after each step, and draw every step.",
            "SECONDS",
            min=0,
            max=MAX_DELAY,
            show_default=False,
        ),
    ] = 0.0
    color: Color = "auto"
    stats: Annotated[bool, flag(DISPLAY, "Print tables of all numbers after the summary.")] = False
    quiet: Annotated[
        bool, flag(DISPLAY, "Show no live view and no summary, only problems.", "-q", common=True)
    ] = False
    max_rate: Annotated[
        float | None, option(SERVER, "Maximum requests per second.", "N", min=1e-6, max=1e6)
    ] = None
    max_wait: Annotated[
        float | None,
        option(
            SERVER,
            "Longest pause a server may ask for (Retry-After); a longer one fails the request.",
            "SECONDS",
            min=0,
            max=1e9,
        ),
    ] = None
    extra_body: Annotated[
        str | None,
        option(SERVER, "Fields to add to the body of every request; null removes one.", "JSON"),
    ] = None
    server_settings: dict[str, Any] = field(default_factory=dict)

    @property
    def limits(self) -> "Slo | None":
        """What --slo says."""
        if self.slo is None:
            return None
        from batcher.metrics.slo import parse_slo  # noqa: PLC0415 - few runs have some

        return parse_slo(self.slo)

    @property
    def is_exposed(self) -> bool:
        return self.metrics_port is not None or self.metrics_file is not None

    @property
    def metrics_address(self) -> tuple[str, int] | None:
        """The address and the port that --metrics-port says."""
        if self.metrics_port is None:
            return None
        address, _, port = self.metrics_port.rpartition(":")
        if not (port.isascii() and port.isdigit() and int(port) <= MAX_PORT):
            raise BatchdecodeError(
                f"--metrics-port must be a port from 0 to {MAX_PORT:,}, or ADDRESS:PORT, "
                f"not {self.metrics_port!r}"
            )
        return address.strip("[]") or "127.0.0.1", int(port)

    @property
    def server(self) -> dict[str, Any]:
        """What the options and the file of --config say of a server."""
        given = dict(self.server_settings)
        for name in ("max_rate", "max_wait"):
            if getattr(self, name) is not None:
                given[name] = getattr(self, name)
        if self.extra_body is not None:
            from batcher.requests.json_spans import JsonError, parse  # noqa: PLC0415 - for servers

            try:
                given["extra_body"] = parse(self.extra_body)
            except JsonError as error:
                place = error.span.start + 1
                message = f"--extra-body, character {place:,}: {error.message}"
                raise BatchdecodeError(message) from None
            if not isinstance(given["extra_body"], dict):
                raise BatchdecodeError("--extra-body is no JSON object")
        return given

    def check(self) -> None:
        """Make sure that no option asks for what another one rules out."""
        _ = self.limits
        if self.quiet and (where := self.metrics_address) is not None and not where[1]:
            raise BatchdecodeError("--metrics-port 0 needs a run without --quiet, to tell the port")
        for one, other, why in _EXCLUDING:
            if getattr(self, one.replace("-", "_")) and getattr(self, other.replace("-", "_")):
                raise BatchdecodeError(f"--{one} and --{other} exclude each other: {why}")
        if self.on is not None and (self.workers is None or self.on.partition(":")[0] != "ray"):
            raise BatchdecodeError(f"--on {self.on}: it is ray or ray:ADDRESS, with --workers N")
        if self.otel not in {None, "env"} and not str(self.otel).startswith(
            ("http://", "https://")
        ):
            raise BatchdecodeError(
                f"--otel must be env or an address such as http://127.0.0.1:4318, not {self.otel!r}"
            )
        if self.retry_failed and not self.resume:
            raise BatchdecodeError(
                "--retry-failed needs --resume: it is about results that are there"
            )
        if self.timeseries_interval is not None and self.timeseries is None:
            raise BatchdecodeError(
                "--timeseries-interval needs --timeseries FILE, which it is about"
            )
