"""The file of --config: YAML that is a flat mapping, read with the place of everything in it.

Rule: what may have been meant in another way is an error, and so is all that is not needed here.
"""

from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from batcher.errors import BatchdecodeError

if TYPE_CHECKING:
    import yaml

MODEL_SECTIONS = ("simulated", "llm")
_TEXT_TAG = "tag:yaml.org,2002:str"


class ConfigError(BatchdecodeError):
    """A configuration file that cannot be used."""


class Setting(NamedTuple):
    """One key of the file: its place, for messages, and its value; a section's are settings."""

    place: str
    key: str
    value: Any


@cache
def read_settings(path: str) -> list[Setting]:
    """Return what the file says at its top level; a model's section is a list, others scalars.

    Raises:
        ConfigError: it cannot be read, is not YAML, or is something else than settings.
    """
    import yaml  # noqa: PLC0415 - only when there is a file

    try:
        text = Path(path).read_text("utf-8-sig")
        _check_shape(text, path)
        loader = yaml.SafeLoader(text)
        node = loader.get_single_node()
        return [] if node is None else list(_settings(loader, node, path))
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = _place(path, mark) if mark else path
        raise ConfigError(f"{place}: {error.problem}") from None
    except (OSError, ValueError, yaml.YAMLError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise ConfigError(f"cannot read {path}: {reason}") from None


def _check_shape(text: str, path: str) -> None:
    """Make sure that `text` is plain, and says everything where it stands.

    Raises:
        ConfigError, yaml.MarkedYAMLError: it is not.
    """
    import yaml  # noqa: PLC0415 - as above

    from batcher.plain_yaml import plain_events  # noqa: PLC0415 - as above

    for event in plain_events(text):
        if isinstance(event, yaml.AliasEvent):
            raise ConfigError(f"{_place(path, event.start_mark)}: no aliases, write the value")


def _settings(loader: "yaml.SafeLoader", node: "yaml.Node", path: str) -> Iterator[Setting]:
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
            value = _construct(loader, value_node, f"{place}: {key}")
        else:
            raise ConfigError(f"{place}: {key}: a single value was expected")
        yield Setting(place, key, value)


def _construct(loader: "yaml.SafeLoader", node: "yaml.Node", where: str) -> Any:
    """Return the value of a scalar.

    Raises:
        ConfigError: it has none: a date, for example, that no calendar has.
    """
    try:
        return loader.construct_object(node)
    except ValueError as error:
        raise ConfigError(f"{where}: {error}") from None


def _place(path: str, mark: Any) -> str:  # a yaml.Mark, of which there are two classes
    return f"{path}:{mark.line + 1}:{mark.column + 1}"
