"""`generate` and `generate_many`: token ids in, token ids out, from an LLM that people bring."""

from collections.abc import Iterable, Mapping
from typing import Any, cast

from batcher.engine import Engine
from batcher.errors import BatchdecodeError, ModelError, RequestError
from batcher.formats.suggestions import suggest
from batcher.models.calls import CallSettings, checked_settings
from batcher.models.llm import LLM, LLMModel
from batcher.models.loading import check_description, missing_methods
from batcher.request import CONSTRAINT_FIELDS, MAX_INT, SAMPLING_FIELDS, Request
from batcher.result import Result
from batcher.validation import ModelCapabilities, find_problems, num_slots_needed

# What `generate` and `generate_many` take beside their arguments: these fields of a Request.  They
# mean what docs/requests-and-results.md says of them; `temperature` is 1 by default, and the token
# ids of `logit_bias` may be numbers.
SAMPLING = (
    *SAMPLING_FIELDS,
    *("stop_token", "stop_sequence", "stop", "ignore_eos"),
    *CONSTRAINT_FIELDS,
)


def generate(
    prompt_tokens: Iterable[int],
    llm: LLM,
    *,
    max_tokens: int | None = None,
    call_settings: CallSettings | None = None,
    **sampling: Any,  # of SAMPLING
) -> list[int]:
    """Return a sample of what `llm` goes on with, up to and including the stop token.

    Each token is drawn from the softmax of its logits; with `temperature=0` it is the likeliest.
    The prompt and `seed` settle which sample it is, the first one of `generate_many`.

    max_tokens: how many there are at most; None if only the stop token ends them.
    call_settings: how `llm` is called.
    sampling: how a token is chosen, and what else ends the output or limits it.

    Raises:
        BatchdecodeError: `llm` failed, or an argument is not valid.
    """
    request = _request(prompt_tokens, max_tokens, 1, sampling)
    batch_size = num_slots_needed(request)
    [tokens] = _outputs(_model(llm, request, call_settings), request, batch_size=batch_size)
    return tokens


def generate_many(
    prompt_tokens: Iterable[int],
    llm: LLM,
    n: int,
    *,
    max_tokens: int | None = None,
    batch_size: int | None = None,
    call_settings: CallSettings | None = None,
    **sampling: Any,  # of SAMPLING
) -> list[list[int]]:
    """Return `n` independent samples; the number of a sample and `seed` settle what it is.

    batch_size: how many are decoded at once; by default as many as `llm` may be called at once.
    The rest is as for `generate`.

    Raises:
        BatchdecodeError: `llm` failed, or an argument is not valid.
    """
    call_settings = checked_settings(call_settings)
    request = _request(prompt_tokens, max_tokens, n, sampling)
    if batch_size is None:
        batch_size = max(call_settings.max_concurrency, num_slots_needed(request))
    return _outputs(_model(llm, request, call_settings), request, batch_size=batch_size)


def _model(llm: LLM, request: Request, call_settings: CallSettings | None) -> LLMModel:
    """Return `llm` as a Model, which asks about the prompt of `request` first.

    Raises:
        BatchdecodeError: it is none, or says something wrong of itself.
    """
    missing = missing_methods(llm)
    if missing:
        raise BatchdecodeError(f"{llm!r} is no LLM: it lacks {' and '.join(missing)}")
    if isinstance(llm, type):
        raise BatchdecodeError(f"{llm!r} is a class: give an object of it")
    model = LLMModel(llm, None, call_settings, probe=cast(list[int], request.prompt))
    check_description(model)
    return model


def _request(
    prompt_tokens: Iterable[int], max_tokens: int | None, n: int, sampling: Mapping[str, Any]
) -> Request:
    """Return the request for that; its prompt is token ids.

    Raises:
        BatchdecodeError: `sampling` has what is no field of it, or, a RequestError, no LLM could
            decode the request; the engine knows more about this one.
    """
    for name in sampling:
        if name not in SAMPLING:
            hint = suggest(name, SAMPLING) or f"known: {', '.join(SAMPLING)}"
            raise BatchdecodeError(f"{name!r} does not say how tokens are chosen; {hint}")
    fields: dict[str, Any] = {"temperature": 1.0, **sampling}
    biases = fields.get("logit_bias")
    if isinstance(biases, Mapping):  # with ids as a Request has them, unless one is there twice
        named = {str(key) if type(key) is int else key: bias for key, bias in biases.items()}
        fields["logit_bias"] = named if len(named) == len(biases) else dict(biases)
    request = Request(
        prompt=list(prompt_tokens) if isinstance(prompt_tokens, Iterable) else prompt_tokens,
        max_tokens=MAX_INT if max_tokens is None else max_tokens,
        n=n,
        **fields,
    )
    problems = find_problems(request, ModelCapabilities())
    if problems:
        raise RequestError("1", problems)
    return request


def _outputs(model: LLMModel, request: Request, *, batch_size: int) -> list[list[int]]:
    """Return the tokens of every sample of `request`.

    Raises:
        BatchdecodeError: the request is not valid, or a sample failed.
    """
    engine = Engine(model, batch_size)
    engine.add(request)
    results: list[Result] = []
    while engine.has_work:
        for result in engine.step().results:
            if result.error is not None:
                raise ModelError(result.error.message)
            results.append(result)
    results.sort(key=lambda result: result.index)
    return [result.tokens for result in results]
