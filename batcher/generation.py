"""`generate` and `generate_many`: continue a prompt with a model or an LLM.

Token ids give token ids, and text gives text.
"""

from collections.abc import Iterable, Mapping
from typing import Any, cast, overload

from batcher.engine import Engine
from batcher.errors import BatchdecodeError, ModelError, RequestError
from batcher.foreign import has_attribute
from batcher.models.base import Model
from batcher.models.callables import LLM, CallSettings, LLMModel, checked_settings
from batcher.models.loading import as_model, check_description, missing_methods
from batcher.request import CONSTRAINT_FIELDS, SAMPLING_FIELDS, TO_THE_END, Request
from batcher.requests.validation import ModelCapabilities, find_problems, num_slots_needed, suggest
from batcher.result import Result

# Further arguments of `generate` and `generate_many`: these fields of a Request, as defined in
# docs/reference/requests-and-results.md.  `temperature` is 1 by default, and the token ids of
# `logit_bias` may be numbers.
SAMPLING = (
    *SAMPLING_FIELDS,
    *("stop_token", "stop_sequence", "stop", "ignore_eos"),
    *CONSTRAINT_FIELDS,
)


@overload
def generate(prompt: str, model: LLM | Model | str, **options: Any) -> str: ...


@overload
def generate(prompt: Iterable[int], model: LLM | Model | str, **options: Any) -> list[int]: ...


def generate(
    prompt: str | Iterable[int],
    model: LLM | Model | str,
    *,
    max_tokens: int | None = None,
    call_settings: CallSettings | None = None,
    **sampling: Any,  # of SAMPLING
) -> str | list[int]:
    """Return a sample of the model's continuation: token ids up to and including the stop token.

    For a text prompt, return the text without the stop.  Each token is drawn from the softmax of
    the logits; with `temperature=0` it is the most likely one.  The prompt and `seed` determine the
    sample, which is the first one of `generate_many`.

    model: an LLM, a Model that gives logits, or a name that `load_model` takes.
    max_tokens: the most tokens to generate; None: up to the context limit, or 4,096 without one.
    call_settings: how to call an LLM.
    sampling: how to choose tokens, and further limits and stops.

    Raises:
        BatchdecodeError: `model` failed, or an argument is invalid.
    """
    request = _request(prompt, max_tokens, 1, sampling)
    batch_size = num_slots_needed(request)
    [result] = _results(_model(model, request, call_settings), request, batch_size=batch_size)
    return result.text if isinstance(prompt, str) else result.token_ids


@overload
def generate_many(prompt: str, model: LLM | Model | str, n: int, **options: Any) -> list[str]: ...


@overload
def generate_many(
    prompt: Iterable[int], model: LLM | Model | str, n: int, **options: Any
) -> list[list[int]]: ...


def generate_many(
    prompt: str | Iterable[int],
    model: LLM | Model | str,
    n: int,
    *,
    max_tokens: int | None = None,
    batch_size: int | None = None,
    call_settings: CallSettings | None = None,
    **sampling: Any,  # of SAMPLING
) -> list[str] | list[list[int]]:
    """Return `n` independent samples; each is determined by its number and `seed`.

    batch_size: samples decoded at once; by default the number of parallel calls of an LLM.
    The other arguments are those of `generate`.

    Raises:
        BatchdecodeError: `model` failed, or an argument is invalid.
    """
    call_settings = checked_settings(call_settings)
    request = _request(prompt, max_tokens, n, sampling)
    if batch_size is None:
        batch_size = max(call_settings.max_concurrency, num_slots_needed(request))
    results = _results(_model(model, request, call_settings), request, batch_size=batch_size)
    if isinstance(prompt, str):
        return [result.text for result in results]
    return [result.token_ids for result in results]


def _model(model: LLM | Model | str, request: Request, call_settings: CallSettings | None) -> Model:
    # an LLM is asked about a prompt of ids in `request` first
    if isinstance(model, str) or has_attribute(model, "forward"):
        return as_model(model)
    missing = missing_methods(model)
    if missing:
        raise BatchdecodeError(f"{model!r} is not an LLM: it lacks {' and '.join(missing)}")
    if isinstance(model, type):
        raise BatchdecodeError(f"{model!r} is a class: pass an instance of it")
    probe = None if isinstance(request.prompt, str) else cast(list[int], request.prompt)
    made = LLMModel(cast(LLM, model), None, call_settings, probe=probe)
    check_description(made)
    return made


def _request(
    prompt: str | Iterable[int], max_tokens: int | None, n: int, sampling: Mapping[str, Any]
) -> Request:
    for name in sampling:
        if name not in SAMPLING:
            hint = suggest(name, SAMPLING) or f"known: {', '.join(SAMPLING)}"
            raise BatchdecodeError(f"{name!r} is not a sampling field; {hint}")
    fields: dict[str, Any] = {"temperature": 1.0, **sampling}
    biases = fields.get("logit_bias")
    if isinstance(biases, Mapping):  # with ids as a Request has them, unless one is there twice
        named = {str(key) if type(key) is int else key: bias for key, bias in biases.items()}
        fields["logit_bias"] = named if len(named) == len(biases) else dict(biases)
    request = Request(
        prompt=prompt if isinstance(prompt, str) or not isinstance(prompt, Iterable) else [*prompt],
        max_tokens=TO_THE_END if max_tokens is None else max_tokens,
        n=n,
        **fields,
    )
    problems = find_problems(request, ModelCapabilities())
    if problems:
        raise RequestError("1", problems)
    return request


def _results(model: Model, request: Request, *, batch_size: int) -> list[Result]:
    engine = Engine(model, batch_size)
    engine.add(request)
    results: list[Result] = []
    while engine.has_work:
        for result in engine.step().results:
            if result.error is not None:
                raise ModelError(result.error.message)
            results.append(result)
    results.sort(key=lambda result: result.index)
    return results
