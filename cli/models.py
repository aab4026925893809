"""Loading the model that a command's options name, with a progress bar."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from batcher.errors import BatchdecodeError
from batcher.models.base import Model
from batcher.models.loading import as_model, load_model
from batcher.remote.model import REMOTE_SCHEDULING, RemoteModel, is_server
from batcher.requests.validation import ModelCapabilities
from batcher.transformer.config import HF_SETTINGS, TRANSFORMER_SETTINGS, is_checkpoint, is_hf

from .options import ModelOptions
from .screen.terminal import can_animate, printable, progress_bar

if TYPE_CHECKING:
    from batcher.engine import Engine
    from batcher.remote.engine import RemoteEngine

    from .run.run_options import RunOptions


def load(options: ModelOptions, *, is_shown: bool = True) -> Model:
    """Return the model that the options name.  is_shown: draw a bar on a terminal."""
    name, given = options.model, options.checkpoint
    if is_server(name):
        raise BatchdecodeError(f"{name} is a server; only `batchdecode run` can use one")
    known: Mapping[str, object] = {}
    settings = options.model_settings if name == "simulated" else options.llm_settings
    if is_checkpoint(name):
        known, settings = TRANSFORMER_SETTINGS, options.transformer_settings
    elif is_hf(name):
        known, settings = HF_SETTINGS, options.hf_settings
    for setting in given:
        if setting not in known:
            models = "checkpoints (.gguf files, folders)"
            if setting not in TRANSFORMER_SETTINGS:
                models = "models of transformers (hf:...)"
            option = f"--{setting.replace('_', '-')}"
            raise BatchdecodeError(f"{option} is only for {models}, not for {name}")
    with _loading_bar(name, is_shown=is_shown) as watch:
        return load_model(name, {**settings, **given}, watch)


def open_server(
    options: "RunOptions", waiting: Callable[[], AbstractContextManager[None]]
) -> "tuple[RemoteModel, RemoteEngine]":
    """Return the model of the server that the options name, and its engine.

    waiting: a context for waits.
    """
    scheduling, name = options.scheduling, options.model
    unfit = {**options.checkpoint, **scheduling.given, "call_timeout": options.call_timeout}
    for option, value in unfit.items():
        if value is not None and option not in REMOTE_SCHEDULING:
            raise BatchdecodeError(
                f"--{option.replace('_', '-')} has no effect on a server; set it on {name} itself"
            )
    try:
        from batcher.remote.client import remote_model_of  # noqa: PLC0415 - optional
        from batcher.remote.engine import RemoteEngine  # noqa: PLC0415 - optional
    except ImportError as error:
        needs = "a server needs httpx: pip install 'batchdecode[http]'"
        raise BatchdecodeError(f"{needs} ({error.name} is missing)") from None

    model = remote_model_of(name, options.server)
    engine = RemoteEngine(
        model,
        options.batch,
        settings=scheduling.settings(),
        is_streaming=options.stream,
        waiting=waiting,
    )
    return model, engine


def model_again(model: Model, options: ModelOptions) -> Model:
    """Return a new model with the weights of `model`, as returned by `load`."""
    if not (is_checkpoint(options.model) or is_hf(options.model)):
        return load(options)
    inner: Any = getattr(model, "inner", model)
    return as_model(inner.twin(), options.model)


def is_real(name: str) -> bool:
    return name != "simulated" and not is_server(name)


def capabilities_of(engine: "Engine | RemoteEngine", options: ModelOptions) -> ModelCapabilities:
    """Return the capabilities to check requests against, and to encode prompts.

    Raises:
        BatchdecodeError: --chat was given, and the model has no chat template.
    """
    defaults = getattr(options, "defaults", {})  # verify and draft have none
    found = replace(engine.capabilities, defaults=defaults)
    if defaults.get("special_tokens_in_text") and found.encode_with_special is None:
        raise BatchdecodeError(
            "--special-tokens-in-text needs a checkpoint or a model of transformers here; "
            f"{options.model} is neither"
        )
    if not options.chat:
        return found
    if found.served is None and found.chat_template is None:
        raise BatchdecodeError(
            f"--chat needs a model with a chat template; {options.model} has none"
        )
    return replace(found, takes_chats=True)


@contextmanager
def _loading_bar(name: str, *, is_shown: bool) -> Iterator[Callable[[int, int], None]]:
    if not (is_shown and is_checkpoint(name) and can_animate(2)):
        yield lambda _number, _total: None
        return
    from rich.markup import escape  # noqa: PLC0415 - only on a terminal

    title = escape(printable(name.rpartition("/")[2]))
    with progress_bar("loading {task.description}", title, None, has_time=False) as show:
        yield lambda number, total: show(completed=number, total=total)
