"""Options that several commands have: each of these makes the field of a record that is one."""

from collections.abc import Collection
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, cast

from batcher.fields import Range, range_of
from batcher.hf.settings import LOADING_SETTINGS
from batcher.request import REQUEST_FIELDS
from batcher.settings import GRAMMAR_TIMEOUT

from .config import OF_REQUESTS, defaults_in
from .help import DECODING, DISPLAY, INPUT, OUTPUT, OptionGroup, argument, flag, option
from .options import MAX_BATCH, MAX_DELAY, STDOUT

_DEFAULTS = {
    "max_tokens": "Limit on generated tokens",
    "temperature": "Temperature",
    "top_p": "top_p",
    "seed": "Seed",
}
_SPECIAL = "Treat special tokens written out in messages and prompts as special, not as text."
Color = Literal["auto", "always", "never"]
MODEL = (
    "simulated, a checkpoint (FILE.gguf, a folder, or smollm2), hf:NAME or hf:FOLDER of "
    "transformers, package.module:name of a callable, Model or LLM, or openai:URL[#NAME] of a "
    "server."
)
CHAT = "Put each text prompt into the model's chat template."


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)  # each would take time to make
class ModelOptions:
    """The options of any command that say which model there is, and how it is spoken to.

    model: what a person calls it.  chat: whether texts are what a user says.
    checkpoint: those that are settings of a checkpoint, or of a model of transformers.
    Other settings stand in the file of --config: of the simulated model, of calls of an LLM, of
    checkpoints, and of models of transformers.
    """

    if TYPE_CHECKING:
        model: str
        chat: bool | None
        checkpoint: dict[str, Any]
    model_settings: dict[str, Any] = field(default_factory=dict)
    llm_settings: dict[str, Any] = field(default_factory=dict)
    transformer_settings: dict[str, Any] = field(default_factory=dict)
    hf_settings: dict[str, Any] = field(default_factory=dict)


def config(panel: str, text: str, names: Collection[str] | None = OF_REQUESTS) -> Any:
    """Return the field --config: a file of defaults.

    names: the options that it may set, since the same file may speak of the --output of another
    command; None for all.
    """

    def use(context: Any, path: str | None) -> str | None:
        if path is not None and not context.resilient_parsing:
            found = defaults_in(path, context).items()
            context.default_map = {n: v for n, v in found if names is None or n in names}
        return path

    return option(panel, f"YAML: {text}.", "FILE", is_eager=True, callback=use)


def output(text: str) -> Any:
    """Return the field --output."""
    text = f"{text}  [default: stdout]"
    return option(OUTPUT, text, "FILE", "-o", callback=none_for_stdout, is_common=True)


def none_for_stdout(path: str | None) -> str | None:
    """Return `path`, None for what stands for stdout."""
    return None if path == STDOUT else path


def grammar_timeout(panel: str = DECODING, default: float | None = GRAMMAR_TIMEOUT) -> Any:
    """Return the field --grammar-timeout."""
    shown = "" if default is not None else f"  [default: {GRAMMAR_TIMEOUT:g}]"
    text = f"Processor time that compiling a constraint may take.{shown}"
    limits: dict[str, Any] = {"min": 0.1, "max": MAX_DELAY}  # the least as batcher.settings has it
    return option(panel, text, "SECONDS", default=default, **limits)


def strict_constraints() -> Any:
    """Return the field --strict-constraints."""
    return flag(DECODING, "Refuse a schema of which a part could only be checked afterwards.")


def checkpoint_group(panel: str = DECODING) -> OptionGroup:
    """Return the options of models that are loaded from files: those that were given, by name."""
    kinds = {}
    for name, setting in LOADING_SETTINGS.items():
        (kind,) = setting.parts
        numbers, limits = range_of(kind), dict[str, Any]()
        if numbers is not None:
            kind, limits = int, {"min": numbers.smallest, "max": numbers.largest}
        words = setting.words.replace("`", "")
        shown = f"  [default: {setting.default}]" if isinstance(setting.default, str) else ""
        text = f"{words[0].upper()}{words[1:]}.{shown}"
        kinds[name] = kind | None, option(panel, text, setting.metavar, **limits)
    return OptionGroup(kinds, read=dict)


def defaults_group(panel: str = DECODING) -> OptionGroup:
    """Return the options that are defaults of requests: those that were given, by name."""
    kinds = {}
    for name, text in _DEFAULTS.items():
        numbers = cast(Range, REQUEST_FIELDS[name].range)
        limits: dict[str, Any] = {"min": numbers.smallest, "max": numbers.largest}
        kind = int if numbers.is_integer else float
        kinds[name] = kind | None, option(panel, f"{text} of rows without one.", "N", **limits)
    kinds["special_tokens_in_text"] = bool | None, option(panel, _SPECIAL)
    return OptionGroup(kinds, read=dict)


def meta(panel: str) -> Any:
    """Return the field --meta."""
    text = "JSON with the limits of the run, as vLLM calls them.  [default: *meta.json beside LOG]"
    return option(panel, text, "FILE", is_common=True)


requests = partial(argument, "Requests, one JSON object per line: a file or - for stdin.", "INPUT")
all_config = partial(
    config,
    INPUT,
    "defaults for these options by their names, and under simulated:, llm:, transformer: and "
    "hf: settings of models",
    names=None,
)
batch = partial(
    option,
    DECODING,
    "Slots of the batch.",
    "N",
    "-b",
    default=8,
    min=1,
    max=MAX_BATCH,
    is_common=True,
)
model = partial(
    option,
    DECODING,
    MODEL,
    "NAME",
    default="simulated",
    offers="model",
    is_common=True,
)
chat = partial(flag, DECODING, CHAT, is_common=True)
plot = partial(
    option,
    OUTPUT,
    "Throughput against latency, with the SLO: FILE.svg, FILE.png, or terminal.",
    "WHERE",
)
force = partial(flag, OUTPUT, "Overwrite a file that holds something.")
color = partial(
    option, DISPLAY, "Use colors: auto (on a terminal), always or never.", "WHEN", default="auto"
)
_SLO = "ttft=0.5,tpot=50ms,e2e=10,queue=1"
slo = partial(
    option,
    OUTPUT,
    f"Count the requests that meet them: {_SLO}.",
    "LIMIT,...",
    offers="slo",
)
slos = partial(
    option,
    text=f"What is promised: {_SLO}; again for a class: priority=1:ttft=.3.",
    metavar="LIMIT,...",
    offers="slos",
    is_common=True,
)
