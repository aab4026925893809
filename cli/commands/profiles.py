"""`batchdecode profiles`: how long steps of real engines take, and what their hardware allows."""

from typing import Annotated

from msgspec import Struct

from ..help import OUTPUT, argument, option
from ..options import as_command


class ProfileOptions(Struct, frozen=True, kw_only=True):
    """The options of `batchdecode profiles`."""

    name: Annotated[
        str | None, argument("Only this: what --profile takes, or a file of profiles.", "NAME")
    ] = None
    json: Annotated[bool, option(OUTPUT, "Print it as JSON.")] = False


def profiles(options: ProfileOptions) -> None:
    """List profiles of step times with their error, and check them against their hardware."""
    from ..profiles import show_step_times  # noqa: PLC0415 - --help starts without it

    show_step_times(options.name, as_json=options.json)


COMMAND = as_command(profiles, ProfileOptions)
