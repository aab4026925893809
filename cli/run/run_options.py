"""The options of `batchdecode run`, and what each of them rules out."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from batcher.errors import BatchdecodeError
from batcher.events import MAX_WORKERS

from .. import shared
from ..help import DECODING, DISPLAY, ERRORS, INPUT, OUTPUT, SERVER, flag, option
from ..options import MAX_DELAY, MIN_INTERVAL, SchedulingOptions, refuse_stdout, scheduling_group

if TYPE_CHECKING:
    from batcher.metrics.slo import Slo

_OF_ONE_ENGINE = (
    "stream",
    "step-delay",
)
_EXCLUDING = (
    ("stream", "keep-order", "a stream is in the order of the steps"),
    ("stream", "resume", "what was streamed is not repeated"),
    ("force", "resume", "one starts over, the other goes on"),
    ("stats", "quiet", "one says more, the other less"),
    *((name, "workers", "it is about one engine") for name in _OF_ONE_ENGINE),
)
MAX_PORT = 2**16 - 1
_SECONDS: dict[str, Any] = {"max": MAX_DELAY}


def _file_option(text: str, *, is_common: bool = False) -> Any:
    return option(OUTPUT, text, "FILE", callback=refuse_stdout, is_common=is_common)


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)  # each would take time to make
class RunOptions(shared.ModelOptions):
    """The options of `batchdecode run`, and what --config holds for the models.

    call_timeout: in seconds; goes before the one in llm_settings.
    """

    input: str | None = shared.requests()
    follow: bool = flag(
        INPUT, "Do not wait for the next line of a pipe: step on with what has come."
    )
    config: str | None = shared.all_config()
    batch: int = shared.batch()
    workers: int | None = option(
        DECODING,
        "Processes that decode, each with a model and --batch slots of its own; one that dies "
        "is replaced.  [default: this one decodes]",
        "N",
        min=1,
        max=MAX_WORKERS,
    )
    on: str | None = option(
        DECODING,
        "Where the workers are: ray, or ray:ADDRESS of a cluster.  [default: this machine]",
        "ENGINE",
    )
    model: str = shared.model()
    chat: bool = shared.chat()
    checkpoint: dict[str, Any] = shared.checkpoint_group().field
    defaults: dict[str, Any] = shared.defaults_group().field
    grammar_timeout: float = shared.grammar_timeout()
    strict_constraints: bool = shared.strict_constraints()
    call_timeout: float | None = option(
        DECODING,
        "Fail a row that an LLM gives no answer for in this time.  [default: 120]",
        "SECONDS",
        min=MIN_INTERVAL,
        **_SECONDS,
    )
    scheduling: SchedulingOptions = scheduling_group().field
    output: str | None = shared.output("Where results go; with .gz compressed.")
    keep_order: bool = flag(
        OUTPUT, "Results in the order of the requests, not in that of finishing.", is_common=True
    )
    resume: bool = flag(
        OUTPUT,
        "Continue the run whose results are in --output; with =repair drop lines "
        "first that no run has written.",
        is_common=True,
    )
    repair: bool = option(OUTPUT, "", default=False, hidden=True)  # see _as_flags
    retry_failed: bool = flag(OUTPUT, "With --resume: decode again what has failed.")
    force: bool = flag(OUTPUT, "Overwrite earlier results, and files that hold something else.")
    stream: bool = flag(OUTPUT, "Before the results of a step, what each row has generated in it.")
    trace: str | None = _file_option(
        "Where every decision goes; with .gz compressed.", is_common=True
    )
    summary_json: str | None = option(
        OUTPUT, "Where the numbers of the run go, as JSON; - is stdout, with --output FILE.", "FILE"
    )
    report: str | None = _file_option("Where a report for a browser goes, as HTML.")
    slo: str | None = shared.slo()
    metrics_port: str | None = option(
        OUTPUT,
        "Where Prometheus may ask for the numbers while it runs; 0 takes a port that is free.",
        "[ADDRESS:]PORT",
    )
    metrics_file: str | None = _file_option(
        "Where they go every few seconds, for the node exporter: FILE.prom."
    )
    otel: str | None = option(
        OUTPUT,
        "Send a trace of each request to this collector, by OTLP over HTTP; env: the one that "
        "OTEL_EXPORTER_OTLP_ENDPOINT names.",
        "URL",
    )
    timeseries: str | None = _file_option(
        "Where the run over time goes, as CSV; with .gz compressed."
    )
    timeseries_interval: float | None = option(
        OUTPUT,
        "Engine time of a row.  [default: 1, more in a long run]",
        "SECONDS",
        min=MIN_INTERVAL,
        **_SECONDS,
    )
    keep_going: bool = flag(ERRORS, "Make a bad line an error result, and go on.", is_common=True)
    max_errors: int | None = option(
        ERRORS, "Read no more after N failed requests; implies --keep-going.", "N", min=1
    )
    live: Literal["auto", "always", "plain", "never"] = option(
        DISPLAY,
        "Show the batch at work: auto (on a terminal), always, plain (lines of words, "
        "no picture) or never.",
        "WHEN",
        default="auto",
        is_common=True,
    )
    step_delay: float = option(
        DISPLAY,
        "Wait after each step, and draw each one.",
        "SECONDS",
        default=0.0,
        min=0,
        show_default=False,
        **_SECONDS,
    )
    color: shared.Color = shared.color()
    stats: bool = flag(DISPLAY, "After the summary, tables of all numbers of the run.")
    quiet: bool = flag(DISPLAY, "No live view and no summary: only problems.", "-q", is_common=True)
    max_rate: float | None = option(
        SERVER, "Requests in a second, at most.", "N", min=1e-6, max=1e6
    )
    max_wait: float | None = option(
        SERVER,
        "Longest wait that a server may ask for (Retry-After); a longer one fails the request.",
        "SECONDS",
        min=0,
        max=1e9,
    )
    extra_body: str | None = option(
        SERVER, "Fields for the body of every request; null leaves one out.", "JSON"
    )
    server_settings: dict[str, Any] = field(default_factory=dict)

    @property
    def limits(self) -> "Slo | None":
        """What --slo says.

        Raises:
            BatchdecodeError: that is no list of limits.
        """
        if self.slo is None:
            return None
        from batcher.metrics.slo import parse_slo  # noqa: PLC0415 - few runs have some

        return parse_slo(self.slo)

    @property
    def is_exposed(self) -> bool:
        """Whether Prometheus is told of the run."""
        return self.metrics_port is not None or self.metrics_file is not None

    @property
    def metrics_address(self) -> tuple[str, int] | None:
        """The address and the port that --metrics-port says.

        Raises:
            BatchdecodeError: it is no port.
        """
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
        """What the options and the file of --config say of a server.

        Raises:
            BatchdecodeError: --extra-body is no JSON object.
        """
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
        """Make sure that no option asks for what another one rules out.

        Raises:
            BatchdecodeError: one does, or asks for what makes no sense.
        """
        _ = self.limits
        if self.quiet and (where := self.metrics_address) is not None and not where[1]:
            raise BatchdecodeError("--metrics-port 0 needs a run without --quiet, to tell the port")
        for one, other, why in _EXCLUDING:
            if getattr(self, one.replace("-", "_")) and getattr(self, other.replace("-", "_")):
                raise BatchdecodeError(f"--{one} and --{other} exclude each other: {why}")
        if self.on is not None and (self.workers is None or self.on.partition(":")[0] != "ray"):
            raise BatchdecodeError(f"--on {self.on}: it is ray or ray:ADDRESS, with --workers N")
        if self.workers is not None and self.live == "plain":
            raise BatchdecodeError("--live plain and --workers exclude each other")
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
