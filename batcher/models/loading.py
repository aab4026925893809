"""From what a person names to a Model: `simulated`, `package.module:name`, or a Python object."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, TypeVar, cast, get_args

import msgspec

from batcher.errors import BatchdecodeError, describe
from batcher.importing import import_object
from batcher.models.answers import shown
from batcher.models.base import Model, OutputKind
from batcher.models.callable import CallableModel, ModelNext
from batcher.models.calls import CallSettings
from batcher.models.checked import CheckedModel
from batcher.models.llm import LLM, LLMModel, missing_methods
from batcher.models.simulated import SimulatedModel, SimulatedSettings
from batcher.request import MAX_INT

S = TypeVar("S", bound=msgspec.Struct)

MAX_LOGITS = 2**24  # of a row: larger than any vocabulary, and a row of them is 64 MiB


def load_model(
    spec: str,
    settings: Mapping[str, Any],
    seed: int | None,
    llm_settings: Mapping[str, Any] = MappingProxyType({}),
) -> Model:
    """Return the model `spec` names.

    spec: "simulated", made with `settings` and `seed` (which wins over the seed in `settings`), or
    "package.module:name" of a callable, a Model, an LLM (called as `llm_settings` say) or a class
    of one of them; the current folder is importable.

    Raises:
        BatchdecodeError: there is no such model, or these are not its settings.
    """
    if spec == "simulated":
        given = dict(settings) if seed is None else {**settings, "seed": seed}
        return SimulatedModel(_settings(given, SimulatedSettings, "simulated model"))
    if seed is not None:
        raise BatchdecodeError(f"a seed is a setting of the simulated model; {spec} takes none")
    call_settings = _settings(llm_settings, CallSettings, "llm")
    return as_model(import_object(spec, "model", "simulated"), spec, call_settings)


def as_model(
    model: object, name: str | None = None, call_settings: CallSettings | None = None
) -> Model:
    """Return `model` if it is a Model, else a Model that calls it; a class is instantiated first.

    call_settings: how an LLM is called.

    Raises:
        BatchdecodeError: it is none of these, the class cannot be instantiated, or an LLM does not
        answer.
    """
    if isinstance(model, type):
        model = _instance(model)
    adapted: Model
    if isinstance(model, SimulatedModel | CallableModel | LLMModel | CheckedModel):
        adapted = model
    elif hasattr(model, "forward") and hasattr(model, "allocate"):
        try:
            adapted = CheckedModel(cast(Model, model))
        except AttributeError as error:
            raise BatchdecodeError(f"{name or repr(model)} is no Model: {error}") from None
    elif not missing_methods(model):
        adapted = LLMModel(cast(LLM, model), name, call_settings)
    elif callable(model):
        adapted = CallableModel(cast(ModelNext, model), name)
    else:
        raise BatchdecodeError(f"{name or repr(model)} is {_what_it_is_not(model)}")
    check_description(adapted)
    return adapted


def check_description(model: Model) -> None:
    """Make sure that a model says of itself what the engine builds on.

    Raises:
        BatchdecodeError: it does not.
    """
    size, eos = model.vocab_size, model.eos_token_id
    kinds = ("tokens", "logits") if isinstance(model, CallableModel) else get_args(OutputKind)
    faults = {
        "name is not a string": not isinstance(model.name, str),
        f"gives is not one of {', '.join(kinds)}": model.gives not in kinds,
        "vocab_size is neither a positive int nor None": size is not None
        and not (isinstance(size, int) and size > 0),
        "eos_token_id is neither a token id nor None": eos is not None
        and not (isinstance(eos, int) and 0 <= eos <= MAX_INT),
        "tokenizer lacks encode or token_bytes": not (
            hasattr(model.tokenizer, "encode") and hasattr(model.tokenizer, "token_bytes")
        ),
    }
    fault = next((text for text, is_so in faults.items() if is_so), None)
    if fault is None and size is not None and eos is not None and eos >= size:
        fault = f"eos_token_id {eos} is not below vocab_size {size}"
    if fault is None and size is None and model.gives != "tokens":
        fault = "vocab_size is None, and it gives logits"
    largest = MAX_INT + 1 if model.gives == "tokens" else MAX_LOGITS
    if fault is None and size is not None and size > largest:
        fault = f"vocab_size {shown(size)} is above {largest}"
    try:
        msgspec.json.encode(model.settings)
    except (TypeError, ValueError, RecursionError) as error:
        fault = f"settings do not fit into JSON: {error}"
    if fault is not None:
        raise BatchdecodeError(f"model {model.name}: its {fault}")


def _what_it_is_not(model: object) -> str:
    missing = missing_methods(model)
    if len(missing) == 1:
        return f"neither a Model nor an LLM, which would need {missing[0]}, nor callable"
    return "neither a Model nor an LLM nor callable"


def _settings(given: Mapping[str, Any], kind: type[S], whose: str) -> S:
    try:
        return msgspec.convert(dict(given), kind)
    except msgspec.ValidationError as error:
        known = ", ".join(kind.__struct_fields__)
        raise BatchdecodeError(f"{whose}: {error} (settings: {known})") from None


def _instance(model_class: type) -> object:
    try:
        return model_class()
    except (Exception, SystemExit) as error:  # whatever the class's own code raises
        message = f"cannot make a {model_class.__name__}: {describe(error)}"
        raise BatchdecodeError(message) from error
