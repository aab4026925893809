"""What a sequence that has ended is given."""

from batcher.decoding.stops import StopMatch, find_match
from batcher.errors import InvariantError
from batcher.models.base import Tokenizer, join_bytes
from batcher.request import ErrorInfo, FinishReason, Result, StepTimes, Usage
from batcher.sequence import Sequence


def make_result(
    sequence: Sequence,
    tokens: list[int],
    step: int,
    reason: FinishReason,
    failure: str | None,
    tokenizer: Tokenizer,
) -> Result:
    """Return the result of `sequence`, which generated `tokens` and ended in `step`.

    failure: what its model did wrong, if that is the reason.
    """
    match = _match(sequence, tokens, tokenizer) if reason == "stop" else None
    text = join_bytes(tokens, tokenizer.token_bytes) if match is None else match.text
    admitted = sequence.admitted_step
    return Result(
        id=sequence.id,
        index=sequence.index,
        text=text.decode("utf-8", "replace"),
        tokens=tokens,
        finish_reason=reason,
        stop_reason=None if match is None else match.reason,
        usage=Usage(len(sequence.prompt_tokens), len(tokens)),
        slot=sequence.slot,
        steps=StepTimes(sequence.arrived_step, admitted, admitted if tokens else None, step),
        error=None if failure is None else ErrorInfo("model-error", f"step {step}: {failure}"),
    )


def _match(sequence: Sequence, tokens: list[int], tokenizer: Tokenizer) -> StopMatch:
    match = find_match(sequence.stops, tokens, tokenizer)
    if match is None:
        raise InvariantError(f"request {sequence.id!r} was stopped by none of its stops")
    return match
