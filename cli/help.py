"""Help without boxes: options in groups, that read well in 80 columns."""

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import typer
from typer.core import TyperCommand

_MAX_SHORT_HELP = 120
_COLUMN = 22  # the names of all groups take as much, so that the texts stand below each other


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


def as_command(
    function: Callable[..., None],
    *,
    cls: type[GroupedCommand] = GroupedCommand,
    epilog: str | None = None,
    context_settings: dict[str, Any] | None = None,
) -> Any:
    """Return `function` as a command whose arguments and options are its parameters."""
    alone = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
    alone.command(cls=cls, epilog=epilog, context_settings=context_settings)(function)
    return typer.main.get_command(alone)
