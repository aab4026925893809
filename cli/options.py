"""Options shared by several commands: models, requests, scheduling, output."""

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Self, cast

import msgspec
import typer
from msgspec import NODEFAULT

from batcher.errors import BatchdecodeError
from batcher.fields import Range, range_of
from batcher.request import REQUEST_FIELDS
from batcher.settings import (
    DEFAULT_BLOCK_SIZE,
    DEFAULT_SCHEDULING,
    GRAMMAR_TIMEOUT,
    MAX_KV_BLOCKS,
    SETTINGS,
    SchedulingSettings,
    Setting,
)
from batcher.speculation.settings import SPECULATION_SETTINGS, SpeculationSettings, parse_tree
from batcher.transformer.config import LOADING_SETTINGS

from .command import (
    ANY_COUNT,
    DECODING,
    DISPLAY,
    INPUT,
    OUTPUT,
    SCHEDULING,
    SPECULATION,
    TIME,
    OptionGroup,
    argument,
    flag,
    option,
)
from .config import OF_REQUESTS, defaults_in

if TYPE_CHECKING:
    from batcher.models.base import Model
    from batcher.scheduling.clock import Clock
    from batcher.timing.step_time import StepTime

STDOUT, WALL = "-", "wall"
MAX_BATCH = 2**20  # as in batcher.engine, which imports numpy
MAX_DELAY = 24 * 60 * 60
MIN_INTERVAL = 1e-6  # seconds
MODEL = (
    "simulated, a checkpoint (FILE.gguf, a folder, or smollm2), hf:NAME or hf:FOLDER "
    "(transformers), package.module:name (a callable, Model or LLM), or openai:URL[#NAME] (a "
    "server)."
)
CHAT = "Put each text prompt into the model's chat template."
SLO = "ttft=0.5,tpot=50ms,e2e=10,queue=1"


def refuse_stdout(path: str | None) -> str | None:
    """Return `path`, or raise if it is stdout, which is for the results."""
    if path == STDOUT:
        raise typer.BadParameter("must be a file: stdout is for the results")
    return path


AUTO = "auto"


def num_bytes(text: str | None) -> int | str | None:
    if text is None or text == AUTO:
        return text
    found = _SIZE.fullmatch(text)
    if found is None:
        raise typer.BadParameter(
            f"must be auto, or a size such as 512MiB, 2GB or 1048576, not {text!r}"
        )
    return int(float(found[1]) * _UNITS[found[2].upper()])


_SIZE = re.compile(r"([0-9]{1,15}(?:\.[0-9]{1,6})?) ?((?:[KMGT]i?)?B?)", re.IGNORECASE)
_UNITS = {"": 1, "B": 1} | {
    f"{prefix}{kind}": base**power
    for power, prefix in enumerate("KMGT", 1)
    for kind, base in (("B", 1000), ("IB", 1024), ("", 1000), ("I", 1024))
}

_LINK = re.compile(r"\[([^]]+)\]\([^)]+\)")


def _sentence(words: str, default: str = "", more: str = "") -> str:
    words = _LINK.sub(r"\1", words).replace("`", "")
    shown = f"  [default: {default}]" if default else ""
    return f"{words[0].upper()}{words[1:]}{more}.{shown}"


# -- options of requests, models and files ---------------------------------------------------------


def config_option(panel: str, text: str, names: Collection[str] | None = OF_REQUESTS) -> Any:
    """Return the option --config.

    names: the options that the file may set here, since one file may serve several commands; None
    for all.
    """

    def use(context: Any, path: str | None) -> str | None:
        if path is not None and not context.resilient_parsing:
            found = defaults_in(path, context).items()
            context.default_map = {n: v for n, v in found if names is None or n in names}
        return path

    return option(panel, f"YAML file with {text}.", "FILE", is_eager=True, callback=use)


def output_option(text: str) -> Any:
    return option(
        OUTPUT,
        f"{text}  [default: stdout]",
        "FILE",
        "-o",
        common=True,
        callback=lambda path: None if path == STDOUT else path,
    )


def output_file(text: str, *, common: bool = False) -> Any:
    return option(OUTPUT, text, "FILE", callback=refuse_stdout, common=common)


def trace_option() -> Any:
    text = "Write every scheduling decision to FILE (gzipped if it ends in .gz)."
    return output_file(text, common=True)


