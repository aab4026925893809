"""Settings of --config FILE.yaml: they go below flags and environment, and above the defaults.

Rule: nothing in the file is ignored; a key that is no option is an error.
"""

from collections.abc import Sequence
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any

import typer

from .config_file import MODEL_SECTIONS, ConfigError, Setting, read_settings
from .scheduling_options import NAMES as SCHEDULING_NAMES

if TYPE_CHECKING:
    from msgspec import Struct

ENVIRONMENT = {"auto_envvar_prefix": "BATCHDECODE"}
_COMMANDS = ("run", "check")  # those whose options a file may set
_OF_REQUESTS = {"batch", "model", "seed", "keep_going"} | SCHEDULING_NAMES
_NOT_IN_A_FILE = {"config", "help"}
_KINDS: dict[str, tuple[tuple[type, ...], str]] = {
    "boolean": ((bool,), "true or false"),
    "int": ((int,), "a whole number"),
    "int range": ((int,), "a whole number"),
    "float range": ((int, float), "a number"),
}
_TEXT_KIND = (str,), "text, in quotes if need be"


def use_config(context: typer.Context, path: str | None) -> str | None:
    """Take the defaults of a command's options from the file `path`; the callback of --config.

    Raises:
        ConfigError: the file cannot be read, or says something that is no option.
    """
    if path is None or context.resilient_parsing:
        return path
    options = {option.name: option for option in context.command.params}
    known = _known_options(context)
    defaults = {}
    for place, key, written in read_settings(path):
        name = key.replace("-", "_")
        if key in MODEL_SECTIONS:
            continue
        if name not in known:
            names = {name.replace("_", "-") for name in known}.union(MODEL_SECTIONS)
            raise ConfigError(f"{place}: {_unknown(key, sorted(names))}")
        types, expected = _KINDS.get(known[name].type.name, _TEXT_KIND)
        value = _in_words(known[name], written)
        if value is not None and type(value) not in types:  # True is no number here
            raise ConfigError(f"{place}: {key}: expected {expected}")
        if name in options:
            try:
                options[name].process_value(context, value)
            except typer.BadParameter as error:
                raise ConfigError(f"{place}: {key}: {error.message}") from None
            defaults[name] = value
    context.default_map = defaults
    return path


def _in_words(option: Any, value: Any) -> Any:
    """Return a value as `option` takes it: on and off, which are booleans in YAML, as words."""
    if isinstance(value, bool) and "on" in getattr(option.type, "choices", ()):
        return "on" if value else "off"
    return value


def use_run_config(context: typer.Context, path: str | None) -> str | None:
    """Take from the file `path` only how requests are run: its --output is not that of a view.

    Raises:
        ConfigError: see use_config.
    """
    use_config(context, path)
    defaults = context.default_map or {}
    context.default_map = {name: defaults[name] for name in defaults.keys() & _OF_REQUESTS}
    return path


def model_settings(path: str | None, section: str) -> dict[str, Any]:
    """Return what a section of the file `path`, one of MODEL_SECTIONS, holds; {} if it has none.

    Raises:
        ConfigError: the file cannot be read, or the section is not one of its settings.
    """
    for place, key, value in read_settings(path) if path else ():
        if key == section and value is not None:
            if not isinstance(value, list):
                raise ConfigError(
                    f"{place}: {key}: its settings belong below it, each with a value"
                )
            return _checked(value, _record_of(section))
    return {}


def _record_of(section: str) -> type["Struct"]:
    """Return the record whose fields are the settings of a section."""
    if section == "llm":
        from batcher.models.calls import CallSettings  # noqa: PLC0415 - only for what uses it

        return CallSettings
    from batcher.models.simulated import SimulatedSettings  # noqa: PLC0415 - with it comes numpy

    return SimulatedSettings


def _checked(settings: list[Setting], record: type["Struct"]) -> dict[str, Any]:
    """Return `settings` as a dict.

    Raises:
        ConfigError: one is no field of `record`, or not what such a field can be.
    """
    import msgspec  # noqa: PLC0415 - only when there is a section

    types = {field.name: field.type for field in msgspec.structs.fields(record)}
    for place, key, value in settings:
        if key not in types:
            raise ConfigError(f"{place}: {_unknown(key, sorted(types))}")
        try:
            msgspec.convert(value, types[key])
        except msgspec.ValidationError as error:
            raise ConfigError(f"{place}: {key}: e{str(error)[1:]}") from None
    return {setting.key: setting.value for setting in settings}


def _known_options(context: typer.Context) -> dict[str, Any]:
    """Return all options a file may set, of any command, for one file may serve them all."""
    group: Any = context.find_root().command
    return {
        param.name: param
        for name in _COMMANDS
        for param in group.get_command(context, name).params
        if param.param_type_name == "option"
        and not param.hidden
        and param.name not in _NOT_IN_A_FILE
    }


def _unknown(key: str, known: Sequence[str]) -> str:
    near = get_close_matches(key, known, n=1)
    hint = f"; did you mean {near[0]}?" if near else ""
    return f"unknown setting {key}{hint} (known: {', '.join(known)})"
