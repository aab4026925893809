"""The frozen records of what a run did: the engine's output, and the lines of a trace.

Every event about a request says when (step, engine time), who (id, index, role), where (slot) and
why (reason).  index: which of the request's samples or beams it is; role: the row of a sample, that
of a beam, or the negative prompt's beside a sample; "sample" is not written.
docs/trace-format.md documents each kind and each reason.
"""

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from batcher.result import ErrorInfo, FinishReason, LengthLimit, StopReason, TokenLogprob

TRACE_VERSION = 2
MAX_WORKERS = 2**10  # of a run

Count = Annotated[int, Meta(ge=0)]
Seconds = Annotated[float, Meta(ge=0)]

ArriveReason = Literal["input", "follow", "turn"]
AdmitReason = Literal["empty", "refill"]
PreemptReason = Literal["kv", "priority", "deadline"]
BlockedReason = Literal["kv", "tokens", "preemption", "batch", "rate", "concurrency"]
RetryReason = Literal["overload", "connection", "timeout", "answer"]
ConcurrencyReason = Literal["overload", "success"]
SpeculateReason = Literal["gain", "cost", "failure"]
Role = Literal["sample", "beam", "negative"]
Layout = Literal["ragged", "padded", "remote"]
EndReason = FinishReason | Literal["unused", "lost"]
RestartReason = Literal["killed", "exited", "lost"]


class SequenceName(Struct, frozen=True, gc=False, omit_defaults=True):
    """Which sequence is meant, beside the one that an event is about; see above."""

    id: str
    index: int
    role: Role = "sample"


class RunEvent(Struct, frozen=True, tag="run", tag_field="event", kw_only=True):
    """The first line of a trace: all that is needed to reproduce the run.

    scheduling: SchedulingSettings that are not the default, without the policy.
    step_time: what `time` is: the name of a StepTime and its settings; {} if a step lasts 1.0.
    layout: whether the model computes padding beside the tokens of a step; "remote" if a server
    answers each row in its own time, so that a step gives a row what a ReceiveEvent says.
    speculation: where drafts come from, see SpeculationSettings; {} if there are none.
    workers: how many engines decode the input side by side, each with `batch` slots of its own.
    defaults: of the fields of requests, where they are not the usual ones.
    """

    version: int = TRACE_VERSION
    batch: int
    policy: str = "fcfs"
    model: str
    settings: dict[str, Any]
    scheduling: dict[str, Any] = {}
    step_time: dict[str, Any] = {}
    layout: Layout = "ragged"
    speculation: dict[str, Any] = {}
    workers: int = 1
    defaults: dict[str, Any] = {}


class _Event(
    Struct,
    frozen=True,
    gc=False,
    omit_defaults=True,
    tag_field="event",
    tag=lambda name: name.removesuffix("Event").lower(),
    kw_only=True,
):
    """An event; its kind is the name of its record.

    worker: which of the workers of the run it is of; None where there is one, and within a worker.
    """

    worker: int | None = None


class SampleEvent(_Event, frozen=True):
    """An event about a request; see above."""

    step: int
    time: Seconds
    id: str
    index: int


class ArriveEvent(SampleEvent, frozen=True):
    """A sample, or all beams of a request together, joined the waiting queue.

    With max_tokens 0 it finished without that.

    `step` is the first step that starts at or after its arrival, `time` the arrival itself.  A
    request is read only when a slot is free for it, so this line may follow lines of later steps.
    Reason: "input" (the file gave the arrival time), "follow" (it came while the run was going on)
    or "turn" (it waited for the turn of its session before it).
    deadline: when it was to have ended, if it says so; in seconds, as `time`.
    dropped_turns: how many of the oldest turns of its session it does not go on from, since they
    had no room in the context; dropped_tokens: how many tokens these had.
    default_limit: whether the request states no max_tokens.
    """

    reason: ArriveReason
    prompt_tokens: Count
    max_tokens: Count
    deadline: float | None = None
    dropped_turns: Count = 0
    dropped_tokens: Count = 0
    default_limit: bool = False


class AdmitEvent(SampleEvent, frozen=True):
    """A sequence was given a slot.

    Reason: "refill" (the step before still used the slot) or "empty" (the slot was idle).
    generated: how many tokens it had generated before it was preempted; they are computed again.
    cached: how many of its tokens need not be computed, since blocks that hold them were found.
    cached_from: who computed the last token of these blocks, which may be the sequence itself.
    left: how many of the others this step leaves to later ones; if none, it gives a token.
    tokens: how many it begins with, where its `arrive` does not say: those of a negative prompt,
    and of a prompt with what a constraint forces behind it.
    """

    slot: Count
    reason: AdmitReason
    role: Role = "sample"
    generated: Count = 0
    cached: Count = 0
    left: int = 0
    tokens: Count = 0
    cached_from: SequenceName | None = None


