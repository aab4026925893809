"""Settings of --config FILE.yaml: they go below flags and environment, and above the defaults.

Rule: nothing in the file is ignored; a key that is no option is an error, and so is what may have
been meant in another way.  The file is a flat mapping, read with the place of everything in it.
"""

from collections.abc import Iterator, Sequence
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple, get_args, get_origin

from batcher.errors import BatchdecodeError
from batcher.hf.settings import LOADING_SETTINGS
from batcher.settings import SETTINGS
from batcher.speculation.settings import SPECULATION_SETTINGS

from .errors import reason_of

if TYPE_CHECKING:
    import yaml
    from msgspec import Struct

_COMMANDS = ("run", "check")  # those whose options a file may set
OF_MODELS = {"model", "chat", *LOADING_SETTINGS}
OF_SCHEDULING = {*SETTINGS, *SPECULATION_SETTINGS, "check", "profile", "kv_memory"}
OF_REQUESTS = {"batch", "seed", "keep_going", *OF_MODELS, *OF_SCHEDULING}
_NOT_IN_A_FILE = {"config", "help"}
_KINDS: dict[str, tuple[tuple[type, ...], str]] = {
    "boolean": ((bool,), "true or false"),
    "int": ((int,), "a whole number"),
    "int range": ((int,), "a whole number"),
    "float range": ((int, float), "a number"),
}
_TEXT_KIND = (str,), "text, in quotes if need be"
# The sections of models: the field of a command's record, and the record of their settings.
MODEL_SECTIONS = {
    "simulated": ("model_settings", "batcher.models.simulated", "SimulatedSettings"),
    "llm": ("llm_settings", "batcher.models.calls", "CallSettings"),
    "server": ("server_settings", "batcher.remote.settings", "ServerSettings"),
    "transformer": ("transformer_settings", "batcher.transformer.settings", "TransformerSettings"),
    "hf": ("hf_settings", "batcher.hf.settings", "HFSettings"),
}
_TEXT_TAG = "tag:yaml.org,2002:str"


class ConfigError(BatchdecodeError):
    """A configuration file that cannot be used."""


class FileSetting(NamedTuple):
    """One key of the file: its place, for messages, and its value; a section's are settings."""

    place: str
    key: str
    value: Any


def defaults_in(path: str, context: Any) -> dict[str, Any]:
    """Return what the file `path` says of the options of the command of `context`, by their names.

    Raises:
        ConfigError: the file cannot be read, or says something that is no option.
    """
    from typer import BadParameter  # noqa: PLC0415 - only when there is a file

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
        value = written
        if isinstance(written, bool) and "on" in getattr(known[name].type, "choices", ()):
            value = "on" if written else "off"  # which are booleans in YAML
        if value is not None and type(value) not in types:  # True is no number here
            raise ConfigError(f"{place}: {key}: expected {expected}")
        if name in options:
            try:
                options[name].process_value(context, value)
            except BadParameter as error:
                raise ConfigError(f"{place}: {key}: {error.message}") from None
            defaults[name] = value
    return defaults


def model_settings(path: str) -> dict[str, dict[str, Any]]:
    """Return what the file `path` holds for models, as the fields of a command's record have it.

    Raises:
        ConfigError: the file cannot be read, or a section is not one of its settings.
    """
    found: dict[str, dict[str, Any]] = {}
    for place, key, value in read_settings(path):
        if key in MODEL_SECTIONS and value is not None:
            if not isinstance(value, list):
                raise ConfigError(
                    f"{place}: {key}: its settings belong below it, each with a value"
                )
            field, module, record = MODEL_SECTIONS[key]
            found[field] = _checked(value, getattr(import_module(module), record))
    return found


def settings_in(path: str, record: type["Struct"]) -> dict[str, Any]:
    """Return what the file `path` says, all of which are fields of `record`.

    Raises:
        ConfigError: the file cannot be read, or says something else.
    """
    return _checked(read_settings(path), record)


def _checked(settings: list[FileSetting], record: type["Struct"]) -> dict[str, Any]:
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
            problem, kind = str(error), types[key]
            if get_origin(kind) is Annotated:
                kind = kind.__origin__
            if get_origin(kind) is Literal:
                problem += f", known: {', '.join(get_args(kind))}"
            raise ConfigError(f"{place}: {key}: {problem[0].lower()}{problem[1:]}") from None
    return {setting.key: setting.value for setting in settings}


def _known_options(context: Any) -> dict[str, Any]:
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
    from difflib import get_close_matches  # noqa: PLC0415 - for a mistake only

    near = get_close_matches(key, known, n=1)
    hint = f"; did you mean {near[0]}?" if near else ""
    return f"unknown setting {key}{hint} (known: {', '.join(known)})"


# -- the file -------------------------------------------------------------------------------------


@cache
def read_settings(path: str) -> list[FileSetting]:
    """Return what the file says at its top level; a model's section is a list, others scalars.

    Raises:
        ConfigError: it cannot be read, is not YAML, or is something else than settings.
    """
    import yaml  # noqa: PLC0415 - only when there is a file

    from batcher.plain_yaml import plain_events  # noqa: PLC0415 - as above

    try:
        text = Path(path).read_text("utf-8-sig")
        for event in plain_events(text):
            if isinstance(event, yaml.AliasEvent):
                raise ConfigError(f"{_place(path, event.start_mark)}: no aliases, write the value")
        loader = yaml.SafeLoader(text)
        node = loader.get_single_node()
        return [] if node is None else list(_settings(loader, node, path))
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = _place(path, mark) if mark else path
        raise ConfigError(f"{place}: {error.problem}") from None
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise ConfigError(f"cannot read {path}: {reason_of(error)}") from None


def _settings(loader: "yaml.SafeLoader", node: "yaml.Node", path: str) -> Iterator[FileSetting]:
    """Yield the settings that the mapping `node` holds.

    Raises:
        ConfigError: it is no mapping, or not one of names to single values.
    """
    import yaml  # noqa: PLC0415 - as above

    if not isinstance(node, yaml.MappingNode):
        raise ConfigError(f"{path}: not a list of settings, `name: value` on each line")
    first_lines: dict[str, int] = {}
    for key_node, value_node in node.value:
        place, key = _place(path, key_node.start_mark), key_node.value
        if key_node.tag != _TEXT_TAG:
            shown = key if isinstance(key, str) else "this"
            raise ConfigError(f"{place}: {shown} is no name of a setting, as it is not text")
        name = key.replace("-", "_")
        if name in first_lines:
            raise ConfigError(f"{place}: {key} is set in line {first_lines[name]} already")
        first_lines[name] = key_node.start_mark.line + 1
        if isinstance(value_node, yaml.MappingNode) and key in MODEL_SECTIONS:
            value: Any = list(_settings(loader, value_node, path))
        elif isinstance(value_node, yaml.ScalarNode):
            try:
                value = loader.construct_object(value_node)
            except ValueError as error:  # a date, for example, that no calendar has
                raise ConfigError(f"{place}: {key}: {error}") from None
        else:
            raise ConfigError(f"{place}: {key}: a single value was expected")
        yield FileSetting(place, key, value)


def _place(path: str, mark: Any) -> str:  # a yaml.Mark, of which there are two classes
    return f"{path}:{mark.line + 1}:{mark.column + 1}"
