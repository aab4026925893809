"""One module for each command, and their names."""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..command import Command

NAMES = (
    *("run", "check", "trace", "verify", "workload", "compare", "plan", "replay", "profiles"),
    *("calibrate", "serve", "train", "draft", "schema", "completion", "help"),
)


def command_of(name: str) -> "Command | None":
    """Return the command of this name, None if there is none; others are not imported."""
    if name not in NAMES:
        return None
    command: Command = import_module(f".{name}", __package__).COMMAND
    return command
