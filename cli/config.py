"""Settings in --config FILE.yaml: above the defaults, below the environment and flags.

The file is a flat mapping, with a section for each kind of model.  Unknown keys and ambiguous
values are errors.  One message lists all mistakes in the file with their places.
"""

from collections.abc import Iterator, Sequence
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Any, NamedTuple

from batcher.errors import BatchdecodeError
from batcher.fields import expected_of
from batcher.requests.validation import show
from batcher.settings import SETTINGS
from batcher.speculation.settings import SPECULATION_SETTINGS
from batcher.transformer.config import LOADING_SETTINGS

from .errors import reason_of

if TYPE_CHECKING:
    import yaml
    from msgspec import Struct

_COMMANDS = ("run", "check")  # those whose options a file may set
OF_MODELS = {"model", "chat", *LOADING_SETTINGS}
OF_SCHEDULING = {*SETTINGS, *SPECULATION_SETTINGS, "check", "profile", "kv_memory"}
OF_ROWS = ("max_tokens", "temperature", "top_p", "seed")
OF_REQUESTS = {"batch", "keep_going", *OF_ROWS, *OF_MODELS, *OF_SCHEDULING}
# Sections of models: the field of the command's record, and the record of the settings.
MODEL_SECTIONS = {
    "simulated": ("model_settings", "batcher.models.simulated", "SimulatedSettings"),
    "llm": ("llm_settings", "batcher.models.callables", "CallSettings"),
    "server": ("server_settings", "batcher.remote.model", "ServerSettings"),
    "transformer": ("transformer_settings", "batcher.transformer.config", "TransformerSettings"),
    "hf": ("hf_settings", "batcher.transformer.config", "HFSettings"),
}
_MAX_SHOWN = 50  # mistakes
_TEXT_TAG = "tag:yaml.org,2002:str"

Place = tuple[int, int]  # line and column, from 1
Problem = tuple[Place, str]


class ConfigError(BatchdecodeError):
    """A configuration file that cannot be used."""


class FileSetting(NamedTuple):
    """A key of the file, its place and its value; that of a section is a list of settings."""

    place: Place
    key: str
    value: Any


def defaults_in(path: str, context: Any) -> dict[str, Any]:
    """Return the defaults that the file sets for the options of the command of `context`.

    Raises:
        ConfigError: the file cannot be read, or has mistakes.
    """
    from typer import BadParameter  # noqa: PLC0415 - only when there is a file

    group: Any = context.find_root().command
    known = {  # of every command, since one file may serve them all
        param.name: param
        for name in _COMMANDS
        for param in group.get_command(context, name).params
        if param.param_type_name == "option"
        and param.expose_value
        and not (param.hidden or param.multiple)
    }
    del known["config"]
    options = {option.name: option for option in context.command.params}
    settings, found = _read(path)
    defaults, problems = {}, [*found]
    for place, key, value in settings:
        name = key.replace("-", "_")
        if key in MODEL_SECTIONS:
            if isinstance(value, list):
                _, module, record = MODEL_SECTIONS[key]
                problems += _problems_of(value, getattr(import_module(module), record))
            elif value is not None:
                problems.append((place, f"{key}: write its settings below it, each with a value"))
            continue
        if name not in known:
            names = {name.replace("_", "-") for name in known}.union(MODEL_SECTIONS)
            setting, _, meant = (name_here(key) or "").removeprefix("--").partition(" ")
            problem = _unknown(key, sorted(names))
            if name in {"prompt", "prompts"}:
                problem = f"{key} is not a setting: use --{key}"
            elif setting in names:
                here = f"{setting}: {meant}" if meant else setting
                problem = f"unknown setting {key}; use {here}"
            problems.append((place, problem))
            continue
        kind = known[name].type
        if isinstance(value, bool) and "on" in getattr(kind, "choices", ()):
            value = "on" if value else "off"  # noqa: PLW2901 - YAML reads them as booleans
        if value is not None and type(value) not in getattr(kind, "types", (str,)):
            expected = getattr(kind, "allowed", expected_of(str))
            problems.append((place, f"{key} must be {expected}, not {show(value)}"))
        elif name in options:
            if getattr(options[name].type, "choices", ()) != getattr(kind, "choices", ()):
                continue  # the --format of `run` is not that of `trace`
            try:
                options[name].process_value(context, value)
            except BadParameter as error:
                problems.append((place, f"{key} {error.message}"))
            defaults[name] = value
    _raise_all(path, problems)
    return defaults


def model_settings(path: str) -> dict[str, dict[str, Any]]:
    """Return the sections of models, by field of the command's record."""
    return {
        MODEL_SECTIONS[key][0]: {each.key: each.value for each in value}
        for _, key, value in _read(path)[0]
        if key in MODEL_SECTIONS and isinstance(value, list)
    }


def settings_in(path: str, record: type["Struct"]) -> dict[str, Any]:
    """Return the settings in the file `path`, which have to be fields of `record`."""
    settings, problems = _read(path)
    _raise_all(path, [*problems, *_problems_of(settings, record)])
    return {setting.key: setting.value for setting in settings}


def _problems_of(settings: list[FileSetting], record: type["Struct"]) -> list[Problem]:
    import msgspec  # noqa: PLC0415 - only when there is a section

    types = {field.name: field.type for field in msgspec.structs.fields(record)}
    problems = []
    for place, key, value in settings:
        if key not in types:
            problems.append((place, _unknown(key, sorted(types))))
            continue
        try:
            msgspec.convert(value, types[key])
        except msgspec.ValidationError:
            problems.append((place, f"{key} must be {expected_of(types[key])}, not {show(value)}"))
    return problems


