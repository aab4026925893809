"""Settings from --config FILE.yaml: they go below flags and environment, and above the defaults.

Rule: nothing in the file is ignored; a key that is no option is an error.
"""

from collections.abc import Mapping
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import typer

from batcher.errors import BatchdecodeError

ENVIRONMENT = {"auto_envvar_prefix": "BATCHDECODE"}
MODEL_SECTION = "simulated"
_COMMANDS = ("run", "check")  # those whose options a file may set
_OF_REQUESTS = {"batch", "model", "seed", "keep_going"}
_NOT_IN_A_FILE = {"config", "help"}


class ConfigError(BatchdecodeError):
    """A configuration file that cannot be used."""


class _Setting(NamedTuple):
    """One key of the file: its place, for messages, and its value."""

    place: str
    key: str
    value: Any


def use_config(context: typer.Context, path: str | None) -> str | None:
    """Take the defaults of a command's options from the file `path`; the callback of --config.

    Raises:
        ConfigError: the file cannot be read, or says something that is no option.
    """
    if path is None or context.resilient_parsing:
        return path
    options = {option.name: option for option in context.command.params}
    known = _known_names(context)
    defaults = {}
    for place, key, value in _read(path):
        name = key.replace("-", "_")
        if key == MODEL_SECTION:
            continue
        if name not in known:
            raise ConfigError(f"{place}: {_unknown(key, known)}")
        if name in options:
            try:
                options[name].process_value(context, value)
            except typer.BadParameter as error:
                raise ConfigError(f"{place}: {key}: {error.message}") from None
            defaults[name] = value
    context.default_map = defaults
    return path


def use_run_config(context: typer.Context, path: str | None) -> str | None:
    """Take from the file `path` only how requests are run: its --output is not that of a view.

    Raises:
        ConfigError: see use_config.
    """
    use_config(context, path)
    defaults = context.default_map or {}
    context.default_map = {name: defaults[name] for name in defaults.keys() & _OF_REQUESTS}
    return path


def model_settings(path: str | None) -> dict[str, Any]:
    """Return the settings of the simulated model that the file `path` gives.

    Raises:
        ConfigError: the file cannot be read, or the section is no mapping.
    """
    for place, key, value in _read(path) if path else ():
        if key == MODEL_SECTION and value is not None:
            if not isinstance(value, Mapping):
                raise ConfigError(
                    f"{place}: {key}: its settings belong below it, each with a value"
                )
            return dict(value)
    return {}


@cache
def _read(path: str) -> list[_Setting]:
    """Return what the file says at its top level.

    Raises:
        ConfigError: it cannot be read, or is not YAML, or no mapping.
    """
    import yaml  # noqa: PLC0415 - only when there is a file

    try:
        loader = yaml.SafeLoader(Path(path).read_text("utf-8-sig"))
        node = loader.get_single_node()
        values = loader.construct_document(node) if node is not None else {}
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = f"{path}:{mark.line + 1}:{mark.column + 1}" if mark else path
        raise ConfigError(f"{place}: {error.problem}") from None
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise ConfigError(f"cannot read {path}: {reason}") from None
    if not isinstance(values, dict):
        raise ConfigError(f"{path}: not a list of settings, `name: value` on each line")
    marks = {key.value: key.start_mark for key, _ in node.value} if node is not None else {}
    return [
        _Setting(f"{path}:{marks[key].line + 1}:{marks[key].column + 1}", str(key), value)
        for key, value in values.items()
    ]


def _known_names(context: typer.Context) -> set[str]:
    """Return all options a file may set, of any command, for one file may serve them all."""
    commands = getattr(context.find_root().command, "commands", {})
    return {
        param.name
        for name in _COMMANDS
        for param in commands[name].params
        if param.param_type_name == "option" and param.name not in _NOT_IN_A_FILE
    }


def _unknown(key: str, known: set[str]) -> str:
    names = sorted({name.replace("_", "-") for name in known} | {MODEL_SECTION})
    near = get_close_matches(key.replace("_", "-"), names, n=1)
    hint = f"; did you mean {near[0]}?" if near else ""
    return f"unknown setting {key}{hint} (known: {', '.join(names)})"
