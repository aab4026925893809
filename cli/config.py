"""Settings of --config FILE.yaml: they go below flags and environment, and above the defaults.

Rule: nothing in the file is ignored; a key that is no option is an error, and so is what may have
been meant in another way.  The file is a flat mapping, read with the place of everything in it, and
all that is wrong in it is said at once.
"""

from collections.abc import Iterator, Sequence
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Any, NamedTuple

from batcher.errors import BatchdecodeError
from batcher.fields import expected_of
from batcher.hf.settings import LOADING_SETTINGS
from batcher.requests.validation import show
from batcher.settings import SETTINGS
from batcher.speculation.settings import SPECULATION_SETTINGS

from .errors import reason_of

if TYPE_CHECKING:
    import yaml
    from msgspec import Struct

_COMMANDS = ("run", "check")  # those whose options a file may set
OF_MODELS = {"model", "chat", *LOADING_SETTINGS}
OF_SCHEDULING = {*SETTINGS, *SPECULATION_SETTINGS, "check", "profile", "kv_memory"}
OF_ROWS = ("max_tokens", "temperature", "top_p", "seed")
OF_REQUESTS = {"batch", "keep_going", *OF_ROWS, *OF_MODELS, *OF_SCHEDULING}
_NOT_IN_A_FILE = {"config", "help", "help_all"}
_KINDS: dict[str, tuple[tuple[type, ...], str]] = {
    "boolean": ((bool,), expected_of(bool)),
    "int": ((int,), expected_of(int)),
    "int range": ((int,), expected_of(int)),
    "float range": ((int, float), expected_of(float)),
}
_TEXT_KIND = (str,), expected_of(str)
# The sections of models: the field of a command's record, and the record of their settings.
MODEL_SECTIONS = {
    "simulated": ("model_settings", "batcher.models.simulated", "SimulatedSettings"),
    "llm": ("llm_settings", "batcher.models.calls", "CallSettings"),
    "server": ("server_settings", "batcher.remote.settings", "ServerSettings"),
    "transformer": ("transformer_settings", "batcher.transformer.config", "TransformerSettings"),
    "hf": ("hf_settings", "batcher.hf.settings", "HFSettings"),
}
_MAX_SHOWN = 50  # mistakes in a file, as of bad requests
_TEXT_TAG = "tag:yaml.org,2002:str"


class ConfigError(BatchdecodeError):
    """A configuration file that cannot be used."""


class ConfigPlace(NamedTuple):
    """A place in the file, both numbers from 1."""

    path: str
    line: int
    column: int

    def __str__(self) -> str:
        return f"{self.path}:{self.line}:{self.column}"


class SettingError(ConfigError):
    """A setting of the file that cannot be used."""

    def __init__(self, place: ConfigPlace, text: str) -> None:
        super().__init__(f"{place}: {text}")
        self.place = place


class FileSetting(NamedTuple):
    """One key of the file: its place, for messages, and its value; a section's are settings."""

    place: ConfigPlace
    key: str
    value: Any


class SettingsFile(NamedTuple):
    """What a file says that is made as settings are, and what else is in it."""

    settings: list[FileSetting]
    problems: list[SettingError]


def defaults_in(path: str, context: Any) -> dict[str, Any]:
    """Return what the file `path` says of the options of the command of `context`, by their names.

    Raises:
        ConfigError: the file cannot be read, or says something that is no option; all of that.
    """
    from typer import BadParameter  # noqa: PLC0415 - only when there is a file

    options = {option.name: option for option in context.command.params}
    known = _known_options(context)
    defaults = {}
    file = read_settings(path)
    problems = [*file.problems]
    for place, key, written in file.settings:
        name = key.replace("-", "_")
        try:
            if key in MODEL_SECTIONS:
                problems += _problems_in_section(place, key, written)
                continue
            value = _option_value(place, key, written, known)
            if name in options:
                options[name].process_value(context, value)
                defaults[name] = value
        except BadParameter as error:
            problems.append(SettingError(place, f"{key} {error.message}"))
        except SettingError as error:
            problems.append(error)
    _raise_all(path, problems)
    return defaults