class PrefillEvent(SampleEvent, frozen=True):
    """A step computed `tokens` more of what an admitted sequence starts with, and left `left`.

    With none left it gives a token.  No such line for what the step of an admission computes.
    """

    slot: Count
    tokens: Count
    left: int
    role: Role = "sample"


class PreemptEvent(SampleEvent, frozen=True):
    """A running sequence lost its slot and its blocks before `step`, and waits again.

    Reason: "kv" (no block was free), "priority" (one that waits has a smaller one) or "deadline"
    (one that waits would have missed an earlier one).  for_id, for_index: for which sequence.
    tokens: how many were computed that have to be computed again, unless blocks are found.
    generated: how many of its own it has; none of them is lost.
    """

    slot: Count
    reason: PreemptReason
    for_id: str
    for_index: int
    tokens: Count
    generated: Count
    role: Role = "sample"


class BlockedEvent(SampleEvent, frozen=True):
    """From `step` on a slot was free for the first of the waiting queue, and it was not admitted.

    Those behind it wait until it is admitted, or until another event says otherwise.
    Reason: "kv" (it needs `blocks` and too few are free), "tokens" (nothing was left of what the
    step may compute), "preemption" (the step preempted a sequence), "batch" (static batching waits
    for the last row); of what is asked of a server, "rate" (it is too soon after the one before
    it) and "concurrency" (as many are in flight as a ConcurrencyEvent allows).
    """

    reason: BlockedReason
    blocks: Count = 0


class StepsEvent(_Event, frozen=True):
    """What each of the steps from `step` on computed: lists of equal length, one item for each.

    Written if a step may last another time than 1.0, blocks or tokens are limited, or the layout is
    padded; it may follow lines about later steps.  ends: when it ended.  decodes: rows that
    computed one token after another that they had generated.  prefills: other tokens computed.
    rows: all rows computed.  blocks: how many were held by sequences.  prefill_padding,
    decode_padding: positions that rows of equal length would have computed, or read, beside the
    real ones; those of prefills are computed if the layout is padded.
    drafts: of `prefills`, those that are drafts; only where there are any.
    Of times on the wall alone, seconds: how long it took; kv_read, prefill_work: as in StepTime.
    """

    step: int
    ends: list[float]
    decodes: list[int]
    prefills: list[int]
    rows: list[int]
    blocks: list[int]
    prefill_padding: list[int]
    decode_padding: list[int]
    drafts: list[int] | None = None
    seconds: list[float] | None = None
    kv_read: list[int] | None = None
    prefill_work: list[int] | None = None


class FinishEvent(SampleEvent, frozen=True):
    """A sequence ended; `step` generated its last token and `time` is when that step began.

    `slot` is None if it never held one.  `tokens` counts what it generated.  Reason: as in its
    result, or "unused" for a sequence that has none of its own: a beam beyond the n that were asked
    for, or a negative prompt; "lost": see RestartEvent.  limit, error: as in its result.
    prompt_tokens: of its prompt, where a server counts them and its `arrive` could not say.
    """

    slot: Count | None
    reason: EndReason
    stop_reason: StopReason
    tokens: Count
    role: Role = "sample"
    limit: LengthLimit | None = None
    prompt_tokens: Count | None = None
    error: ErrorInfo | None = None


class JumpEvent(SampleEvent, frozen=True):
    """A constraint left only one token several times running; `tokens` were added in one step.

    They come after the token that the step chose, or, in the step that admits the row, before it.
    """

    slot: Count
    tokens: Count


class ReceiveEvent(SampleEvent, frozen=True):
    """By the end of the step `tokens` of the row have come from the server that answers it.

    A row of such a run is given no others.  The first line of a row tells that its prompt is
    computed, of which its `admit` has left 1 token or more.
    """

    slot: Count
    tokens: Count


class RetryEvent(SampleEvent, frozen=True):
    """What was asked of a server for the row has failed in this step, before any token came.

    Reason: "overload" (it refused, since it has too much to do), "connection" (there was none, or
    it broke off), "timeout" (nothing came for too long) or "answer" (it was no answer).
    attempt: the number of the one that failed, from 1.  delay: how many seconds the next one waits
    at least.
    """

    slot: Count
    reason: RetryReason
    attempt: Count
    delay: float


