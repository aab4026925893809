"""Arguments and options as the fields of a record declare them, with what help says of each."""

from collections.abc import Callable
from dataclasses import MISSING, field
from typing import Any

from msgspec import Struct

INPUT, DECODING, OUTPUT, ERRORS, DISPLAY = "Input", "Decoding", "Output", "Errors", "Display"
SERVER = "Server"
HELP_NAMES = ["-h", "--help"]
REQUIRED: Any = MISSING  # the default of what has to be given
TOLD = "told"  # where the metadata of a field has what is declared of it: a Told or OptionGroup


class Told(Struct, frozen=True):
    """What is declared of an argument or option.

    settings: as typer has them.  flags: a letter beside its name, as `-b`, or another name.
    is_common: whether `--help` tells of it, and not only `--help-all`.  offers: what its value may
    be, for a shell that completes it: a name that usage/candidates.py knows.
    """

    is_argument: bool
    settings: dict[str, Any]
    flags: tuple[str, ...] = ()
    is_common: bool = False
    offers: str = ""


def argument(text: str, metavar: str, default: Any = None, offers: str = "", **more: Any) -> Any:
    """Return a field that is an argument; offers: as Told has it, more: as typer has it."""
    settings = {"metavar": metavar, "help": text, **more}
    told = Told(is_argument=True, settings=settings, offers=offers)
    return field(default=default, metadata={TOLD: told})


def option(
    panel: str,
    text: str,
    metavar: str | None = None,
    *flags: str,
    default: Any = None,
    is_common: bool = False,
    offers: str = "",
    **more: Any,
) -> Any:
    """Return a field that is an option, which is listed under the title `panel`.

    flags: a letter beside its name, as `-b`, or another name, as `--json`.  is_common: whether
    `--help` tells of it, and not only `--help-all`.  offers: as Told has it.  more: as typer has
    it.
    """
    more.setdefault("show_default", "[default: " not in text)
    settings = {"metavar": metavar, "help": text, "rich_help_panel": panel, **more}
    told = Told(
        is_argument=False, settings=settings, flags=flags, is_common=is_common, offers=offers
    )
    return field(default=default, metadata={TOLD: told})


def flag(panel: str, text: str, *flags: str, is_common: bool = False) -> Any:
    """Return a field that is an option without a value."""
    return option(panel, text, None, *flags, default=False, is_common=is_common)


class OptionGroup(Struct, frozen=True):
    """Options that make one field of a record together, by their names.

    kinds: of each its type, and what `option` returns.  read: makes the field of what was given.
    """

    kinds: dict[str, tuple[Any, Any]]
    read: Callable[[dict[str, Any]], Any]

    @property
    def field(self) -> Any:
        """The field, which has what is made of nothing by default."""
        return field(default_factory=lambda: self.read({}), metadata={TOLD: self})
