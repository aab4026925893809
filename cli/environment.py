"""What the environment says: BATCHDECODE_ and the name of an option stand for it, for any command.

Rule: a variable means nothing to a command that has no such option; one that no command has is
warned of, since others may use such names.
"""

import os
from collections.abc import Iterator

from .commands import NAMES, command_of

PREFIX = "BATCHDECODE_"


def says_something() -> bool:
    """Return whether an option may be set by the environment."""
    return any(name.startswith(PREFIX) for name in os.environ)


def variable_of(option: str) -> str:
    """Return the variable that sets an option, by the name of its parameter."""
    return PREFIX + option.upper()


def unknown_variables() -> Iterator[str]:
    """Yield for each variable that looks like one of ours, and is none, what to say of it."""
    given = sorted(name for name in os.environ if name.startswith(PREFIX))
    options = {option.upper() for option in _options()} if given else set()
    for name in given:
        if (said := name.removeprefix(PREFIX)) not in options:
            from difflib import get_close_matches  # noqa: PLC0415 - for a mistake only

            near = get_close_matches(said, sorted(options), n=1)
            hint = f"; did you mean {PREFIX}{near[0]}?" if near else ""
            yield f"{name} in the environment is no option of any command{hint}"


def _options() -> Iterator[str]:
    """Yield the names of the options of all commands."""
    for name in NAMES:
        command = command_of(name)
        for each in (command, *command.below.values()) if command is not None else ():
            yield from (parameter.name for parameter in each.parameters if parameter.flags)
