"""What a sequence that has ended is given."""

from msgspec.structs import replace

from batcher.decoding.stops.output import Output, StateText, read_output
from batcher.engine.decoded import Generated
from batcher.errors import Failure
from batcher.models.base import Tokenizer, join_bytes
from batcher.prompts import count_tokens
from batcher.result import (
    ErrorInfo,
    Result,
    Segment,
    StepTimes,
    Usage,
)
from batcher.scheduling.sequence import NEVER, NO_SLOT
from batcher.sequence import Sequence


def make_result(
    sequence: Sequence,
    generated: Generated,
    step: int,
    failure: Failure | None,
    tokenizer: Tokenizer,
) -> Result:
    """Return the result of `sequence`, which ended in `step`.

    failure: what went wrong in that step, if that is why.
    """
    tokens = generated.tokens
    arrived = None if sequence.arrived_step == NEVER else sequence.arrived_step
    admitted = None if sequence.admitted_step == NEVER else sequence.admitted_step
    automaton, has_stopped = sequence.automaton, generated.reason == "stop"
    if has_stopped and len(tokens) < sequence.request.min_tokens:  # stops do not act there
        automaton = automaton.until_eos
    output = read_output(
        automaton,
        tokens,
        tokenizer,
        has_stopped=has_stopped,
        skip=len(sequence.healing),
        keeps_stop=sequence.request.include_stop_str_in_output,
    )
    result = Result(
        id=sequence.id,
        index=sequence.index,
        text=output.text.decode("utf-8", "replace"),
        tokens=tokens,
        finish_reason=generated.reason,
        stop_reason=output.stop_reason,
        usage=Usage(sequence.num_prompt_tokens + sequence.num_healed, len(tokens)),
        slot=None if sequence.slot == NO_SLOT else sequence.slot,
        steps=StepTimes(arrived, admitted, sequence.first_token_step if tokens else None, step),
    )
    failure = failure or generated.failure
    if sequence.is_plain and failure is None:
        return result
    return _with_more(result, sequence, generated, output, failure, tokenizer)


def _with_more(
    result: Result,
    sequence: Sequence,
    generated: Generated,
    output: Output,
    failure: Failure | None,
    tokenizer: Tokenizer,
) -> Result:
    """Return `result` with what only some requests ask for, or have to be told."""
    request, text, error = sequence.request, output.text, None
    if request.echo:
        text = _prompt_bytes(sequence, tokenizer) + text
    if failure is not None:
        error = ErrorInfo(failure.code, f"step {result.steps.finished}: {failure.message}")
    scores = sequence.prompt_logprobs
    return replace(
        result,
        text=text.decode("utf-8", "replace"),
        finish_reason=result.finish_reason if error is None else "error",
        error=error,
        cumulative_logprob=generated.cumulative_logprob,
        logprobs=generated.logprobs,
        prompt_logprobs=scores.told if scores is not None and scores.is_complete else None,
        score=generated.score,
        segments=None if output.segments is None else [*map(_segment, output.segments)],
        constraint=generated.constraint,
        constraint_check=generated.constraint_check,
    )


def _prompt_bytes(sequence: Sequence, tokenizer: Tokenizer) -> bytes:
    """Return the text of the request's own prompt, whatever its session has before it."""
    prompt = sequence.request.prompt
    if isinstance(prompt, str):
        return prompt.encode()
    num_kept = count_tokens(prompt, tokenizer) - sequence.num_healed
    tokens = sequence.prompt_tokens[sequence.num_prompt_tokens - num_kept :]
    return join_bytes(tokens, tokenizer.token_bytes) + sequence.healing


def _segment(stay: StateText) -> Segment:
    return Segment(stay.state, stay.text.decode("utf-8", "replace"), stay.tokens)
