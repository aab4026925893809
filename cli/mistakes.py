"""Errors about a command line: what is wrong, what is allowed, and what may be meant."""

import os
import re
import shlex
from collections.abc import Iterator, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from typer._click import exceptions

from batcher.request import Request
from batcher.requests.openai import own_name

from .command import PREFIX
from .commands import COMMANDS, all_options, command_of
from .config import name_here
from .screen.terminal import listed

_READING_REQUESTS = {"run", "check"}
_SEVERAL = {
    **dict.fromkeys(_READING_REQUESTS, "several INPUTs"),  # they make one input together
    "trace": "two runs in step: batchdecode trace diff A B; of several files of requests as one",
}
_REMOVED = {
    "--ranks": "--replicas",
    "--kv-offload-blocks": "more --kv-blocks",
    "--draft-model": "the --kv-blocks that a draft model leaves",
}
_EXTRA = re.compile(r"Got unexpected extra argument\(s\) \((.*)\)", re.DOTALL)
_ALIKE = 0.7  # how alike a command or an option of the command has to be
_CLOSE = 0.75  # how alike an option of another command has to be
_MAX_COMMANDS = 3  # that have an option, named in a message


def describe(error: exceptions.UsageError, line: Sequence[str]) -> str:
    """Return what is wrong, in a sentence, and where to read on in a second line.

    line: the whole command line, in which an option may have one dash too few.
    """
    context: Any = error.ctx
    if context is None:
        return _lowered(error.message)
    path, see = context.command_path, f"\n(see {context.command_path} --help)"
    own = [opt for param in context.command.get_params(context) for opt in param.opts]
    given = (argument.partition("=")[0] for argument in line)
    dashed = next((name for name in given if name[:2] != "--" and f"-{name}" in own), None)
    if dashed is not None:
        return f"{path} has no option {dashed}; did you mean -{dashed}?{see}"
    if isinstance(error, exceptions.MissingParameter):
        return f"{path} needs {_named(error.param)}{see}"
    if isinstance(error, exceptions.BadParameter):
        name, param = "", error.param
        if param is not None and param.name is not None:
            source = context.get_parameter_source(param.name)
            is_variable = source is not None and source.name == "ENVIRONMENT"
            name = f"{PREFIX}{param.name.upper()}" if is_variable else _named(param).split()[0]
            for letter in (opt for opt in param.opts if opt[:2] != "--"):
                value = next((a[3:] for a in line if a.startswith(f"{letter}=")), None)
                if value is not None:
                    return f"{letter}={value}: write {letter} {value} or {name}={value}{see}"
        return f"{name} {error.message}".lstrip()
    if isinstance(error, exceptions.NoSuchOption):
        return f"{path} has no option {error.option_name}{_alike(error.option_name, context)}{see}"
    if isinstance(error, exceptions.BadOptionUsage):
        for param in context.command.get_params(context):
            if error.option_name in param.opts:
                wanted = "takes no value" if param.is_flag else f"needs a value, {param.metavar}"
                return f"{error.option_name} {wanted}{see}"
    extra = _EXTRA.fullmatch(error.message)
    if extra is None:
        return f"{_lowered(error.message)}{see}"
    several = _SEVERAL.get(context.info_name)
    hint = f"; of {several}: cat FILE ... | {path} -" if several else ""
    names = [p.metavar for p in context.command.params if p.param_type_name == "argument"]
    takes = f"takes {listed(names, 'and')} alone" if names else "takes no arguments"
    return f"{path} {takes}, not {extra[1]}{' as well' if names else ''}{hint}{see}"


def unknown_command(name: str, known: Sequence[str]) -> str:
    near = [each for each in known if each.startswith(f"{name} ")]
    near = near or get_close_matches(name, known, n=1, cutoff=_ALIKE)
    hint = f"; did you mean {near[0]}?" if near else f" (known: {', '.join(known)})"
    if Path(name).is_file():
        hint = f"; did you mean: batchdecode run {shlex.quote(name)}?"
    return f"no command {name!r}{hint}"


def unknown_variables(line: Sequence[str]) -> Iterator[str]:
    """Yield a warning for each variable of ours that sets no option of any command.

    The other commands are imported only if a variable sets no option of the one in `line`.
    """
    name = next((n for n in (" ".join(line[:2]), line[0]) if n in COMMANDS), None)
    params = [] if name is None else command_of(name).params
    own = {p.name.upper() for p in params if p.expose_value and p.param_type_name == "option"}
    given = sorted(name.removeprefix(PREFIX) for name in os.environ if name.startswith(PREFIX))
    if own.issuperset(given):
        return
    options = sorted({param.name.upper() for _, param in all_options()})
    for option in given:  # arguments have no variable
        if option not in options:
            near = get_close_matches(option, options, n=1)
            hint = f"; did you mean {PREFIX}{near[0]}?" if near else ""
            yield f"{PREFIX}{option} in the environment is no option of any command{hint}"


def _lowered(message: str) -> str:
    return message[0].lower() + message[1:].removesuffix(".")


def _named(param: Any) -> str:
    is_option = param.param_type_name == "option"
    return f"{max(param.opts, key=len)} {param.metavar}" if is_option else f"{param.metavar}"


def _alike(name: str, context: Any) -> str:
    """Return the end of a message: the option that may be meant, and the commands that have it."""
    own = [opt for param in context.command.get_params(context) for opt in param.opts]
    if name.startswith("--no-") and f"--{name.removeprefix('--no-')}" in own:
        return f"; leave out --{name.removeprefix('--no-')}"
    meant = name_here(name) or name
    option = meant.partition(" ")[0]
    if option in own:
        return f"; here it is {meant}"
    if name in _REMOVED and "--replicas" in own:
        return f", which was removed; use {_REMOVED[name]}"
    arguments = [p for p in context.command.params if p.param_type_name == "argument"]
    if any(name == f"--{param.name}" for param in arguments):
        return f"; give it without an option: {context.command_path} FILE"
    field = own_name(name.removeprefix("--").replace("-", "_"), Request.__struct_fields__)
    if field is not None and f"--{field.replace('_', '-')}" in own:
        return f"; here it is --{field.replace('_', '-')}"
    if field is not None and context.info_name in _READING_REQUESTS:
        return f'; each request says it: {{"{field}": ...}}'
    elsewhere: dict[str, list[str]] = {}
    for command, param in all_options():
        for opt in param.opts:
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
    names = {opt.removeprefix("--"): opt for opt in reversed(known)}
    near = get_close_matches(option.removeprefix("--"), names, n=1, cutoff=cutoff)
    return names[near[0]] if near else option
