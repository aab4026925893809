"""From what a person names to a Model: `simulated`, a checkpoint, `hf:NAME`, `package.module:name`.

What adapts other models is only loaded for one of them.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeVar, get_args

import msgspec

from batcher.errors import BatchdecodeError, writable
from batcher.foreign import (
    RaisedError,
    attribute_of,
    calling,
    has_attribute,
    import_object,
    meant_server,
    raised,
)
from batcher.hf.settings import PREFIX, HFSettings, is_hf
from batcher.models.answers import shown
from batcher.models.base import Model, OutputKind, eos_token_ids_of
from batcher.models.simulated import SimulatedModel, SimulatedSettings
from batcher.models.tokenizers import checked_tokenizer
from batcher.request import MAX_INT
from batcher.settings import ONE_GROUP, CacheWindows
from batcher.transformer.settings import TransformerSettings, is_checkpoint

if TYPE_CHECKING:
    from batcher.models.calls import CallSettings
    from batcher.models.checked import CheckedModel
    from batcher.models.prefixes import PrefixModel

    Adapted = SimulatedModel | PrefixModel | CheckedModel

S = TypeVar("S", bound=msgspec.Struct)

ATTRIBUTES = ("name", "settings", "tokenizer", "vocab_size", "eos_token_id")  # of a Model
_KNOWN = "simulated, smollm2, FILE.gguf, a folder, hf:NAME, openai:URL"
_LIKE_A_NAME_OF_THE_HUB = re.compile(
    r"\w[\w.-]*/\w[\w.-]*|(distil)?gpt2(-medium|-large|-xl)?", re.ASCII
)
_LIKE_A_URL = re.compile(r"https?://.+|[\w.-]+:\d+(/.*)?", re.ASCII)
MAX_LOGITS = 2**24  # of a row: larger than any vocabulary, and a row of them is 64 MiB


def load_model(
    spec: str,
    settings: Mapping[str, Any],
    seed: int | None,
    llm_settings: Mapping[str, Any] = MappingProxyType({}),
    transformer_settings: Mapping[str, Any] = MappingProxyType({}),
    hf_settings: Mapping[str, Any] = MappingProxyType({}),
    watch: Callable[[int, int], None] = lambda _number, _total: None,
) -> Model:
    """Return the model `spec` names.

    spec: "simulated", made with `settings` and `seed` (which wins over the seed in `settings`), or
    "package.module:name" of a callable, a Model, an LLM (called as `llm_settings` say) or a class
    of one of them; the current folder is importable.  A .gguf file, a folder or `smollm2` is a
    checkpoint, which is computed as `transformer_settings` say; `watch` is called with how many of
    its tensors are read, and of how many.  `hf:` and a folder or a name of the Hub is a model of
    transformers, which is computed as `hf_settings` say.

    Raises:
        BatchdecodeError: there is no such model, or these are not its settings.
    """
    if spec == "simulated":
        given = dict(settings) if seed is None else {**settings, "seed": seed}
        return SimulatedModel(_settings(given, SimulatedSettings, "simulated model"))
    if seed is not None:
        raise BatchdecodeError(f"a seed is a setting of the simulated model; {spec} takes none")
    if is_checkpoint(spec):
        from batcher.models.checkpoints import load_transformer  # noqa: PLC0415 - see above

        made = _settings(transformer_settings, TransformerSettings, "transformer")
        return as_model(load_transformer(spec, made, watch), spec)
    if is_hf(spec):
        from batcher.models.hf import load_hf  # noqa: PLC0415 - as above

        return as_model(load_hf(spec, _settings(hf_settings, HFSettings, "hf")), spec)
    from batcher.models.calls import CallSettings  # noqa: PLC0415 - as above

    call_settings = _settings(llm_settings, CallSettings, "llm")
    meant = None
    if _LIKE_A_NAME_OF_THE_HUB.fullmatch(spec):
        meant = f"{PREFIX}{spec}"
    elif _LIKE_A_URL.fullmatch(spec):
        meant = meant_server(spec)
    if meant is not None:
        raise BatchdecodeError(f"unknown model {spec!r} (did you mean {meant}?), known: {_KNOWN}")
    return as_model(
        import_object(spec, "model", _KNOWN),
        spec,
        call_settings,
    )


def as_model(
    model: object, name: str | None = None, call_settings: "CallSettings | None" = None
) -> Model:
    """Return `model` if it is a Model, else a Model that calls it; a class is instantiated first.

    A text is what `load_model` takes to name one.

    call_settings: how an LLM is called.

    Raises:
        BatchdecodeError: it is none of these, the class cannot be instantiated, or an LLM does not
        answer.
    """
    if isinstance(model, str):
        return load_model(model, {}, None)
    try:
        made = model
        if isinstance(model, type):
            with calling(f"cannot make a {model.__name__}:"):
                made = model()
        adapted = _adapted(made, name, call_settings)
        check_description(adapted)
        adapted.tokenizer = checked_tokenizer(adapted.tokenizer, adapted.vocab_size)
    except (BatchdecodeError, KeyboardInterrupt):
        raise
    except BaseException as error:  # whatever the model's own attributes raise
        called, why = name or shown(model), raised(error)
        raise RaisedError(f"{called} cannot be used: {why}", why) from error
    return adapted


def _adapted(model: Any, name: str | None, call_settings: "CallSettings | None") -> "Adapted":
    """Return `model`, which is no class, as a Model.

    Raises:
        BatchdecodeError: it is none, or an LLM does not answer.
    """
    if isinstance(model, SimulatedModel):
        return model
    from batcher.models.callable import CallableModel  # noqa: PLC0415 - see above
    from batcher.models.checked import CheckedModel  # noqa: PLC0415 - as above
    from batcher.models.prefixes import PrefixModel  # noqa: PLC0415 - as above

    if isinstance(model, PrefixModel | CheckedModel):
        return model
    if has_attribute(model, "forward") and has_attribute(model, "allocate"):
        lacking = [needed for needed in ATTRIBUTES if not has_attribute(model, needed)]
        if lacking:
            raise BatchdecodeError(f"{name or shown(model)} is no Model: it lacks {lacking[0]}")
        checked = CheckedModel(model)
        for fault in _untrue_of(checked):
            raise BatchdecodeError(f"{name or shown(model)} says that it {fault}")
        return checked
    missing = missing_methods(model)
    if not missing:
        from batcher.models.llm import LLMModel  # noqa: PLC0415 - as above

        return LLMModel(model, name, call_settings)
    if callable(model):
        return CallableModel(model, name)
    lacks = f", which would need {missing[0]}, nor" if len(missing) == 1 else " nor"
    raise BatchdecodeError(f"{name or shown(model)} is neither a Model nor an LLM{lacks} callable")


def _untrue_of(model: "CheckedModel") -> Iterator[str]:
    """Yield what a model says that it can do, with what that lacks."""
    if model.is_paged and not callable(attribute_of(model.inner, "allocate_pages", None)):
        yield "is_paged, and lacks allocate_pages"
    if model.verifies_drafts and not model.is_paged:
        yield "verifies_drafts, and is not paged"
    if model.verifies_drafts and model.gives == "tokens":
        yield "verifies_drafts, and gives no logits"


def missing_methods(model: object) -> list[str]:
    """Return the methods that `model` lacks to be an LLM."""
    methods = ("next_token_logits", "get_stop_token_id")
    return [method for method in methods if not callable(getattr(model, method, None))]


def check_description(model: Model) -> None:
    """Make sure that a model says of itself what the engine builds on.

    Raises:
        BatchdecodeError: it does not.
    """
    fault = next(_faults_of(model), None)
    try:
        msgspec.json.encode(model.settings)
    except (TypeError, ValueError, RecursionError) as error:
        fault = f"settings do not fit into JSON: {error}"
    if fault is not None:
        name = model.name if isinstance(model.name, str) else shown(model.name)
        raise BatchdecodeError(f"model {writable(name)}: its {fault}")


def _faults_of(model: Any) -> Iterator[str]:
    """Yield what a model says wrong of itself, each as if all before were right."""
    size = model.vocab_size
    kinds = getattr(model, "KINDS", get_args(OutputKind))
    largest = MAX_INT + 1 if model.gives == "tokens" else MAX_LOGITS
    if not isinstance(model.name, str) or writable(model.name) != model.name:
        yield "name is not text"
    if model.gives not in kinds:
        yield f"gives is not one of {', '.join(kinds)}"
    if size is not None and not (_is_int(size) and size > 0):
        yield "vocab_size is neither a positive int nor None"
    yield from _faults_of_eos(model)
    if not isinstance(model.settings, dict):
        yield "settings are not a dict"
    ends = eos_token_ids_of(model)
    if size is None:
        if model.gives != "tokens":
            yield "vocab_size is None, and it gives logits"
    elif ends and max(ends) >= size:
        name = "eos_token_id" if max(ends) == model.eos_token_id else "eos_token_ids:"
        yield f"{name} {max(ends)} is not below vocab_size {size}"
    elif size > largest:
        yield f"vocab_size {shown(size)} is above {largest}"


def _faults_of_eos(model: Any) -> Iterator[str]:
    if model.eos_token_id is not None and not _is_token_id(model.eos_token_id):
        yield "eos_token_id is neither a token id nor None"
    several = attribute_of(getattr(model, "inner", model), "eos_token_ids", ())
    if not isinstance(several, list | tuple) or not all(map(_is_token_id, several)):
        yield "eos_token_ids are no list of token ids"


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_token_id(value: object) -> bool:
    return isinstance(value, int) and _is_int(value) and 0 <= value <= MAX_INT


def _settings(given: Mapping[str, Any], kind: type[S], whose: str) -> S:
    try:
        return msgspec.convert(dict(given), kind)
    except msgspec.ValidationError as error:
        known = ", ".join(kind.__struct_fields__)
        raise BatchdecodeError(f"{whose}: {error} (settings: {known})") from None


def cache_windows_of(model: Model) -> CacheWindows:
    """Return for each group of layers, each with a table of its own, how far back they read.

    A model tells that with `cache_windows`: the number of tokens, its own included, that one reads
    in the layers of a group, or None for all before it; 2 for a recurrent state, which is what the
    token before has left.  One without is a single group that reads all.

    Raises:
        BatchdecodeError: what it tells is something else.
    """
    windows = attribute_of(getattr(model, "inner", model), "cache_windows", ONE_GROUP)
    if type(windows) is tuple and windows and all(map(_is_window, windows)):
        return windows
    raise BatchdecodeError(
        f"{model.name}: cache_windows are a tuple of numbers from 1 on, or None for all tokens, "
        f"not {shown(windows)}"
    )


def _is_window(window: object) -> bool:
    return window is None or (type(window) is int and window > 0)