def _option_value(place: ConfigPlace, key: str, written: Any, known: dict[str, Any]) -> Any:
    """Return the value that a file has for an option, as a line would have it.

    Raises:
        SettingError: none of the `known` options is called so, or it has values of another kind.
    """
    name = key.replace("-", "_")
    if name not in known:
        names = {name.replace("_", "-") for name in known}.union(MODEL_SECTIONS)
        meant = name_here(key)
        setting, _, value = (meant or "").removeprefix("--").partition(" ")
        if setting in names:
            here = f"{setting}: {value}" if value else setting
            raise SettingError(place, f"unknown setting {key}; here it is {here}")
        raise SettingError(place, _unknown(key, sorted(names)))
    kind = known[name].type
    types, expected = _KINDS.get(kind.name, _TEXT_KIND)
    value = written
    if isinstance(written, bool) and "on" in getattr(kind, "choices", ()):
        value = "on" if written else "off"  # which are booleans in YAML
    if value is not None and type(value) not in types:  # True is no number here
        expected = getattr(kind, "allowed", expected)  # with the range
        raise SettingError(place, f"{key} must be {expected}, not {show(value)}")
    return value


def model_settings(path: str) -> dict[str, dict[str, Any]]:
    """Return what the file `path` holds for models, as the fields of a command's record have it.

    Raises:
        ConfigError: the file cannot be read, or a section is not one of its settings.
    """
    found: dict[str, dict[str, Any]] = {}
    file = read_settings(path)
    problems = [*file.problems]
    for place, key, value in file.settings:
        if key in MODEL_SECTIONS and value is not None:
            problems += _problems_in_section(place, key, value)
            if isinstance(value, list):
                found[MODEL_SECTIONS[key][0]] = {each.key: each.value for each in value}
    _raise_all(path, problems)
    return found


def _problems_in_section(place: ConfigPlace, key: str, value: Any) -> list[SettingError]:
    """Return what is wrong in the section `key`."""
    if value is None:
        return []
    if not isinstance(value, list):
        text = f"{key}: its settings belong below it, each with a value"
        return [SettingError(place, text)]
    _, module, record = MODEL_SECTIONS[key]
    return _problems_of(value, getattr(import_module(module), record))


def settings_in(path: str, record: type["Struct"]) -> dict[str, Any]:
    """Return what the file `path` says, all of which are fields of `record`.

    Raises:
        ConfigError: the file cannot be read, or says something else.
    """
    file = read_settings(path)
    _raise_all(path, [*file.problems, *_problems_of(file.settings, record)])
    return {setting.key: setting.value for setting in file.settings}


def _problems_of(settings: list[FileSetting], record: type["Struct"]) -> list[SettingError]:
    """Return which `settings` are no fields of `record`, or not what such a field can be."""
    import msgspec  # noqa: PLC0415 - only when there is a section

    types = {field.name: field.type for field in msgspec.structs.fields(record)}
    problems = []
    for place, key, value in settings:
        if key not in types:
            problems.append(SettingError(place, _unknown(key, sorted(types))))
            continue
        try:
            msgspec.convert(value, types[key])
        except msgspec.ValidationError:
            text = f"{key} must be {expected_of(types[key])}, not {show(value)}"
            problems.append(SettingError(place, text))
    return problems


def _raise_all(path: str, problems: list[SettingError]) -> None:
    """Raise what is wrong in the file, if anything is: the first _MAX_SHOWN, in their order.

    Raises:
        ConfigError: something is.
    """
    if len(problems) > 1:
        texts = [str(problem) for problem in sorted(problems, key=lambda problem: problem.place)]
        more = len(texts) - _MAX_SHOWN
        hidden = f"\n... and {more:,} more" if more > 0 else ""
        shown = "\nerror: ".join(texts[:_MAX_SHOWN])
        raise ConfigError(f"{shown}{hidden}\nerror: {len(texts):,} mistakes in {path}")
    for problem in problems:
        raise problem


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
    hint = f"; did you mean {near[0]}?" if near else f" (known: {', '.join(known)})"
    return f"unknown setting {key}{hint}"


# -- the file -------------------------------------------------------------------------------------


@cache
def read_settings(path: str) -> SettingsFile:
    """Return what the file says at its top level; a model's section is a list, others scalars.

    Raises:
        ConfigError: it cannot be read, is not YAML, or is something else than settings.
    """
    import yaml  # noqa: PLC0415 - only when there is a file

    from batcher.plain_yaml import plain_events, read_text  # noqa: PLC0415 - as above

    try:
        text = read_text(path)
        for event in plain_events(text):
            if isinstance(event, yaml.AliasEvent):
                raise SettingError(_place(path, event.start_mark), "no aliases, write the value")
        loader = yaml.SafeLoader(text)
        node = loader.get_single_node()
        problems: list[SettingError] = []
        settings = [] if node is None else list(_settings(loader, node, path, problems))
        return SettingsFile(settings, problems)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = str(_place(path, mark)) if mark else path
        raise ConfigError(f"{place}: {error.problem}") from None
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise ConfigError(f"cannot read {path}: {reason_of(error)}") from None