def grammar_timeout_option(panel: str = DECODING, shown: str = "") -> Any:
    text = f"Maximum processor time for compiling a constraint.{shown}"
    return option(panel, text, "SECONDS", min=0.1, max=MAX_DELAY, default=GRAMMAR_TIMEOUT)


def meta_option(panel: str) -> Any:
    text = (
        "JSON file with the limits of the run, named as in vLLM.  [default: *meta.json next to LOG]"
    )
    return option(panel, text, "FILE", common=True)


def input_argument() -> Any:
    return argument("Requests, one JSON object per line: a file or - for stdin.", "INPUT")


def whole_config_option() -> Any:
    text = (
        "defaults for these options, and settings of models under simulated:, llm:, transformer: "
        "and hf:"
    )
    return config_option(INPUT, text, names=None)


def model_config_option() -> Any:
    names = {"model", "chat", *LOADING_SETTINGS}
    return config_option(INPUT, "--model, and settings of models", names)


def force_flag() -> Any:
    return flag(OUTPUT, "Overwrite a file that is not empty.")


Color = Literal["auto", "always", "never"]


def color_option() -> Any:
    text = "Colours: auto (on a terminal), always or never."
    return option(DISPLAY, text, "WHEN", default="auto")


Live = Literal["auto", "always", "plain", "never"]


def live_option(what: str) -> Any:
    text = f"Live view of the {what}: auto (on a terminal), always, plain (lines of text) or never."
    return option(DISPLAY, text, "WHEN", common=True, default="auto")


def slos_option(panel: str, default: Any = None) -> Any:
    text = f"Latency targets: {SLO}; repeat for a class: priority=1:ttft=.3."
    return option(panel, text, "LIMIT,...", common=True, complete="slos", default=default)


def _optional(kind: Any, panel: str, text: str, metavar: str | None = None, **more: Any) -> Any:
    """Return the type and the field of an option with the default None."""
    return kind | None, option(panel, text, metavar, **more)


def checkpoint_group(panel: str = DECODING) -> OptionGroup:
    """Return the options of checkpoints, which make a dict of the given ones."""
    kinds: dict[str, Any] = {}
    for name, setting in LOADING_SETTINGS.items():
        (kind,) = setting.parts
        limits = dict[str, Any]()
        if (numbers := range_of(kind)) is not None:
            kind, limits = int, {"min": numbers.smallest, "max": numbers.largest}
        text = _sentence(setting.words, setting.default if isinstance(setting.default, str) else "")
        kinds[name] = _optional(kind, panel, text, setting.metavar, **limits)
    return OptionGroup(kinds, dict)


def defaults_group(panel: str = DECODING) -> OptionGroup:
    """Return the options with defaults of requests, which make a dict of the given ones."""
    kinds: dict[str, Any] = {}
    for name, text in (
        ("max_tokens", "Limit on generated tokens"),
        ("temperature", "Temperature"),
        ("top_p", "Nucleus sampling threshold"),
        ("seed", "Seed"),
    ):
        numbers = cast(Range, REQUEST_FIELDS[name].range)
        kind = int if numbers.is_integer else float
        words = f"{text} for requests that do not set it."
        limits = {"min": numbers.smallest, "max": numbers.largest}
        kinds[name] = _optional(kind, panel, words, "N", **limits)
    text = "Treat special tokens written in messages and prompts as special, not as text."
    kinds["special_tokens_in_text"] = _optional(bool, panel, text)
    return OptionGroup(kinds, dict)


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)  # they would slow the start
class ModelOptions:
    """The options of commands that load a model.

    checkpoint: settings of a checkpoint, or of a model of transformers.  The other settings are
    sections of --config.
    """

    model: str = option(DECODING, MODEL, "NAME", common=True, complete="model", default="simulated")
    chat: bool = flag(DECODING, CHAT, common=True)
    checkpoint: dict[str, Any] = checkpoint_group().as_field()
    model_settings: dict[str, Any] = field(default_factory=dict)
    llm_settings: dict[str, Any] = field(default_factory=dict)
    transformer_settings: dict[str, Any] = field(default_factory=dict)
    hf_settings: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)  # as above
