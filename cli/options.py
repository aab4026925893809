"""What a run was asked to do, by flags, environment and configuration file together."""

from typing import Any

from msgspec import Struct, field

from batcher.metrics.slo import Slo
from batcher.settings import GRAMMAR_TIMEOUT

from .scheduling_options import SchedulingOptions
from .screen.terminal import ColorChoice
from .screen.view import LiveChoice


class RunOptions(Struct, frozen=True, kw_only=True):
    """The options of `batchdecode run`; docs/cli.md says what each one means."""

    input: str | None = None
    batch: int = 8
    model: str = "simulated"
    seed: int | None = None
    model_settings: dict[str, Any] = field(default_factory=dict)
    llm_settings: dict[str, Any] = field(default_factory=dict)
    call_timeout: float | None = None  # seconds; goes before the one in llm_settings
    grammar_timeout: float = GRAMMAR_TIMEOUT  # seconds of processor time
    scheduling: SchedulingOptions = field(default_factory=SchedulingOptions)
    output: str | None = None
    trace: str | None = None
    summary_json: str | None = None
    slo: Slo | None = None
    timeseries: str | None = None
    timeseries_interval: float | None = None  # seconds
    keep_order: bool = False
    keep_going: bool = False
    max_errors: int | None = None
    resume: bool = False
    repair: bool = False
    retry_failed: bool = False
    force: bool = False
    stream: bool = False
    follow: bool = False
    live: LiveChoice = "auto"
    step_delay: float = 0.0
    color: ColorChoice = "auto"
    quiet: bool = False
