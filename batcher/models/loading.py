"""From what a person names to a Model: `simulated`, `package.module:name`, or a Python object."""

import sys
from collections.abc import Mapping
from difflib import get_close_matches
from importlib import import_module
from pathlib import Path
from typing import Any, cast

import msgspec

from batcher.errors import BatchdecodeError, describe
from batcher.models.base import Model
from batcher.models.callable import CallableModel, ModelNext
from batcher.models.checked import CheckedModel
from batcher.models.simulated import SimulatedModel, SimulatedSettings
from batcher.request import MAX_INT


def load_model(spec: str, settings: Mapping[str, Any], seed: int | None) -> Model:
    """Return the model `spec` names.

    spec: "simulated", made with `settings` and `seed` (which wins over the seed in `settings`), or
    "package.module:name" of a callable, a Model or a class of either; the current folder is
    importable.

    Raises:
        BatchdecodeError: there is no such model, or these are not its settings.
    """
    if spec == "simulated":
        given = dict(settings) if seed is None else {**settings, "seed": seed}
        try:
            return SimulatedModel(msgspec.convert(given, SimulatedSettings))
        except msgspec.ValidationError as error:
            known = ", ".join(SimulatedSettings.__struct_fields__)
            raise BatchdecodeError(f"simulated model: {error} (settings: {known})") from None
    if seed is not None:
        raise BatchdecodeError(f"a seed is a setting of the simulated model; {spec} takes none")
    return as_model(_import_object(spec), spec)


def as_model(model: object, name: str | None = None) -> Model:
    """Return `model` if it is a Model, else a Model that calls it; a class is instantiated first.

    Raises:
        BatchdecodeError: it is neither, or the class cannot be instantiated.
    """
    if isinstance(model, type):
        model = _instance(model)
    if isinstance(model, SimulatedModel | CallableModel | CheckedModel):
        return model
    adapted: Model
    if hasattr(model, "forward") and hasattr(model, "allocate"):
        try:
            adapted = CheckedModel(cast(Model, model))
        except AttributeError as error:
            raise BatchdecodeError(f"{name or repr(model)} is no Model: {error}") from None
    elif callable(model):
        adapted = CallableModel(cast(ModelNext, model), name)
    else:
        raise BatchdecodeError(f"{name or repr(model)} is neither a Model nor callable")
    _check_description(adapted)
    return adapted


def _check_description(model: Model) -> None:
    """Make sure that a model says of itself what the engine builds on.

    Raises:
        BatchdecodeError: it does not.
    """
    size, eos = model.vocab_size, model.eos_token_id
    faults = {
        "name is not a string": not isinstance(model.name, str),
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
    try:
        msgspec.json.encode(model.settings)
    except (TypeError, ValueError) as error:
        fault = f"settings do not fit into JSON: {error}"
    if fault is not None:
        raise BatchdecodeError(f"model {model.name}: its {fault}")


def _instance(model_class: type) -> object:
    try:
        return model_class()
    except (Exception, SystemExit) as error:  # whatever the class's own code raises
        message = f"cannot make a {model_class.__name__}: {describe(error)}"
        raise BatchdecodeError(message) from error


def _import_object(spec: str) -> object:
    module_name, separator, name = spec.partition(":")
    if not (module_name and separator and name):
        raise BatchdecodeError(f"unknown model {spec!r}, known: simulated, package.module:name")
    if not all(part.isidentifier() for part in module_name.split(".")) or module_name.endswith(
        ".py"
    ):
        raise BatchdecodeError(f"unknown model {spec!r}: {module_name!r} is no package.module")
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        found: Any = import_module(module_name)
        for part in name.split("."):
            found = getattr(found, part)
    except AttributeError as error:
        near = get_close_matches(name, dir(error.obj), n=1)
        hint = f"; did you mean {module_name}:{near[0]}?" if near else ""
        raise BatchdecodeError(f"{module_name} has no {name!r}{hint}") from None
    except (Exception, SystemExit) as error:  # whatever the module's own code raises
        raise BatchdecodeError(f"cannot import {module_name}: {describe(error)}") from error
    return cast(object, found)
