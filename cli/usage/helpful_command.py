"""A command of typer's with two pages of help: one of its common options, and one of all."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import typer
from typer._click.exceptions import UsageError
from typer.core import TyperCommand, TyperOption

from .page import Page
from .values import WordedType

_ALL = "--help-all"


class HelpfulCommand(TyperCommand):
    """A command with two pages of help: `--help` has its common options, `--help-all` all.

    summary: what it does, in a sentence.  common: the names of those options; a command that has
    none tells of all by `--help`.  examples: command lines.  notes: paragraphs of the page of all.
    subcommands: those below it, by name.  respell: what it understands of an argument beyond typer,
    as arguments for it.  offers: what values may be, as Told has it, by names of parameters.
    """

    summary: str = ""
    common: frozenset[str] = frozenset()
    examples: Sequence[str] = ()
    notes: Sequence[str] = ()
    subcommands: ClassVar[Mapping[str, Any]] = {}
    respell: Callable[[str], list[str]] | None = None
    offers: Mapping[str, str] = {}
    _help_all: TyperOption | None = None

    def get_params(self, ctx: Any) -> list[Any]:
        """Return the arguments and options, among them the two for help."""
        if self._help_all is None:
            self._help_all = TyperOption(
                param_decls=["help_all", _ALL],
                is_flag=True,
                is_eager=True,
                expose_value=False,
                allow_from_autoenv=False,
                callback=_show_all,
                help="Show all options, grouped.",
                show_default=False,
                hidden=not self.common,
            )
        return [*super().get_params(ctx), self._help_all]

    def get_help_option(self, ctx: Any) -> Any:
        """Return the option --help, which the environment cannot ask for."""
        option = super().get_help_option(ctx)
        if option is not None:
            option.allow_from_autoenv = False
        return option

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse `args`, respelled; an error knows of which command it is."""
        if self.respell is not None:
            args = [part for argument in args for part in self.respell(argument)]
        try:
            return super().parse_args(ctx, args)
        except UsageError as error:
            error.ctx = error.ctx or ctx
            raise

    def get_help(self, ctx: Any) -> str:
        """Return the page of `--help`."""
        return self.page(ctx, is_whole=not self.common)

    def page(self, ctx: Any, *, is_whole: bool) -> str:
        """Return a page of help; is_whole: with all options, each under the title of its panel."""
        sections: dict[str, list[tuple[str, str]]] = {}
        for param in self.get_params(ctx):
            title = self._title(param, is_whole=is_whole)
            if title is not None:
                sections.setdefault(title, []).append(self._row(param, ctx))
        if self.subcommands:
            below = self.subcommands.items()
            sections["Commands"] = [(name, command.summary) for name, command in below]
        page = Page(term for rows in sections.values() for term, _ in rows)
        page.usage(ctx.command_path, " ".join(self.collect_usage_pieces(ctx)))
        for paragraph in (self.help or "").split("\n\n"):
            page.paragraph(" ".join(paragraph.split()))
        for title, rows in sections.items():
            page.definitions(title, rows)
        if self.examples:
            page.examples(self.examples)
        for note in self.notes if is_whole else ():
            page.paragraph(note)
        page.paragraph(f"More: batchdecode help {ctx.info_name}")
        return str(page)

    def _title(self, param: Any, *, is_whole: bool) -> str | None:
        """Return the title of the section that tells of `param`, None if the page has none."""
        if param.param_type_name == "argument":
            return "Arguments"
        is_short = param.required or param.name in {*self.common, "help", "help_all"}
        if param.hidden or not (is_whole or is_short):
            return None
        return (param.rich_help_panel if is_whole else None) or "Options"

    def _row(self, param: Any, ctx: Any) -> tuple[str, str]:
        """Return the names of an option, and what help says of it."""
        if param.name == "help":
            return names_of(param), f"Show {'the common options' if self.common else 'this'}."
        return _row(param, ctx)


class NestingCommand(HelpfulCommand):
    """A command that has others below it: their names stand where its first argument would.

    A file that is called as one of them can be given as ./NAME.
    """

    def make_context(
        self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any
    ) -> Any:
        """Return the context of the command that `args` name, this one or one below it."""
        name = args[0] if args else ""
        if name in self.subcommands:
            below = self.subcommands[name]
            return below.make_context(f"{info_name} {name}", args[1:], parent=parent, **extra)
        return super().make_context(info_name, args, parent=parent, **extra)


def names_of(param: Any) -> str:
    """Return the names of an option, the short one first."""
    return ", ".join(sorted(param.opts, key=len))


def _show_all(ctx: Any, param: Any, value: bool) -> None:  # noqa: ARG001, FBT001 - typer calls it so
    if value and not ctx.resilient_parsing:
        typer.echo(ctx.command.page(ctx, is_whole=True))
        ctx.exit()


def _row(param: Any, ctx: Any) -> tuple[str, str]:
    """Return the names of an argument or option, and its text with what follows of its value.

    A text may end with what it says itself of that, two spaces before it: `[default: ...]`.
    """
    text, _, told = param.help.partition("  [")
    facts = [told.removesuffix("]")] if told else []
    if param.param_type_name == "argument":
        return param.metavar, text
    default = param.get_default(ctx)
    if not param.is_flag and param.show_default and default is not None:
        shown = f"{default:g}" if isinstance(default, float) else str(default)
        facts.append(f"default: {shown}")
    if isinstance(param.type, WordedType) and param.type.range:
        facts.append(param.type.range)
    if param.required:
        facts.append("required")
    metavar = "" if param.is_flag else f" {param.metavar}"
    return names_of(param) + metavar, f"{text}  [{'; '.join(facts)}]" if facts else text
