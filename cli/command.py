"""Commands: a function, and a dataclass of its options.

    @dataclass(frozen=True, kw_only=True)
    class CheckOptions:
        batch: int = option("Decoding", "Slots.", "N", "-b", min=1, default=8)

    COMMANDS = {"check": command(check, CheckOptions)}

typer parses the line, the environment (BATCHDECODE_BATCH) and the defaults of --config, and makes
help and completion.  A command with few options may have them as `Annotated` parameters.
"""

import gc
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import MISSING, field, fields, is_dataclass
from difflib import get_close_matches
from inspect import Parameter, Signature, signature
from typing import Annotated, Any, NamedTuple, get_args

import typer
from typer._click import types
from typer._click.exceptions import UsageError
from typer.core import TyperCommand, TyperOption
from typer.models import ArgumentInfo, OptionInfo

from batcher.fields import range_in_words, read_number

from .commands import COMMANDS
from .config import model_settings
from .screen.terminal import cut_middle, listed

PREFIX = "BATCHDECODE_"  # of the variables that set options
INPUT, DECODING, SCHEDULING, TIME = "Input", "Decoding", "Scheduling", "Time"
SPECULATION, OUTPUT, ERRORS, DISPLAY = "Speculation", "Output", "Errors", "Display"
_FIRST_PANELS = (INPUT, DECODING, SCHEDULING, TIME, SPECULATION)
ANY_COUNT = 2**31 - 1  # a maximum that help does not show
_CHECKED = (types.IntParamType, types.FloatParamType, types.BoolParamType)
_PRESET = {"DEFAULT_MAP", "ENVIRONMENT"}  # typer's names of the sources
_MAX_SHOWN = 60  # characters of a wrong value
_HELP_ALL = "help_all"
_OPTION = "option"  # the metadata of a field
REQUIRED: Any = MISSING  # the default of an option that must be given

Completer = str | Callable[[str], Iterable[str | tuple[str, str]]]


class Option(OptionInfo):
    """A declared option.  is_common: `--help` shows it, not only `--help-all`."""

    is_common: bool = False


class OptionGroup(NamedTuple):
    """Options that become one field of a record.

    kinds: the type and the field of each, by name.  read: makes the one field from given values.
    """

    kinds: Mapping[str, tuple[Any, Any]]
    read: Callable[[dict[str, Any]], Any]

    def as_field(self) -> Any:
        return field(default_factory=lambda: self.read({}), metadata={_OPTION: self})


def option(
    panel: str,
    text: str,
    metavar: str | None = None,
    *flags: str,
    common: bool = False,
    complete: Completer | None = None,
    default: Any = None,
    **more: Any,
) -> Any:
    """Return the field of an option, or of a flag if it has no metavar.

    panel: its title in help.  text: may end with `  [default: ...]`.  flags: a letter in addition
    to its name, or another name.  complete: a name in cli/completion.py, or a function of the first
    letters.  default: REQUIRED for an option without one.  more: arguments of typer.Option.
    """
    more.setdefault("show_default", "[default: " not in text)
    made = Option(
        default=...,
        param_decls=flags,
        help=text,
        metavar=metavar,
        rich_help_panel=panel,
        autocompletion=_completer(complete),
        **more,
    )
    made.is_common = common
    return field(default=default, metadata={_OPTION: made})


def flag(panel: str, text: str, *flags: str, common: bool = False) -> Any:
    return option(panel, text, None, *flags, common=common, default=False)


def argument(
    text: str, metavar: str, complete: Completer | None = None, default: Any = None
) -> Any:
    made = ArgumentInfo(
        default=..., help=text, metavar=metavar, autocompletion=_completer(complete)
    )
    return field(default=default, metadata={_OPTION: made})


def _completer(values: Completer | None) -> Callable[..., Any] | None:
    if values is None:
        return None

    def complete(incomplete: str) -> list[tuple[str, str]]:
        from .completion import candidates  # noqa: PLC0415 - only when a shell asks

        return candidates(values, incomplete)

    return complete