def _settings(
    loader: "yaml.SafeLoader", node: "yaml.Node", path: str, problems: list[SettingError]
) -> Iterator[FileSetting]:
    """Yield the settings that the mapping `node` holds, and add others to `problems`.

    Raises:
        ConfigError: it is no mapping.
    """
    import yaml  # noqa: PLC0415 - as above

    if not isinstance(node, yaml.MappingNode):
        raise ConfigError(f"{path}: not a list of settings, `name: value` on each line")
    first_lines: dict[str, int] = {}
    for key_node, value_node in node.value:
        place, key = _place(path, key_node.start_mark), key_node.value
        problem = None
        if key_node.tag != _TEXT_TAG:
            shown = key if isinstance(key, str) else "this"
            problem = f"{shown} is no name of a setting, as it is not text"
        elif (name := key.replace("-", "_")) in first_lines:
            problem = f"{key} is set in line {first_lines[name]} already"
        else:
            first_lines[name] = place.line
            if isinstance(value_node, yaml.MappingNode) and key in MODEL_SECTIONS:
                value: Any = list(_settings(loader, value_node, path, problems))
            elif isinstance(value_node, yaml.ScalarNode):
                try:
                    value = loader.construct_object(value_node)
                except ValueError as error:  # a date, for example, that no calendar has
                    problem = f"{key}: {error}"
            else:
                problem = f"{key}: a single value was expected"
        if problem is None:
            yield FileSetting(place, key, value)
        else:
            problems.append(SettingError(place, problem))


def _place(path: str, mark: Any) -> ConfigPlace:  # a yaml.Mark, of which there are two classes
    return ConfigPlace(path, mark.line + 1, mark.column + 1)


# -- names elsewhere -------------------------------------------------------------------------------


def name_here(name: str) -> str | None:
    """Return the option here that vLLM, SGLang, llama.cpp or mlx-lm call `name`, or None.

    It may have a value.  The words of `name` may be joined in any way.
    """
    return OTHER_NAMES.get("--" + name.removeprefix("--").replace("_", "-"))


# The tables in docs/glossary.md and docs/from-*.md are equal; a test compares them.
OTHER_NAMES = {
    "--batch-size": "--max-batch-tokens",
    "--cache-prompt": "--prefix-cache on",
    "--chunked-prefill-size": "--max-batch-tokens",
    "--concurrency": "--batch",
    "--context-length": "--max-context",
    "--ctx-size": "--max-context",
    "--data-parallel-size": "--replicas",
    "--decode-concurrency": "--batch",
    "--disable-radix-cache": "--prefix-cache off",
    "--draft-max": "--draft-tokens",
    "--draft-model": "--draft",
    "--enable-chunked-prefill": "--max-batch-tokens",
    "--enable-mixed-chunk": "--prefill-order decode-first",
    "--enable-prefix-caching": "--prefix-cache on",
    "--enable-priority-scheduling": "--preempt-for priority",
    "--goodput": "--slo",
    "--gpu-memory-utilization": "--kv-memory",
    "--long-prefill-token-threshold": "--long-prefill-threshold",
    "--max-concurrency": "--batch",
    "--max-model-len": "--max-context",
    "--max-num-batched-tokens": "--max-batch-tokens",
    "--max-num-seqs": "--batch",
    "--max-prefill-tokens": "--max-batch-tokens",
    "--max-running-requests": "--batch",
    "--max-total-tokens": "--kv-blocks",
    "--mem-fraction-static": "--kv-memory",
    "--model-draft": "--draft",
    "--num-draft-tokens": "--draft-tokens",
    "--num-gpu-blocks-override": "--kv-blocks",
    "--page-size": "--block-size",
    "--parallel": "--batch",
    "--prefill-step-size": "--max-batch-tokens",
    "--priority-scheduling-preemption-threshold": "--preempt-for priority",
    "--prompt-cache-size": "--prefix-cache on",
    "--schedule-policy": "--policy",
    "--scheduling-policy": "--policy",
    "--speculative-algorithm": "--draft",
    "--speculative-config": "--draft",
    "--speculative-num-draft-tokens": "--draft-tokens",
    "--tensor-parallel-size": "--tensor-parallel",
    "--tp-size": "--tensor-parallel",
}
