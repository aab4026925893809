"""Help without boxes: options in groups, good in 80 columns."""

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from typer import BadParameter
from typer.core import TyperCommand

from .environment import variable_of

_MAX_SHORT_HELP = 120
_COLUMN = 22  # the names of all groups take as much, so that the texts stand below each other


class GroupedCommand(TyperCommand):
    """A command whose help lists its options under the titles of their `rich_help_panel`.

    respell: what it understands of an argument beyond typer, as arguments for it.
    """

    respell: Callable[[str], list[str]] | None = None

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse `args`, respelled."""
        if self.respell is not None:
            args = [part for argument in args for part in self.respell(argument)]
        try:
            return super().parse_args(ctx, args)
        except BadParameter as error:
            name = error.param.name if error.param is not None else None
            source = ctx.get_parameter_source(name) if name else None
            if name and source is not None and source.name == "ENVIRONMENT":
                error.param_hint = f"{variable_of(name)} in the environment"
            raise

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
