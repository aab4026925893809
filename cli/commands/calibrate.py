"""`batchdecode calibrate`: fits a profile to a log of real step times, and states its error."""

from dataclasses import dataclass

from .. import shared
from ..help import argument, option
from ..options import as_command

PROFILE = "Profile"


@dataclass(frozen=True, kw_only=True)
class CalibrateOptions:
    """The options of `batchdecode calibrate`, None where not given; see docs/calibrating.md."""

    input: str | None = argument(
        "Step times: a log, or the trace of a run with --profile wall; a file, a .gz file, or -.",
        "LOG",
    )
    name: str | None = option(
        PROFILE, "Name of the profile.  [default: the name of LOG]", "NAME", is_common=True
    )
    hardware: str | None = option(
        PROFILE, "GPU of the run, to check the profile.", "GPU", is_common=True, offers="gpu"
    )
    model: str | None = option(
        PROFILE,
        "Model of the run, to check the profile.",
        "MODEL",
        is_common=True,
        offers="model_shape",
    )
    tensor_parallel: int | None = option(
        PROFILE, "GPUs that shared the model.  [default: 1]", "N", min=1, max=1024
    )
    output: str | None = shared.output("File for the profile, as YAML.")
    force: bool = shared.force()


def calibrate(options: CalibrateOptions) -> None:
    """Fit a profile to a log of real step times, and state its error."""
    from ..calibrate import write_profile  # noqa: PLC0415 - numpy

    write_profile(
        options.input,
        name=options.name,
        hardware=options.hardware,
        model=options.model,
        tensor_parallel=options.tensor_parallel,
        output=options.output,
        force=options.force,
    )


COMMAND = as_command(calibrate, CalibrateOptions)