class Value(types.ParamType):
    """A type of typer with our error messages, which refuses NaN.

    allowed: the values in words.  types: of such values in a file.  range: numbers as help shows
    them.
    """

    def __init__(self, kind: Any) -> None:
        self._kind, self.name = kind, kind.name
        self.choices: Sequence[str] = getattr(kind, "choices", ())
        smallest, largest = getattr(kind, "min", None), getattr(kind, "max", None)
        self.range = range_in_words(smallest, None if largest == ANY_COUNT else largest)
        self._is_number = isinstance(kind, types.IntParamType | types.FloatParamType)
        self.allowed = listed(self.choices) if self.choices else "true or false"
        self.types: tuple[type, ...] = (str,) if self.choices else (bool,)
        if self._is_number:
            number, self.types = "a number", (int, float)
            if isinstance(kind, types.IntParamType):
                number, self.types = "an integer", (int,)
            self.allowed = f"{number} {range_in_words(smallest, largest)}".rstrip()

    def convert(self, value: Any, param: Any, ctx: Any) -> Any:
        """Convert `value`, or raise typer.BadParameter."""
        try:
            if isinstance(value, str) and self._is_number:
                read_number(value, float)  # refuses 1_0 and digits of other scripts
            converted = self._kind.convert(value, param, ctx)
            if not (isinstance(converted, float) and math.isnan(converted)):
                return converted
        except (typer.BadParameter, ValueError):
            pass
        try:
            read_number(str(value), float)
            shown = str(value)
        except ValueError:
            shown = repr(value)
        near = get_close_matches(str(value), self.choices, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise typer.BadParameter(
            f"must be {self.allowed}, not {cut_middle(shown, _MAX_SHOWN, '...')}{hint}"
        )

    def shell_complete(self, ctx: Any, param: Any, incomplete: str) -> Any:
        return self._kind.shell_complete(ctx, param, incomplete)


class Command(TyperCommand):
    """A command whose `--help` shows common options, and `--help-all` all of them in panels.

    common: names of options; if empty, `--help` shows all.  examples: command lines in help.
    notes: paragraphs below all options.  respell: splits an argument for typer.
    """

    common: frozenset[str] = frozenset()
    examples: Sequence[str] = ()
    notes: Sequence[str] = ()
    respell: Callable[[str], list[str]] | None = None

    def mark_options(self, words: Iterable[str]) -> list[tuple[str, bool]]:
        """Return each word of a command line with whether it is an option or `--`.

        The value of an option is not an option, even if it looks like one.
        """
        params: list[Any] = self.params
        options = [param for param in params if param.param_type_name == "option"]
        with_value = {name for option in options if not option.is_flag for name in option.opts}
        marked, is_value, is_over = list[tuple[str, bool]](), False, False
        for word in words:
            is_option = word[:1] == "-" and word != "-" and not is_value and not is_over
            marked.append((word, is_option))
            is_over = is_over or (is_option and word == "--")
            is_value = is_option and word in with_value
            if is_option and word[:2] != "--":  # letters: -qp TEXT has a value, -qpTEXT includes it
                ends = (end for end, char in enumerate(word[1:], 2) if f"-{char}" in with_value)
                is_value = next(ends, None) == len(word)
        return marked

    def get_help_option(self, ctx: Any) -> Any:
        """Return the option --help, which no variable can set."""
        found = super().get_help_option(ctx)
        if found is not None:
            found.allow_from_autoenv = False
            found.help = f"Show {'the common options' if self.common else 'this page'}."
        return found

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse `args`; errors get the context of the command."""
        if self.respell is not None:
            marked = self.mark_options(args)
            args = [
                part
                for word, is_option in marked
                for part in (self.respell(word) if is_option else [word])
            ]
        try:
            return super().parse_args(ctx, args)
        except UsageError as error:
            error.ctx = error.ctx or ctx
            raise

    def format_options(self, ctx: Any, formatter: Any) -> None:
        is_whole = self._is_whole(ctx)
        sections: dict[str, list[tuple[str, str]]] = {"Arguments": []}
        sections |= {panel: [] for panel in _FIRST_PANELS}
        params: list[Any] = self.get_params(ctx)
        for param in sorted(params, key=lambda p: getattr(p, "rich_help_panel", None) != INPUT):
            title = "Options"
            if param.param_type_name == "argument":
                title = "Arguments"
            elif param.hidden or not (
                is_whole or param.required or param.name in {*self.common, "help", _HELP_ALL}
            ):
                continue
            elif is_whole:
                title = param.rich_help_panel or title
            sections.setdefault(title, []).append(_row(param, ctx))
        sections["Options"] = sections.pop("Options")  # --help comes last
        below = f"{ctx.info_name} "
        names = [
            (n.removeprefix(below), text) for n, text in COMMANDS.items() if n.startswith(below)
        ]
        sections["Commands"] = names
        for title, rows in sections.items():
            if rows:
                with formatter.section(title):
                    formatter.write_dl(rows, col_max=22)

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        if self.examples:
            formatter.write("\nExamples:\n")
            formatter.write("".join(f"  {each}\n" for each in self.examples))
        for note in self.notes if self._is_whole(ctx) else ():
            formatter.write_paragraph()
            formatter.write_text(note)
        formatter.write_paragraph()
        formatter.write_text(f"More: batchdecode help {ctx.info_name}")

    def get_help(self, ctx: Any) -> str:
        """Return the page without line breaks in names of options."""
        return super().get_help(ctx).replace("\N{NON-BREAKING HYPHEN}", "-")

    def _is_whole(self, ctx: Any) -> bool:
        return _HELP_ALL in ctx.meta or not self.common


def _row(param: Any, ctx: Any) -> tuple[str, str]:
    """Return the name of a parameter in help, and its text with default and range."""
    text, _, written = param.help.partition("  [")
    facts = [written.removesuffix("]")] if written else []
    names = ", ".join(sorted(param.opts, key=len))
    if param.param_type_name == "argument":
        return param.metavar, text
    default = param.get_default(ctx, call=False)
    if not param.is_flag and param.show_default and default is not None:
        facts.append(
            f"default: {default:g}" if isinstance(default, float) else f"default: {default}"
        )
    if isinstance(param.type, Value) and param.type.range:
        facts.append(param.type.range)
    if param.required:
        facts.append("required")
    text = f"{text}  [{'; '.join(facts)}]" if facts else text
    return (
        names if param.is_flag else f"{names} {param.metavar}",
        text.replace("-", "\N{NON-BREAKING HYPHEN}"),
    )


def command(
    function: Callable[..., int | None],
    record: type | None = None,
    *,
    examples: Sequence[str] = (),
    notes: Sequence[str] = (),
    respell: Callable[[str], list[str]] | None = None,
    takes_dashes: bool = False,
) -> Command:
    """Return the command that calls `function`, which returns the exit status.

    record: a dataclass of the options, for a function that takes one; else they are its parameters.
    takes_dashes: an unknown option is an argument.

    The fields model_settings, llm_settings, transformer_settings, hf_settings and server_settings
    get sections of --config.  The field preset gets the names of the options that the environment
    or --config sets, unless the line sets them as well.
    """
    declared = list(_declared(record or function))
    options = {name: option for name, _, _, option in declared}
    groups = {name: each for name, each in options.items() if isinstance(each, OptionGroup)}
    arguments = [name for name, each in options.items() if isinstance(each, ArgumentInfo)]
    parameters = list(_parameters(declared))

    def carry_out(context: typer.Context, **given: Any) -> None:
        inputs = [*arguments, "prompt", "prompts"]
        if "input" in arguments and os.isatty(0) and not any(given.get(name) for name in inputs):
            typer.echo(context.get_help(), err=True)  # no input was given
            raise typer.Exit(2)
        if "preset" in options:
            sources = {name: context.get_parameter_source(name) for name in given}
            preset = {name for name, source in sources.items() if source and source.name in _PRESET}
            given["preset"] = preset
        for own, group in groups.items():
            values = {name: given.pop(name) for name in group.kinds}
            given[own] = group.read({n: v for n, v in values.items() if v is not None})
        if "model_settings" in options and given["config"] is not None:
            sections = model_settings(given["config"])
            given |= {name: value for name, value in sections.items() if name in options}
        gc.freeze()  # imported objects are never collected
        gc.enable()
        raise typer.Exit((function(**given) if record is None else function(record(**given))) or 0)

    context = Parameter("context", Parameter.POSITIONAL_OR_KEYWORD, annotation=typer.Context)
    carry_out.__signature__ = Signature([context, *parameters])  # type: ignore[attr-defined]
    carry_out.__doc__, carry_out.__name__ = function.__doc__, function.__name__
    app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
    settings = {
        "auto_envvar_prefix": PREFIX.rstrip("_"),
        "help_option_names": ["-h", "--help"],
        "ignore_unknown_options": takes_dashes,
        "max_content_width": 100,
    }
    app.command(cls=Command, context_settings=settings)(carry_out)
    made: Any = typer.main.get_command(app)
    for param in made.params:
        if isinstance(param.type, _CHECKED) or hasattr(param.type, "choices"):
            param.type = Value(param.type)
    infos = {parameter.name: get_args(parameter.annotation)[1] for parameter in parameters}
    made.common = frozenset(n for n, info in infos.items() if getattr(info, "is_common", False))
    if made.common:
        made.params.append(
            TyperOption(
                param_decls=[_HELP_ALL, "--help-all"],
                is_flag=True,
                is_eager=True,
                expose_value=False,
                allow_from_autoenv=False,
                callback=_show_all,
                help="Show all options, grouped.",
                show_default=False,
            )
        )
    made.examples, made.notes, made.respell = examples, notes, respell
    return made  # type: ignore[no-any-return]


def _show_all(ctx: Any, param: Any, value: bool) -> None:  # noqa: ARG001, FBT001 - typer calls it so
    if value and not ctx.resilient_parsing:
        ctx.meta[_HELP_ALL] = True
        typer.echo(ctx.get_help())
        ctx.exit()


def _declared(made: Any) -> Iterator[tuple[str, Any, Any, Any]]:
    """Yield the name, type, default and option of each field of a dataclass, or parameter.

    The option may be an argument or a group; other fields have None.
    """
    if is_dataclass(made):
        for each in fields(made):
            default = Parameter.empty if each.default is MISSING else each.default
            yield each.name, each.type, default, each.metadata.get(_OPTION)
        return
    for name, parameter in signature(made).parameters.items():
        kind, option = get_args(parameter.annotation)
        yield name, kind, parameter.default, option.metadata[_OPTION]


def _parameters(declared: Iterable[tuple[str, Any, Any, Any]]) -> Iterator[Parameter]:
    """Yield the parameters for typer, with those of groups."""
    for each in declared:
        found = [each]
        if isinstance(each[-1], OptionGroup):
            kinds = each[-1].kinds.items()
            found = [(name, kind, None, made.metadata[_OPTION]) for name, (kind, made) in kinds]
        for name, kind, default, declared_option in found:
            info = copy(declared_option)
            if isinstance(info, OptionInfo):
                flags = info.param_decls or ()
                if not any(flag.startswith("--") for flag in flags):
                    info.param_decls = (f"--{name.replace('_', '-')}", *flags)
            if info is not None:
                made: Any = Annotated[kind, info]
                yield Parameter(name, Parameter.KEYWORD_ONLY, default=default, annotation=made)