def _raise_all(path: str, problems: list[Problem]) -> None:
    if not problems:
        return
    ordered = sorted(problems, key=lambda problem: problem[0])
    texts = [f"{path}:{line}:{column}: {text}" for (line, column), text in ordered]
    if len(texts) == 1:
        raise ConfigError(texts[0])
    more = len(texts) - _MAX_SHOWN
    hidden = f"\n... and {more:,} more" if more > 0 else ""
    shown = "\nerror: ".join(texts[:_MAX_SHOWN])
    raise ConfigError(f"{shown}{hidden}\nerror: {len(texts):,} mistakes in {path}")


def _unknown(key: str, known: Sequence[str]) -> str:
    from difflib import get_close_matches  # noqa: PLC0415 - for a mistake only

    near = get_close_matches(key, known, n=1)
    hint = f"; did you mean {near[0]}?" if near else f" (known: {', '.join(known)})"
    return f"unknown setting {key}{hint}"


@cache  # a pipe can be read only once
def _read(path: str) -> tuple[list[FileSetting], tuple[Problem, ...]]:
    """Return the settings at the top level of the file, and its syntax mistakes."""
    import yaml  # noqa: PLC0415 - only when there is a file

    from batcher.plain_yaml import plain_events, read_text  # noqa: PLC0415 - as above

    try:
        text = read_text(path)
        for event in plain_events(text):
            if isinstance(event, yaml.AliasEvent):
                _raise_all(
                    path, [(_place(event.start_mark), "aliases are not allowed; write the value")]
                )
        loader = yaml.SafeLoader(text)
        node = loader.get_single_node()
        problems: list[Problem] = []
        settings = [] if node is None else list(_settings(loader, node, path, problems))
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = ":".join([path, *map(str, _place(mark))]) if mark else path
        raise ConfigError(f"{place}: {error.problem}") from None
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise ConfigError(f"cannot read {path}: {reason_of(error)}") from None
    return settings, tuple(problems)


def _settings(
    loader: "yaml.SafeLoader", node: "yaml.Node", path: str, problems: list[Problem]
) -> Iterator[FileSetting]:
    import yaml  # noqa: PLC0415 - as above

    if not isinstance(node, yaml.MappingNode):
        raise ConfigError(f"{path}: not a list of settings, `name: value` on each line")
    first_lines: dict[str, int] = {}
    for key_node, value_node in node.value:
        place, key, value = _place(key_node.start_mark), key_node.value, None
        problem = ""
        if key_node.tag != _TEXT_TAG:
            shown = key if isinstance(key, str) else "this"
            problem = f"{shown} is not a name of a setting, since it is not text"
        elif (name := key.replace("-", "_")) in first_lines:
            problem = f"{key} is already set in line {first_lines[name]}"
        else:
            first_lines[name] = place[0]
            if isinstance(value_node, yaml.MappingNode) and key in MODEL_SECTIONS:
                value = list(_settings(loader, value_node, path, problems))
            elif isinstance(value_node, yaml.ScalarNode):
                try:
                    value = loader.construct_object(value_node)
                except ValueError as error:  # such as an impossible date
                    problem = f"{key}: {error}"
            else:
                problem = f"{key}: expected a single value"
        if problem:
            problems.append((place, problem))
        else:
            yield FileSetting(place, key, value)


def _place(mark: Any) -> Place:  # there are two classes of marks
    return mark.line + 1, mark.column + 1


# -- names elsewhere -------------------------------------------------------------------------------


def name_here(name: str) -> str | None:
    """Return the option that vLLM, SGLang, llama.cpp or mlx-lm call `name`, or None.

    The option may come with a value.
    """
    return OTHER_NAMES.get("--" + name.removeprefix("--").replace("_", "-"))


# As docs/reference/glossary.md and docs/guide/coming-from.md have them, without the dashes.
_NAMES_OF = {
    "--batch": (
        "concurrency decode-concurrency max-concurrency max-num-seqs max-running-requests parallel"
    ),
    "--block-size": "page-size",
    "--draft": "draft-model model-draft speculative-algorithm speculative-config",
    "--draft-tokens": "draft-max num-draft-tokens speculative-num-draft-tokens",
    "--kv-blocks": "max-total-tokens num-gpu-blocks-override",
    "--kv-memory": "gpu-memory-utilization mem-fraction-static",
    "--long-prefill-threshold": "long-prefill-token-threshold",
    "--max-batch-tokens": (
        "batch-size chunked-prefill-size enable-chunked-prefill max-num-batched-tokens "
        "max-prefill-tokens prefill-step-size"
    ),
    "--max-context": "context-length ctx-size max-model-len",
    "--policy": "schedule-policy scheduling-policy",
    "--preempt-for priority": "enable-priority-scheduling priority-scheduling-preemption-threshold",
    "--prefill-order decode-first": "enable-mixed-chunk",
    "--prefix-cache off": "disable-radix-cache",
    "--prefix-cache on": "cache-prompt enable-prefix-caching prompt-cache-size",
    "--replicas": "data-parallel-size",
    "--slo": "goodput",
    "--tensor-parallel": "tensor-parallel-size tp-size",
}
OTHER_NAMES = {f"--{name}": here for here, names in _NAMES_OF.items() for name in names.split()}
