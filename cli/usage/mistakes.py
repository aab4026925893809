"""What is said of a command line that is wrong: what, what is allowed, and what may be meant."""

import re
import shlex
from collections.abc import Iterator, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from typer._click import exceptions

from batcher.request import Request
from batcher.requests.suggestions import own_name

from ..environment import variable_of
from ..screen.terminal import listed
from .other_names import name_here

_READING_REQUESTS = {"run", "check"}
_SEVERAL = {
    **dict.fromkeys(_READING_REQUESTS, "several INPUTs"),  # they make one input together
    "trace": "two runs in step: batchdecode trace diff A B; of several files of requests as one",
}
_EXTRA = re.compile(r"Got unexpected extra argument\(s\) \((.*)\)", re.DOTALL)
_FROM_ENVIRONMENT = "ENVIRONMENT"
_ALIKE = 0.7  # how alike a command or an option of the command has to be
_CLOSE = 0.75  # how alike an option of another command has to be
_MAX_COMMANDS = 3  # that have an option, named in a message


def describe(error: exceptions.UsageError, line: Sequence[str]) -> str:
    """Return what is wrong, in a sentence; the page that helps is named in a second line.

    line: the whole command line, in which an option may have one dash too few.
    """
    context: Any = error.ctx
    see = "" if context is None else f"\n(see {context.command_path} --help)"
    dashed = None if context is None else _with_one_dash(line, context)
    if dashed is not None:
        return f"{context.command_path} has no option {dashed}; did you mean -{dashed}?{see}"
    if isinstance(error, exceptions.BadParameter) and not isinstance(
        error, exceptions.MissingParameter
    ):
        return f"{_given(error.param, context)} {error.message}".lstrip()
    return f"{_sentence(error, context)}{see}"


def unknown_command(name: str, known: Sequence[str]) -> str:
    """Return what is said of a command that is none."""
    near = get_close_matches(name, known, n=1, cutoff=_ALIKE)
    hint = f"; did you mean {near[0]}?" if near else f" (known: {', '.join(known)})"
    if Path(name).is_file():
        hint = f"; did you mean: batchdecode run {shlex.quote(name)}?"
    return f"no command {name!r}{hint}"


def _sentence(error: exceptions.UsageError, context: Any) -> str:
    if context is None:
        return _lowered(error.message)
    command = context.command_path
    if isinstance(error, exceptions.NoSuchOption):
        return f"{command} has no option {error.option_name}{_alike(error.option_name, context)}"
    if isinstance(error, exceptions.MissingParameter):
        return f"{command} needs {_named(error.param)}"
    if isinstance(error, exceptions.BadOptionUsage):
        for param in context.command.get_params(context):
            if error.option_name in param.opts:
                wanted = "takes no value" if param.is_flag else f"needs a value, {param.metavar}"
                return f"{error.option_name} {wanted}"
    extra = _EXTRA.fullmatch(error.message)
    if extra is not None:
        several = _SEVERAL.get(context.info_name)
        hint = f"; of {several}: cat FILE ... | {command} -" if several else ""
        own = [p.metavar for p in context.command.params if p.param_type_name == "argument"]
        takes = f"takes {listed(own, 'and')} alone" if own else "takes no arguments"
        return f"{command} {takes}, not {extra[1]}{' as well' if own else ''}{hint}"
    return _lowered(error.message)


def _with_one_dash(line: Sequence[str], context: Any) -> str | None:
    """Return the first option of the line that would be one of the command with another dash."""
    own = {opt for param in context.command.get_params(context) for opt in param.opts}
    given = (argument.partition("=")[0] for argument in line)
    return next((name for name in given if name[:2] != "--" and f"-{name}" in own), None)


def _lowered(message: str) -> str:
    return message[0].lower() + message[1:].removesuffix(".")


def _given(param: Any, context: Any) -> str:
    """Return where a value was given: an option, an argument or a variable; empty for nowhere."""
    if param is None:
        return ""
    source = context.get_parameter_source(param.name)
    if source is not None and source.name == _FROM_ENVIRONMENT:
        return variable_of(param.name)
    return _named(param).partition(" ")[0]


def _named(param: Any) -> str:
    is_option = param.param_type_name == "option"
    return f"{max(param.opts, key=len)} {param.metavar}" if is_option else f"{param.metavar}"


def _alike(name: str, context: Any) -> str:
    """Return the end of a message: the option that may be meant, and the commands that have it."""
    own = [opt for param in context.command.get_params(context) for opt in param.opts]
    meant = name_here(name) or name
    option = meant.partition(" ")[0]
    if option in own:
        return f"; here it is {meant}"
    field = own_name(name.removeprefix("--").replace("-", "_"), Request.__struct_fields__)
    if field is not None and f"--{field.replace('_', '-')}" in own:
        return f"; here it is --{field.replace('_', '-')}"
    if field is not None and context.info_name in _READING_REQUESTS:
        return f'; each request says it: {{"{field}": ...}}'
    elsewhere: dict[str, list[str]] = {}
    for command, opt in _options_of_all(context.find_root()):
        elsewhere.setdefault(opt, []).append(command)
    found = _nearest(option, [*own, *elsewhere], _ALIKE)  # of equals the own one goes first
    if found not in own:
        found = _nearest(option, list(elsewhere), _CLOSE)
    if found in own:
        return f"; did you mean {found}?"
    commands = elsewhere.get(found, [])
    if not commands:
        return ""
    if len(commands) > _MAX_COMMANDS:
        commands = [*commands[: _MAX_COMMANDS - 1], "others"]
    have = "has" if len(commands) == 1 else "have"
    return f"; {listed(commands, 'and')} {have} {'it' if found == name else found}"


def _nearest(option: str, known: Sequence[str], cutoff: float) -> str:
    """Return the option most like `option`, apart from its dashes; itself if none is."""
    names = {opt.removeprefix("--"): opt for opt in reversed(known)}
    near = get_close_matches(option.removeprefix("--"), names, n=1, cutoff=cutoff)
    return names[near[0]] if near else option


def _options_of_all(root: Any) -> Iterator[tuple[str, str]]:
    """Yield the name of each command and of each option that it has."""
    for name in root.command.list_commands(root):
        command = root.command.get_command(root, name)
        below = getattr(command, "subcommands", {})
        for full_name, each in [(name, command), *((f"{name} {n}", c) for n, c in below.items())]:
            for param in each.params:
                if param.param_type_name == "option" and not param.hidden:
                    yield from ((full_name, opt) for opt in param.opts)
