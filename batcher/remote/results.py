"""What a row has come to, as the result of its sample."""

from batcher.errors import Failure
from batcher.remote.sequence import RemoteSequence
from batcher.result import ErrorInfo, FinishReason, Result, StepTimes, Usage
from batcher.scheduling.sequence import NO_SLOT


def result_of(
    row: RemoteSequence, reason: FinishReason, failure: Failure | None, step: int
) -> Result:
    """Return the result of a row that has ended with `step`; failure: why, if that is so."""
    reply, request = row.reply, row.request
    num_prompt_tokens = reply.prompt_tokens
    if num_prompt_tokens is None:
        num_prompt_tokens = row.num_prompt_tokens
    error = None
    if failure is not None:
        where = "" if row.slot == NO_SLOT else f"step {step}: "
        error = ErrorInfo(failure.code, f"{where}{failure.message}", status=failure.status)
    lacks_logprobs = not reply.logprobs and reply.num_tokens > 0
    return Result(
        id=row.id,
        index=row.index,
        text=reply.text,
        tokens=reply.token_ids if row.slot != NO_SLOT else [],
        finish_reason=reason,
        stop_reason=reply.stop_reason,
        usage=Usage(num_prompt_tokens, reply.num_tokens),
        slot=None if row.slot == NO_SLOT else row.slot,
        steps=StepTimes(row.arrived_step, row.admitted_step, row.first_token_step, step),
        error=error,
        logprobs=None if request.logprobs is None or lacks_logprobs else reply.logprobs,
        reasoning=reply.reasoning,
        refusal=reply.refusal,
        tool_calls=reply.tool_calls,
        function_call=reply.function_call,
    )