class DraftEvent(SampleEvent, frozen=True):
    """The step computes `tokens` drafts behind the token that the row was given last.

    position: that of the first draft, counted from 0 and from the beginning of the prompt.
    parents: if they are a tree, for each the number of the draft that it follows, the first being
    1; 0 for the token that the row was given last.
    """

    slot: Count
    position: Count
    tokens: Count
    parents: tuple[int, ...] = ()


class AcceptEvent(SampleEvent, frozen=True):
    """The first `tokens` drafts of the row are what it is given: as many tokens more than one.

    position: that of the first of them.  drafts: their numbers, if the drafts are a tree.
    """

    slot: Count
    position: Count
    tokens: Count
    drafts: tuple[int, ...] = ()


class RollbackEvent(SampleEvent, frozen=True):
    """The other `tokens` drafts of the row, from `position` on, were rejected, and are undone.

    blocks: how many it gives back that it had taken for them.
    """

    slot: Count
    position: Count
    tokens: Count
    blocks: Count = 0


class SpeculateEvent(SampleEvent, frozen=True):
    """From the next step on, `tokens` drafts are wanted for the row in each step.

    Reason: "gain" (more are worth their time), "cost" (fewer are, or none is) or "failure" (what
    proposes drafts has failed; there are none any more).
    """

    slot: Count
    tokens: Count
    reason: SpeculateReason


class ForkEvent(SampleEvent, frozen=True):
    """From the next step on, the beam in `slot` continues what the beam `parent` was."""

    slot: Count
    parent: Count


class ConcurrencyEvent(_Event, frozen=True):
    """From now on at most `limit` rows are asked of a server at once.

    Reason: "overload" (it has refused one) or "success" (it has answered as many as the limit was).
    """

    step: int
    time: Seconds
    limit: int
    reason: ConcurrencyReason


class DropEvent(SampleEvent, frozen=True):
    """A sample that had finished for `reason` has no result: with best_of, others are better."""

    reason: FinishReason


class TokenEvent(_Event, frozen=True):
    """Tokens that a step gave to a sample, and the text that can no longer be taken back by then.

    Not part of a trace: `run --stream` writes it among the results.  tokens: None if a server does
    not tell them.  state: where the text was generated, if the request names states.  logprobs: of
    the tokens, if the request asks for them.
    """

    step: int
    id: str
    index: int
    tokens: list[int] | None
    text: str
    state: str | None = None
    logprobs: list[TokenLogprob] | None = None


class RejectEvent(SampleEvent, frozen=True):
    """A line of the input was no valid request and became an error result; reason: its code."""

    reason: str


class RestartEvent(_Event, frozen=True):
    """A worker has died, and another one is in its place, which goes on with `step` at `time`.

    What it had not ended is decoded again, by whichever worker has it then: whoever reads a trace
    ends it there with the reason "lost", which no other line has.
    Reason: "killed" (by a signal, which is the code), "exited" (code: its exit status) or "lost"
    (nothing more was heard of it).
    """

    step: int
    time: Seconds
    reason: RestartReason
    code: int = 0

    @property
    def last_step(self) -> int:
        """The last step of the worker that has died, behind which a view marks it; 0 for none."""
        return max(self.step - 1, 0)


class EndEvent(_Event, frozen=True):
    """The last line of a trace of a run, or of one of its workers, that came to its end."""

    steps: Count
    time: Seconds
    tokens: Count
    requests: Count


RequestEvent = (
    ArriveEvent
    | AdmitEvent
    | PrefillEvent
    | PreemptEvent
    | BlockedEvent
    | JumpEvent
    | ReceiveEvent
    | RetryEvent
    | DraftEvent
    | AcceptEvent
    | RollbackEvent
    | SpeculateEvent
    | ForkEvent
    | FinishEvent
    | ConcurrencyEvent
    | DropEvent
    | RejectEvent
    | StepsEvent
    | RestartEvent
)
Event = RunEvent | RequestEvent | EndEvent
SequenceEvent = (
    ArriveEvent
    | AdmitEvent
    | PrefillEvent
    | PreemptEvent
    | JumpEvent
    | ReceiveEvent
    | DraftEvent
    | AcceptEvent
    | FinishEvent
)
Decision = (
    AdmitEvent
    | PrefillEvent
    | PreemptEvent
    | BlockedEvent
    | DraftEvent
    | AcceptEvent
    | SpeculateEvent
    | FinishEvent
)
