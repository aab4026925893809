"""The Result of a row, with its constraint checked again."""

from functools import cache, lru_cache

from batcher.decoding.constraints import MAX_CACHED, ConstraintCompiler
from batcher.decoding.grammars import ConstraintSource
from batcher.decoding.verification import UNDECIDED, Judgement, Look, Verifier
from batcher.errors import BatchdecodeError, Failure
from batcher.models.tokenizers import ByteTokenizer
from batcher.remote.inputs import RemoteSequence
from batcher.result import ErrorInfo, FinishReason, Result, StepTimes, Usage
from batcher.scheduling.sequence import NO_SLOT


def result_of(
    row: RemoteSequence, reason: FinishReason, failure: Failure | None, step: int
) -> Result:
    """Return the result of a row that has ended with `step`; failure: why it failed, if it did."""
    judged = Judgement()
    if failure is None and row.slot != NO_SLOT:
        judged = _judge(row, reason)
    if judged.failure is not None:
        reason, failure = "error", judged.failure
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
        constraint=judged.constraint,
        constraint_check=judged.check,
        reasoning=reply.reasoning,
        refusal=reply.refusal,
        tool_calls=reply.tool_calls,
        function_call=reply.function_call,
    )


def _judge(row: RemoteSequence, reason: FinishReason) -> Judgement:
    """Check an answer against its constraint, which many servers ignore.

    Calls of tools are not texts, and keep none.
    """
    reply, source = row.reply, row.reply.constraint
    if source is None or reply.tool_calls or reply.function_call:
        return Judgement()
    stop = reply.stop_reason if isinstance(reply.stop_reason, str) else ""
    output = (reply.text.removesuffix(stop) + stop).encode(errors="replace")
    is_ended = reason == "stop" and reply.stop_reason is None
    look = _look_at(source, output)
    verifier = _verifier_of(source)
    return verifier.judge(output, look, is_ended=is_ended, accepts=lambda: False)


_verifier_of = lru_cache(MAX_CACHED)(Verifier)


@cache
def _grammars() -> ConstraintCompiler:
    """Return what compiles grammars for texts whose tokens are their bytes, and EOS."""
    return ConstraintCompiler(ByteTokenizer(), 257, (256,))


def _look_at(source: ConstraintSource, output: bytes) -> Look:
    """Return what is wrong with an output.

    The second check of our own outputs judges, and llguidance where that has no opinion, as it had
    no part in making this output.
    """
    try:
        look = _verifier_of(source).look(output)
        if look.is_decided or source.kind == "json_schema":  # whose grammar has one way to write
            return look
        matcher = _grammars().compile(source).matcher.deep_copy()
    except (BatchdecodeError, ImportError):  # the server may know other dialects
        return UNDECIDED
    is_kept = matcher.try_consume_tokens([*output]) == len(output) and matcher.is_accepting()
    if matcher.is_error():  # a limit of llguidance
        return UNDECIDED
    return Look(None if is_kept else "the grammar does not accept it")
