"""`batchdecode calibrate`: fits a profile to a log of real times, and states its error."""

from typing import Annotated, Any

import typer
from msgspec import Struct

from ..help import as_command
from ..scheduling_options import SchedulingOptions
from .arguments import OUTPUT, ForceOption, none_for_stdout
from .records import help_without_input, option, takes_record

PROFILE, REQUESTS = "Profile", "For a log of requests"

_LOG = "Steps, or requests, one JSON object per line: a file, a .gz file, or -."
_NAME = "What the profile is called.  [default: the name of LOG]"
_PARALLEL = "GPUs that shared it.  [default: 1, or that of --start]"
_START = "What the search begins with.  [default: the roofline of --hardware, --model]"
_META = "JSON with the limits of the run, as vLLM calls them.  [default: *meta.json beside LOG]"
_HOLDOUT = "Requests, those that came last, to judge the fit by."
_OUTPUT = "Where the profile goes, as YAML.  [default: stdout]"


def _option(metavar: str, text: str, panel: str, **more: Any) -> Any:
    """Return an option of which help shows no default but that in its text."""
    return option(metavar, text, panel, show_default=False, **more)


def _count(text: str) -> Any:
    """Return an option that is a count, and is for logs of requests only."""
    return _option("N", text, REQUESTS, min=1, max=2**31 - 1)


class CalibrateOptions(Struct, frozen=True, kw_only=True):
    """The options of `batchdecode calibrate`, None where not given; see docs/timing.md."""

    log: Annotated[str | None, typer.Argument(metavar="LOG", help=_LOG)] = None
    name: Annotated[str | None, _option("NAME", _NAME, PROFILE)] = None
    hardware: Annotated[
        str | None, option("GPU", "The GPU it was measured on, to check it.", PROFILE)
    ] = None
    model: Annotated[str | None, option("MODEL", "The model that ran, to check it.", PROFILE)] = (
        None
    )
    tensor_parallel: Annotated[int | None, _option("N", _PARALLEL, PROFILE, min=1, max=1024)] = None
    start: Annotated[str | None, _option("PROFILE", _START, REQUESTS)] = None
    meta: Annotated[str | None, _option("FILE", _META, REQUESTS)] = None
    batch: Annotated[int | None, _count("Requests that were run at once at most.")] = None
    scheduling: SchedulingOptions = SchedulingOptions()
    tries: Annotated[int | None, _count("Simulations at most.  [default: 200]")] = None
    holdout: Annotated[float | None, _option("SHARE", _HOLDOUT, REQUESTS, min=0.01, max=0.99)] = (
        None
    )
    output: Annotated[
        str | None, option("FILE", _OUTPUT, OUTPUT, "--output", "-o", callback=none_for_stdout)
    ] = None
    force: ForceOption = False

    @property
    def given_for_requests(self) -> list[str]:
        """The names of those that were given and are for logs of requests only."""
        own = [
            n
            for n in ("meta", "batch", "start", "tries", "holdout")
            if getattr(self, n) is not None
        ]
        return [*own, *self.scheduling.given]


def calibrate(context: typer.Context, options: CalibrateOptions) -> None:
    """Fit a profile to a log of real times, of steps or of requests, and state its error."""
    help_without_input(context, options.log)
    from ..calibrate import write_profile  # noqa: PLC0415 - numpy

    write_profile(options)


COMMAND = as_command(
    takes_record(calibrate, CalibrateOptions, REQUESTS, without=("check", "profile"))
)
