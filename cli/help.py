"""Help without boxes: options in groups, that read well in 80 columns."""

from typing import Any

from typer.core import TyperCommand

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
