"""`batchdecode profiles`: how long steps of real engines take, and what their hardware allows."""

from dataclasses import dataclass

from ..help import OUTPUT, argument, flag
from ..options import as_command


@dataclass(frozen=True, kw_only=True)
class ProfileOptions:
    """The options of `batchdecode profiles`."""

    name: str | None = argument(
        "Only this: what --profile takes, or a file of profiles.", "NAME", offers="profile_name"
    )
    json: bool = flag(OUTPUT, "Print it as JSON.")


def profiles(options: ProfileOptions) -> None:
    """List profiles of step times with their error, and check them against their hardware."""
    from ..profiles import show_step_times  # noqa: PLC0415 - --help starts without it

    show_step_times(options.name, as_json=options.json)


COMMAND = as_command(profiles, ProfileOptions)
