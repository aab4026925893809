"""`batchdecode calibrate`: fits a profile to a log of real times, and states its error."""

from dataclasses import dataclass
from typing import Any

from batcher.speculation.settings import SPECULATION_SETTINGS

from .. import shared
from ..help import argument, flag, option
from ..options import SchedulingOptions, as_command, scheduling_group

PROFILE, REQUESTS = "Profile", "For a log of requests"
_COUNT: dict[str, Any] = {"min": 1, "max": 2**31 - 1}


@dataclass(frozen=True, kw_only=True)
class CalibrateOptions:
    """The options of `batchdecode calibrate`, None where not given; see docs/timing.md."""

    input: str | None = argument(
        "Steps, requests, or a trace of a run with times on the wall: a file, a .gz file, or -.",
        "LOG",
    )
    requests: bool = flag(
        REQUESTS, "Of a trace fit the times of requests, not of steps, as of a server's always."
    )
    name: str | None = option(
        PROFILE, "What the profile is called.  [default: the name of LOG]", "NAME", is_common=True
    )
    hardware: str | None = option(
        PROFILE, "The GPU it was measured on, to check it.", "GPU", is_common=True, offers="gpu"
    )
    model: str | None = option(
        PROFILE, "The model that ran, to check it.", "MODEL", is_common=True, offers="model_shape"
    )
    tensor_parallel: int | None = option(
        PROFILE, "GPUs that shared it.  [default: 1, or that of --start]", "N", min=1, max=1024
    )
    start: str | None = option(
        REQUESTS,
        "What the search begins with.  [default: the roofline of --hardware, --model]",
        "PROFILE",
    )
    meta: str | None = shared.meta(REQUESTS)
    batch: int | None = option(REQUESTS, "Requests that were run at once at most.", "N", **_COUNT)
    scheduling: SchedulingOptions = scheduling_group(
        REQUESTS, without=("check", "profile", "kv_memory", *SPECULATION_SETTINGS)
    ).field
    tries: int | None = option(REQUESTS, "Simulations at most.  [default: 200]", "N", **_COUNT)
    holdout: float | None = option(
        REQUESTS,
        "Requests, those that came last, to judge the fit by.",
        "SHARE",
        min=0.01,
        max=0.99,
    )
    output: str | None = shared.output("Where the profile goes, as YAML.")
    force: bool = shared.force()

    @property
    def given_for_requests(self) -> list[str]:
        """The names of the options that were given and are for logs of requests."""
        own = {name: getattr(self, name) for name in ("meta", "batch", "start", "tries", "holdout")}
        return [*(name for name, value in own.items() if value is not None), *self.scheduling.given]


def calibrate(options: CalibrateOptions) -> None:
    """Fit a profile to a log of real times, of steps or of requests, and state its error."""
    from ..calibrate import write_profile  # noqa: PLC0415 - numpy

    write_profile(options)


COMMAND = as_command(calibrate, CalibrateOptions)