class DecodingOptions(ModelOptions):
    """The options of commands that decode in slots, with defaults of requests."""

    batch: int = option(
        DECODING, "Number of slots.", "N", "-b", common=True, min=1, max=MAX_BATCH, default=8
    )
    defaults: dict[str, Any] = defaults_group().as_field()
    grammar_timeout: float = grammar_timeout_option()
    strict_constraints: bool = flag(
        DECODING, "Reject schemas that cannot be fully enforced while decoding."
    )


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)  # as above
class RequestOptions(DecodingOptions):
    """The options of commands that decode requests from several inputs."""

    input: list[str] | None = argument(
        "Requests, one JSON object per line: files, or - for stdin.", "INPUT..."
    )
    prompt: list[str] | None = option(
        INPUT,
        "Prompt to decode; repeat for several.",
        "TEXT",
        "-p",
        common=True,
        allow_from_autoenv=False,
    )
    prompts: list[str] | None = option(
        INPUT,
        "File of plain text with one prompt per line, or - for stdin; repeat for several.",
        "FILE",
        allow_from_autoenv=False,
    )


# -- options of scheduling -------------------------------------------------------------------------


class SchedulingOptions:
    """The given options of scheduling, step times and checking.

    given: their values by name.  values: the fields of SchedulingSettings.  speculation: the source
    of drafts, or None.
    """

    def __init__(self, **options: Any) -> None:
        self.given = {name: value for name, value in options.items() if value is not None}
        self.check: bool | None = options.get("check")
        self.profile: str | None = options.get("profile")
        self._kv_memory: int | str | None = options.get("kv_memory")
        self.speculation = speculation_of(self.given)
        settings = [setting for setting in SETTINGS.values() if setting.name in self.given]
        self.values = {setting.name: setting.read(self.given[setting.name]) for setting in settings}

    @property
    def has_default_schedule(self) -> bool:
        is_plain = self.profile is None and self.speculation is None
        return is_plain and self.settings() == DEFAULT_SCHEDULING

    def fitted(self, model: "Model") -> Self:
        """Return these options with --kv-blocks in place of --kv-memory.

        Raises:
            BatchdecodeError: the size of a block is unknown, the memory holds too few or too many,
                or --kv-blocks was given as well.
        """
        if self._kv_memory is None:
            return self
        if "kv_blocks" in self.given:
            raise BatchdecodeError(
                "--kv-memory cannot be used with --kv-blocks: one follows from the other"
            )
        from batcher.models.base import (  # noqa: PLC0415 - with it comes numpy
            free_kv_bytes_of,
            kv_block_bytes_of,
        )

        block_size = self.values.get("block_size", DEFAULT_BLOCK_SIZE)
        num_bytes = kv_block_bytes_of(model, block_size)
        _, of_draft = self._of_drafts(model, block_size)
        if num_bytes is None or of_draft is None:
            name = model.name if num_bytes is None else "the draft model"
            raise BatchdecodeError(
                f"--kv-memory needs a model with a known size per token; {name} has none: "
                "use --kv-blocks"
            )
        num_bytes += of_draft
        if self._kv_memory == AUTO:
            num_blocks = min(free_kv_bytes_of(model) // num_bytes, MAX_KV_BLOCKS)
        else:
            num_blocks = int(self._kv_memory) // num_bytes
        if not 1 <= num_blocks <= MAX_KV_BLOCKS:
            raise BatchdecodeError(
                f"--kv-memory holds {num_blocks:,} blocks of {block_size} tokens and "
                f"{num_bytes:,} bytes; it must hold 1 to {MAX_KV_BLOCKS:,}"
            )
        given = {name: value for name, value in self.given.items() if name != "kv_memory"}
        return type(self)(**given, kv_blocks=num_blocks)

    def draft_bytes_per_token(self, model: "Model") -> int:
        per_token, _ = self._of_drafts(model, DEFAULT_BLOCK_SIZE)
        return per_token or 0

    def _of_drafts(self, model: "Model", block_size: int) -> tuple[int | None, int | None]:
        if self.speculation is None:
            return 0, 0
        from batcher.engine.speculating import draft_bytes_of  # noqa: PLC0415 - seldom

        return draft_bytes_of(self.speculation, model, block_size)

    def settings(self) -> SchedulingSettings:
        from batcher.scheduling.scheduler import check_effects  # noqa: PLC0415 - heavy

        settings = SchedulingSettings(**self.values)
        check_effects(self.given, [settings])
        return settings

    def step_time(self) -> "StepTime | None":
        """Return the step times; None for a second per step, and for --profile wall."""
        if self.profile is None or self.profile == WALL:
            return None
        from batcher.timing.profiles import step_time_of  # noqa: PLC0415 - with it comes yaml

        return step_time_of(self.profile)

    def clock(self, sleep: Callable[[float], object]) -> "Clock | None":
        """Return the wall clock for --profile wall; `sleep` waits for an arrival."""
        if self.profile != WALL:
            return None
        from batcher.scheduling.clock import WallClock  # noqa: PLC0415 - heavy

        return WallClock(sleep=sleep)


def scheduling_group(
    panel: str | None = None, without: Collection[str] = (), default_time: str = "1 second"
) -> OptionGroup:
    """Return the options of scheduling, which make a SchedulingOptions.

    panel: a title for all of them.  without: options that the command lacks, or declares itself.
    default_time: the duration of a step without --profile.
    """
    kinds: dict[str, Any] = {}
    for name, setting in SETTINGS.items():
        kind: Any = setting.kind if setting.choices is None else Literal[tuple(setting.choices)]
        largest = ANY_COUNT if setting.kind is int and setting.largest is None else setting.largest
        kinds[name] = _optional(
            kind,
            panel or SCHEDULING,
            help_of(setting),
            setting.metavar,
            common=setting.is_common and panel is None,
            complete="policy" if name == "policy" else None,
            min=setting.smallest,
            max=largest,
        )
    text = "Recount all blocks after every step, and reread every token."
    kinds["check"] = _optional(bool, panel or SCHEDULING, text)
    kinds["profile"] = _optional(
        str,
        panel or TIME,
        "Duration of a step: a profile, FILE.yaml, constant:SECONDS, roofline:MODEL:GPU, or "
        f"wall.  [default: {default_time}]",
        "NAME",
        common=panel is None,
        complete="profile",
    )
    kinds["kv_memory"] = _optional(
        str,
        panel or SCHEDULING,
        "Memory for KV blocks, such as 2GB or 512MiB, or auto for 90% of what is free; sets "
        "--kv-blocks for a model with a known size per token.",
        "SIZE",
        callback=num_bytes,
    )
    kinds |= speculation_group(panel).kinds
    kinds = {name: kind for name, kind in kinds.items() if name not in without}
    return OptionGroup(kinds, lambda given: SchedulingOptions(**given))


def help_of(setting: Setting, more: str = "", default: str | None = None) -> str:
    """Return the help of a setting.  default: shown instead of the setting's own."""
    shown = setting.shown_default if default is None else default
    return _sentence(setting.words, shown, more)


def speculation_group(panel: str | None = None) -> OptionGroup:
    """Return the options of speculation, which make SpeculationSettings or None."""
    kinds: dict[str, Any] = {}
    for name, setting in SPECULATION_SETTINGS.items():
        default = "" if setting.default in (NODEFAULT, None) else str(setting.default)
        complete = name if name in {"draft", "acceptance"} else None
        text = _sentence(setting.words, default)
        kinds[name] = _optional(str, panel or SPECULATION, text, setting.metavar, complete=complete)
    return OptionGroup(kinds, speculation_of)


def speculation_of(given: Mapping[str, Any]) -> SpeculationSettings | None:
    """Return the settings of speculation, or None without any.

    Raises:
        BatchdecodeError: a value is not allowed, or --draft is missing.
    """
    values = {name: given[name] for name in SPECULATION_SETTINGS if given.get(name) is not None}
    if not values:
        return None
    if "draft" not in values:
        raise BatchdecodeError(
            f"--{next(iter(values)).replace('_', '-')} has no effect without --draft"
        )
    if "draft_tree" in values:
        parse_tree(values["draft_tree"])
    try:
        return msgspec.convert(values, SpeculationSettings, strict=False)
    except msgspec.ValidationError as error:
        name = str(error).rpartition("`$.")[2].rstrip("`")
        allowed, value = SPECULATION_SETTINGS[name].allowed, values[name]
        raise BatchdecodeError(
            f"--{name.replace('_', '-')} must be {allowed}, not {value}"
        ) from None
