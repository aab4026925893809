"""`generate` and `generate_many`: token ids in, token ids out, from an LLM that people bring."""

from collections.abc import Sequence

from batcher.engine import Engine
from batcher.errors import BatchdecodeError, ModelError, RequestError
from batcher.models.calls import CallSettings
from batcher.models.llm import LLM, LLMModel, is_llm
from batcher.models.loading import check_description
from batcher.request import MAX_INT, Request, Result
from batcher.validation import Target, find_problems


def generate(
    prompt_tokens: Sequence[int],
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
    [tokens] = _outputs(_model(llm, prompt_tokens, call_settings), request, batch_size=1)
    return tokens


def generate_many(
    prompt_tokens: Sequence[int],
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
    call_settings = call_settings or CallSettings()
    request = _request(prompt_tokens, max_tokens, n=n, temperature=temperature, seed=seed)
    model = _model(llm, prompt_tokens, call_settings)
    return _outputs(model, request, batch_size=batch_size or call_settings.max_concurrency)


def _model(llm: LLM, prompt_tokens: Sequence[int], call_settings: CallSettings | None) -> LLMModel:
    """Return `llm` as a Model, which asks about the prompt first.

    Raises:
        BatchdecodeError: it is none, or says something wrong of itself.
    """
    if not is_llm(llm):
        message = f"{llm!r} is no LLM: it lacks next_token_logits or get_stop_token_id"
        raise BatchdecodeError(message)
    model = LLMModel(llm, None, call_settings, probe=prompt_tokens)
    check_description(model)
    return model


def _request(
    prompt_tokens: Sequence[int],
    max_tokens: int | None,
    *,
    n: int = 1,
    temperature: float = 0.0,
    seed: int = 0,
) -> Request:
    """Return the request for that.

    Raises:
        RequestError: no LLM could decode it; the engine knows more about this one.
    """
    request = Request(
        prompt=list(prompt_tokens),
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
