"""`generate` and `generate_many`: token ids in, token ids out, from an LLM that people bring."""

from collections.abc import Iterable
from typing import cast

from batcher.engine import Engine
from batcher.errors import BatchdecodeError, ModelError, RequestError
from batcher.models.calls import CallSettings, checked_settings
from batcher.models.llm import LLM, LLMModel, missing_methods
from batcher.models.loading import check_description
from batcher.request import MAX_INT, Request, Result
from batcher.validation import Target, find_problems


def generate(
    prompt_tokens: Iterable[int],
    llm: LLM,
    *,
    max_tokens: int | None = None,
    call_settings: CallSettings | None = None,
) -> list[int]:
    """Return the most likely token, one after another, up to and including the stop token.

    max_tokens: how many there are at most; None if only the stop token ends them.
    call_settings: how `llm` is called.

    Raises:
        BatchdecodeError: `llm` failed, or an argument is not valid.
    """
    request = _request(prompt_tokens, max_tokens)
    [tokens] = _outputs(_model(llm, request, call_settings), request, batch_size=1)
    return tokens


def generate_many(
    prompt_tokens: Iterable[int],
    llm: LLM,
    n: int,
    *,
    temperature: float = 1.0,
    seed: int = 0,
    max_tokens: int | None = None,
    batch_size: int | None = None,
    call_settings: CallSettings | None = None,
) -> list[list[int]]:
    """Return `n` independent samples; the number of a sample and `seed` settle what it is.

    batch_size: how many are decoded at once; by default as many as `llm` may be called at once.
    The rest is as for `generate`.

    Raises:
        BatchdecodeError: `llm` failed, or an argument is not valid.
    """
    call_settings = checked_settings(call_settings)
    request = _request(prompt_tokens, max_tokens, n=n, temperature=temperature, seed=seed)
    if batch_size is None:
        batch_size = call_settings.max_concurrency
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
    prompt_tokens: Iterable[int],
    max_tokens: int | None,
    *,
    n: int = 1,
    temperature: float = 0.0,
    seed: int = 0,
) -> Request:
    """Return the request for that; its prompt is token ids.

    Raises:
        RequestError: no LLM could decode it; the engine knows more about this one.
    """
    request = Request(
        prompt=list(prompt_tokens) if isinstance(prompt_tokens, Iterable) else prompt_tokens,
        max_tokens=MAX_INT if max_tokens is None else max_tokens,
        n=n,
        temperature=temperature,
        seed=seed,
    )
    problems = find_problems(request, Target())
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
