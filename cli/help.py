"""Options as a record's fields say them, and help without boxes: in groups, good in 80 columns."""

from collections.abc import Callable, Mapping
from dataclasses import MISSING, field
from typing import Any, ClassVar

import typer
from msgspec import Struct
from typer.core import TyperCommand

_MAX_SHORT_HELP = 120
_COLUMN = 22  # the names of all groups take as much, so that the texts stand below each other
INPUT, DECODING, OUTPUT, ERRORS, DISPLAY = "Input", "Decoding", "Output", "Errors", "Display"
SERVER = "Server"
REQUIRED: Any = MISSING  # the default of what has to be given
TOLD = "told"  # where the metadata of a field says what typer has to know of it


def argument(text: str, metavar: str, default: Any = None, **more: Any) -> Any:
    """Return a field that is an argument; more: as typer has it."""
    return field(
        default=default, metadata={TOLD: typer.Argument(metavar=metavar, help=text, **more)}
    )


def option(
    panel: str, text: str, metavar: str | None = None, *flags: str, default: Any = None, **more: Any
) -> Any:
    """Return a field that is an option, which is listed under the title `panel`.

    flags: a letter beside its name, as `-b`, or another name, as `--json`.  more: as typer has it.
    """
    more.setdefault("show_default", "[default: " not in text)
    info = typer.Option(metavar=metavar, help=text, rich_help_panel=panel, **more)
    info.param_decls = flags
    return field(default=default, metadata={TOLD: info})


def flag(panel: str, text: str, *flags: str) -> Any:
    """Return a field that is an option without a value."""
    return option(panel, text, None, *flags, default=False)


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


class GroupedCommand(TyperCommand):
    """A command whose help lists its options under the titles of their `rich_help_panel`."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write one section for each group, in the order in which they first come."""
        ctx.auto_envvar_prefix = None  # the rule for these names is told once, in the epilog
        groups: dict[str, list[tuple[str, str]]] = {}
        for param in self.get_params(ctx):
            record = param.get_help_record(ctx)
            if record is None:
                continue
            names, text = record
            title = getattr(param, "rich_help_panel", None) or "Options"
            if param.param_type_name == "argument":
                names, title = names.partition(" ")[0], "Arguments"  # without its type
            groups.setdefault(title, []).append((names.ljust(_COLUMN), text))
        for title, records in groups.items():
            with formatter.section(title):
                formatter.write_dl(records, col_max=_COLUMN + 2)


class NestingCommand(GroupedCommand):
    """A command that has others below it: their names stand where its first argument would.

    A file that is called as one of them can be given as ./NAME.
    """

    subcommands: ClassVar[Mapping[str, Any]] = {}

    def make_context(
        self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any
    ) -> Any:
        """Return the context of the command that `args` name, this one or one below it."""
        name = args[0] if args else ""
        if name in self.subcommands:
            below = self.subcommands[name]
            return below.make_context(f"{info_name} {name}", args[1:], parent=parent, **extra)
        return super().make_context(info_name, args, parent=parent, **extra)

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the options, and after them the commands below this one."""
        super().format_options(ctx, formatter)
        with formatter.section("Commands"):
            formatter.write_dl(
                [
                    (name.ljust(_COLUMN), below.get_short_help_str(_MAX_SHORT_HELP))
                    for name, below in self.subcommands.items()
                ],
                col_max=_COLUMN + 2,
            )
