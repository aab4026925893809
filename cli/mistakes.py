"""Error messages for command lines: what is wrong, what is allowed, and what you may have meant."""

import os
import re
import shlex
from collections.abc import Iterator, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from typer._click import exceptions

from batcher.request import Request
from batcher.requests.validation import own_name

from .command import PREFIX
from .commands import COMMANDS, all_options, command_of
from .config import name_here
from .screen.terminal import listed

_READING_REQUESTS = {"run", "check"}
_EXTRA = re.compile(r"Got unexpected extra argument\(s\) \((.*)\)", re.DOTALL)
_ALIKE = 0.7  # similarity of a command, or of an option of the command
_CLOSE = 0.75  # similarity of an option of another command
_MAX_COMMANDS = 3  # that a message names


def describe(error: exceptions.UsageError, line: Sequence[str]) -> str:
    """Return one sentence about the error, and where to read more in a second line.

    line: the whole command line.
    """
    context: Any = error.ctx
    if context is None:
        return _lowered(error.message)
    path, see = context.command_path, f"\n(see {context.command_path} --help)"
    params = context.command.get_params(context)
    own = [opt for param in params for opt in param.opts]
    given = (argument.partition("=")[0] for argument in line)
    dashed = next((name for name in given if name[:2] != "--" and f"-{name}" in own), None)
    if dashed is not None:
        return f"{path} has no option {dashed}; did you mean -{dashed}?{see}"
    match error:
        case exceptions.MissingParameter():
            return f"{path} needs {_named(error.param)}{see}"
        case exceptions.BadParameter():
            name = ""
            if error.param is not None and error.param.name is not None:
                name = _named(error.param).split()[0]
                source = context.get_parameter_source(error.param.name)
                if source is not None and source.name == "ENVIRONMENT":
                    name = f"{PREFIX}{error.param.name.upper()}"
            return f"{name} {error.message}".lstrip()
        case exceptions.NoSuchOption():
            alike = _alike(error.option_name, context, own)
            return f"{path} has no option {error.option_name}{alike}{see}"
        case exceptions.BadOptionUsage():
            for param in params:
                if error.option_name in param.opts:
                    wanted = f"needs a value, {param.metavar}"
                    wanted = "takes no value" if param.is_flag else wanted
                    return f"{error.option_name} {wanted}{see}"
        case _:
            pass
    extra = _EXTRA.fullmatch(error.message)
    if extra is None:
        return f"{_lowered(error.message)}{see}"
    hint = ""
    if context.info_name == "trace":
        hint = "; to compare two runs: batchdecode trace diff A B; for several files of requests"
        hint += f": cat FILE ... | {path} -"
    names = [param.metavar for param in params if param.param_type_name == "argument"]
    takes = f"takes only {listed(names, 'and')}" if names else "takes no arguments"
    return f"{path} {takes}, not {extra[1]}{hint}{see}"


def unknown_command(name: str, known: Sequence[str]) -> str:
    near = [each for each in known if each.startswith(f"{name} ")]
    near = near or get_close_matches(name, known, n=1, cutoff=_ALIKE)
    hint = f"; did you mean {near[0]}?" if near else f" (known: {', '.join(known)})"
    if Path(name).is_file():
        hint = f"; did you mean: batchdecode run {shlex.quote(name)}?"
    return f"no command {name!r}{hint}"


def unknown_variables(line: Sequence[str]) -> Iterator[str]:
    """Yield a warning for each BATCHDECODE_ variable that sets no option of any command.

    Other commands are imported only for a variable that the command in `line` does not know.
    """
    name = next((n for n in (" ".join(line[:2]), line[0]) if n in COMMANDS), None)
    params = [] if name is None else command_of(name).params
    own = {
        p.name.upper()
        for p in params
        if p.expose_value and p.param_type_name == "option" and p.allow_from_autoenv
    }
    given = sorted(name.removeprefix(PREFIX) for name in os.environ if name.startswith(PREFIX))
    if own.issuperset(given):
        return
    options = sorted({p.name.upper() for _, p in all_options() if p.allow_from_autoenv})
    for option in given:
        if option in {"PROMPT", "PROMPTS"}:
            yield f"{PREFIX}{option} in the environment has no effect: use --{option.lower()}"
        elif option not in options:
            near = get_close_matches(option, options, n=1)
            hint = f"; did you mean {PREFIX}{near[0]}?" if near else ""
            yield f"{PREFIX}{option} in the environment is not an option of any command{hint}"


def _lowered(message: str) -> str:
    return message[0].lower() + message[1:].removesuffix(".")


def _named(param: Any) -> str:
    is_option = param.param_type_name == "option"
    return f"{max(param.opts, key=len)} {param.metavar}" if is_option else f"{param.metavar}"


def _alike(name: str, context: Any, own: Sequence[str]) -> str:
    """Return the end of a message: a similar option, and the commands that have it."""
    if name.startswith("--no-") and f"--{name.removeprefix('--no-')}" in own:
        return f"; leave out --{name.removeprefix('--no-')}"
    meant = name_here(name) or name
    option = meant.partition(" ")[0]
    if option in own:
        return f"; use {meant}"
    arguments = [p for p in context.command.params if p.param_type_name == "argument"]
    if any(name == f"--{param.name}" for param in arguments):
        return f"; write the file without an option: {context.command_path} FILE"
    field = own_name(name.removeprefix("--").replace("-", "_"), Request.__struct_fields__)
    if field is not None and f"--{field.replace('_', '-')}" in own:
        return f"; use --{field.replace('_', '-')}"
    if field is not None and context.info_name in _READING_REQUESTS:
        return f'; set it as a field of each request: {{"{field}": ...}}'
    commands: dict[str, list[str]] = {opt: [] for opt in own}
    for command, param in all_options():
        for opt in param.opts:
            commands.setdefault(opt, []).append(command)
    names = {opt.removeprefix("--"): opt for opt in reversed(commands)}  # own options come first
    for cutoff in (_ALIKE, _CLOSE):
        near = get_close_matches(option.removeprefix("--"), names, n=1, cutoff=cutoff)
        found = names[near[0]] if near else option
        if found in own:
            return f"; did you mean {found}?"
        names = {opt.removeprefix("--"): opt for opt in commands if opt not in own}
    having = commands.get(found, [])
    if not having:
        return ""
    if len(having) > _MAX_COMMANDS:
        having = [*having[: _MAX_COMMANDS - 1], "others"]
    verb = "has" if len(having) == 1 else "have"
    return f"; {listed(having, 'and')} {verb} {'it' if found == name else found}"
