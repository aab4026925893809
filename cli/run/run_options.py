"""The options of `batchdecode run`."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from batcher.errors import BatchdecodeError
from batcher.events import MAX_WORKERS

from ..command import DECODING, DISPLAY, ERRORS, INPUT, OUTPUT, flag, option
from ..options import (
    MAX_DELAY,
    MIN_INTERVAL,
    SLO,
    Color,
    Live,
    RequestOptions,
    SchedulingOptions,
    color_option,
    live_option,
    output_file,
    output_option,
    scheduling_group,
    trace_option,
    whole_config_option,
)

if TYPE_CHECKING:
    from batcher.metrics.slo import Slo

SERVER = "Server"
_EXCLUDING = (
    ("stream", "keep-order", "a stream is in the order of the steps"),
    ("stream", "resume", "a stream cannot be continued"),
    ("force", "resume", "one starts over, the other continues"),
    ("stats", "quiet", "one shows more, the other less"),
    ("stream", "workers", "a stream needs one engine"),
    ("step-delay", "workers", "steps can be held in one engine only"),
)
MAX_PORT = 2**16 - 1


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)  # each would take time to make
class RunOptions(RequestOptions):
    """The options of `batchdecode run`, and the settings of models from --config.

    call_timeout: in seconds; overrides the one in llm_settings.
    """

    follow: bool = flag(INPUT, "Start the next step without waiting for the next line of a pipe.")
    config: str | None = whole_config_option()
    workers: int | None = option(
        DECODING,
        "Number of worker processes, each with a model and --batch slots; a dead worker is "
        "replaced.  [default: none, decode in this process]",
        "N",
        min=1,
        max=MAX_WORKERS,
    )
    on: str | None = option(
        DECODING, "Cluster for the workers: ray, or ray:ADDRESS.  [default: this machine]", "ENGINE"
    )
    call_timeout: float | None = option(
        DECODING,
        "Time limit for one call of an LLM.  [default: 120]",
        "SECONDS",
        min=MIN_INTERVAL,
        max=MAX_DELAY,
    )
    scheduling: SchedulingOptions = scheduling_group().as_field()
    output: str | None = output_option("Write results to FILE (gzipped if it ends in .gz).")
    format: Literal["jsonl", "text"] | None = option(
        OUTPUT,
        "Format of results on stdout: jsonl (one object per line), or text (for reading).  "
        "[default: text on a terminal, else jsonl]",
        "FORMAT",
        common=True,
        allow_from_autoenv=False,  # that would be the one of `trace`, too
    )
    keep_order: bool = flag(
        OUTPUT, "Write results in input order, not as they finish.", common=True
    )
    resume: bool = flag(
        OUTPUT,
        "Resume the run that wrote --output; --resume=repair first removes foreign lines.",
        common=True,
    )
    repair: bool = option(OUTPUT, "", hidden=True, default=False)  # of --resume=repair
    retry_failed: bool = flag(OUTPUT, "With --resume: retry the failed requests.")
    force: bool = flag(OUTPUT, "Overwrite existing files.")
    stream: bool = flag(OUTPUT, "Print the new text of each row after every step.")
    trace: str | None = trace_option()
    summary_json: str | None = option(
        OUTPUT, "Write the numbers of the run as JSON; - is stdout, if --output is a file.", "FILE"
    )
    report: str | None = output_file("Write an HTML report for a browser.")
    open: bool = flag(OUTPUT, "Open the report in a browser at the end.")
    slo: str | None = option(
        OUTPUT, f"Count the requests within these limits: {SLO}.", "LIMIT,...", complete="slo"
    )
    metrics_port: str | None = option(
        OUTPUT, "Serve Prometheus metrics on PORT (0 picks a free one).", "[ADDRESS:]PORT"
    )
    metrics_file: str | None = output_file(
        "Write the metrics to FILE.prom every few seconds for the node exporter of Prometheus."
    )
    otel: str | None = option(
        OUTPUT,
        "Send a trace of each request to this OTLP/HTTP collector; env takes the URL from "
        "OTEL_EXPORTER_OTLP_ENDPOINT.",
        "URL",
    )
    timeseries: str | None = output_file(
        "Write metrics over time as CSV (gzipped if it ends in .gz)."
    )
    timeseries_interval: float | None = option(
        OUTPUT,
        "Engine time per row of --timeseries.  [default: 1, more in a long run]",
        "SECONDS",
        min=MIN_INTERVAL,
        max=MAX_DELAY,
    )
    keep_going: bool = flag(
        ERRORS, "Report invalid lines as error results instead of stopping.", common=True
    )
    max_errors: int | None = option(
        ERRORS, "Stop reading after N failed requests; implies --keep-going.", "N", min=1
    )
    live: Live = live_option("batch")
    step_delay: float = option(
        DISPLAY,
        "Pause after each step, and draw every step.",
        "SECONDS",
        min=0,
        max=MAX_DELAY,
        show_default=False,
        default=0.0,
    )
    color: Color = color_option()
    stats: bool = flag(DISPLAY, "Print tables of all numbers after the summary.")
    quiet: bool = flag(
        DISPLAY, "Show no live view and no summary, only problems.", "-q", common=True
    )
    max_rate: float | None = option(SERVER, "Maximum requests per second.", "N", min=1e-6, max=1e6)
    max_wait: float | None = option(
        SERVER,
        "Longest wait that a server may ask for (Retry-After); a longer one fails the request.",
        "SECONDS",
        min=0,
        max=1e9,
    )
    extra_body: str | None = option(
        SERVER, "Fields to add to the body of every request; null removes a field.", "JSON"
    )
    server_settings: dict[str, Any] = field(default_factory=dict)
    preset: set[str] = field(default_factory=set)

    @property
    def limits(self) -> "Slo | None":
        if self.slo is None:
            return None
        from batcher.metrics.slo import parse_slo  # noqa: PLC0415 - few runs have some

        return parse_slo(self.slo)

    @property
    def is_exposed(self) -> bool:
        return self.metrics_port is not None or self.metrics_file is not None

    @property
    def metrics_address(self) -> tuple[str, int] | None:
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
                raise BatchdecodeError("--extra-body must be a JSON object")
        return given

    def check(self) -> None:
        """Raise if options exclude or need one another."""
        _, address, on, otel = self.limits, self.metrics_address, self.on, self.otel
        for one, other, why in _EXCLUDING:
            if getattr(self, one.replace("-", "_")) and getattr(self, other.replace("-", "_")):
                raise BatchdecodeError(f"--{one} cannot be used with --{other}: {why}")
        is_text = self.format == "text" and "format" not in self.preset
        is_ray = on is None or (self.workers is not None and on.partition(":")[0] == "ray")
        is_otlp = otel is None or otel == "env" or otel.startswith(("http://", "https://"))
        for is_wrong, message in (
            (
                self.quiet and address is not None and not address[1],
                "--metrics-port 0 prints its port: drop --quiet, or name a port",
            ),
            (not is_ray, f"--on must be ray or ray:ADDRESS, with --workers N, not {on!r}"),
            (
                not is_otlp,
                f"--otel must be env or an address such as http://127.0.0.1:4318, not {otel!r}",
            ),
            (
                is_text and self.output is not None,
                "--format text is for stdout: --output gets JSON lines, which --resume can read",
            ),
            (
                is_text and self.stream,
                "--format text cannot be used with --stream: a stream has JSON events",
            ),
            (
                self.retry_failed and not self.resume,
                "--retry-failed needs --resume: it retries the failed requests of an earlier run",
            ),
            (self.open and self.report is None, "--open needs --report FILE"),
            (
                self.timeseries_interval is not None and self.timeseries is None,
                "--timeseries-interval needs --timeseries FILE",
            ),
        ):
            if is_wrong:
                raise BatchdecodeError(message)
