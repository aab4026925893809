"""The events of a run: the engine's output, and the lines of a trace.

Every event about a request has when (step, engine time), which one (id, index, role), where (slot)
and why (reason).  index: of the sample or beam in its request.  role: a row of a sample, of a beam,
or of a sample's negative prompt; the default "sample" is not written.
docs/reference/trace-format.md documents each kind and each reason.
"""

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct, field

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
    """The name of another sequence than the one of the event."""

    id: str
    index: int
    role: Role = "sample"


class RunEvent(Struct, frozen=True, tag="run", tag_field="event", kw_only=True, omit_defaults=True):
    """The first line of a trace: all settings needed to reproduce the run.

    scheduling: SchedulingSettings that differ from the default, without the policy.
    step_time: the name of a StepTime and its settings; {} if a step lasts 1.0.
    layout: "padded" if the model computes padding; "remote" if a server answers each row in its own
    time, so that a row receives the tokens of its ReceiveEvents.
    speculation: the drafter, see SpeculationSettings; {} without drafts.
    workers: engines that decode the input in parallel, each with `batch` slots.
    defaults: of request fields, where they are not the usual ones.
    """

    version: int = field(default_factory=lambda: TRACE_VERSION)  # always written, as is the policy
    batch: int
    policy: str = field(default_factory=lambda: "fcfs")
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
    """An event; its kind is the name of its class.

    worker: the worker of the run; None in a run of one, and within a worker.
    """

    worker: int | None = None


class SampleEvent(_Event, frozen=True):
    """An event about a request; see the module."""

    step: int
    time: Seconds
    id: str
    index: int


class ArriveEvent(SampleEvent, frozen=True):
    """A sample, or all beams of a request together, joined the waiting queue.

    With max_tokens 0 it finished instead.

    `step` is the first step that starts at or after its arrival, `time` the arrival itself.  A
    request is read only when a slot is free for it, so this line may follow lines of later steps.
    Reason: "input" (the input has the arrival time), "follow" (it came during the run) or "turn"
    (it waited for the previous turn of its session).
    deadline: in seconds like `time`, if it has one.
    dropped_turns: the oldest turns of its session that the context had no capacity for;
    dropped_tokens: their tokens.
    default_limit: whether the request has no max_tokens.
    """

    reason: ArriveReason
    prompt_tokens: Count
    max_tokens: Count
    deadline: float | None = None
    dropped_turns: Count = 0
    dropped_tokens: Count = 0
    default_limit: bool = False


class AdmitEvent(SampleEvent, frozen=True):
    """A sequence received a slot.

    Reason: "refill" (the previous step used the slot) or "empty" (the slot was idle).
    generated: tokens generated before a preemption, which are computed again.
    cached: prefix-cache hits: tokens that need not be computed.
    cached_from: the sequence that computed the last cached token; it may be the sequence itself.
    left: the known tokens that this step leaves to later ones; with 0 it receives a token.
    tokens: tokens at the start where its ArriveEvent lacks them: of a negative prompt, and of a
    prompt with tokens that a constraint forces after it.
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
    """A step computed `tokens` more known tokens of an admitted sequence, and left `left`.

    With 0 left the sequence receives a token.  The step of an admission has no such line.
    """

    slot: Count
    tokens: Count
    left: int
    role: Role = "sample"


class PreemptEvent(SampleEvent, frozen=True):
    """A running sequence lost its slot and its blocks before `step`, and waits again.

    Reason: "kv" (no block was free), "priority" (a waiting request has a lower value) or "deadline"
    (a waiting request would have missed an earlier one).  for_id, for_index: the beneficiary.
    tokens: computed tokens, which must be computed again unless they are cached.
    generated: its generated tokens; none is lost.
    """

    slot: Count
    reason: PreemptReason
    for_id: str
    for_index: int
    tokens: Count
    generated: Count
    role: Role = "sample"


class BlockedEvent(SampleEvent, frozen=True):
    """From `step` on the head of the waiting queue was not admitted though a slot was free.

    The requests behind it wait until it is admitted or another event gives another reason.
    Reason: "kv" (it needs `blocks` and too few are free), "tokens" (the budget of the step was used
    up), "preemption" (the step preempted a sequence), "batch" (static batching waits for the last
    row); with servers "rate" (the rate limit) and "concurrency" (the limit of a ConcurrencyEvent).
    """

    reason: BlockedReason
    blocks: Count = 0


class StepsEvent(_Event, frozen=True):
    """What each step from `step` on computed: lists of equal length, one item per step.

    Written if steps do not always last 1.0, if blocks or tokens are limited, or if the layout is
    padded; it may follow lines of later steps.  ends: end times.  decodes: rows that computed one
    generated token.  prefills: other computed tokens.  rows: all computed rows.  blocks: held
    blocks.
    prefill_padding, decode_padding: padding positions that equally long rows would compute, or
    read; in a padded layout those of prefills are computed.
    drafts: the drafts among `prefills`; only if there are any.
    Only for wall times, in seconds: how long the step took; kv_read, prefill_work: as in StepTime.
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
    """A sequence ended; `step` generated its last token, and `time` is the start of that step.

    `slot` is None if it never held one.  `tokens`: its generated tokens.  Reason: as in its result,
    "unused" for a sequence without a result (a beam beyond n, or a negative prompt), or "lost" (see
    RestartEvent).  limit, error: as in its result.
    prompt_tokens: of its prompt, if only a server could count them.
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
    """A constraint forced several tokens in a row; one step added all `tokens` of them.

    They follow the token that the step chose; in the step of an admission they precede it.
    """

    slot: Count
    tokens: Count


class ReceiveEvent(SampleEvent, frozen=True):
    """By the end of the step the server has sent `tokens` more tokens of the row.

    A row of such a run receives no other tokens.  Its first ReceiveEvent ends the prefill, of which
    its AdmitEvent has left at least 1 token.
    """

    slot: Count
    tokens: Count


class RetryEvent(SampleEvent, frozen=True):
    """An attempt to send the row to a server failed in this step, before any token came.

    Reason: "overload" (the server refused), "connection" (none, or broken), "timeout" (no answer in
    time) or "answer" (an invalid answer).
    attempt: the number of the failed attempt, from 1.  delay: the pause before the next one in
    seconds.
    """

    slot: Count
    reason: RetryReason
    attempt: Count
    delay: float


class DraftEvent(SampleEvent, frozen=True):
    """The step verifies `tokens` drafts after the row's last token.

    position: of the first draft, counted from 0 at the start of the prompt.
    parents: for a tree, by draft, the number of its parent draft from 1; 0 for the row's last
    token.
    """

    slot: Count
    position: Count
    tokens: Count
    parents: tuple[int, ...] = ()


class AcceptEvent(SampleEvent, frozen=True):
    """The first `tokens` drafts of the row were accepted: it receives as many extra tokens.

    position: of the first of them.  drafts: their numbers, for a tree.
    """

    slot: Count
    position: Count
    tokens: Count
    drafts: tuple[int, ...] = ()


class RollbackEvent(SampleEvent, frozen=True):
    """The other `tokens` drafts of the row, from `position` on, were rejected and are undone.

    blocks: KV blocks freed that these drafts had taken.
    """

    slot: Count
    position: Count
    tokens: Count
    blocks: Count = 0


class SpeculateEvent(SampleEvent, frozen=True):
    """From the next step on, each step proposes `tokens` drafts for the row.

    Reason: "gain" (more are worth their time), "cost" (fewer are) or "failure" (the drafter failed;
    there are no more drafts).
    """

    slot: Count
    tokens: Count
    reason: SpeculateReason


class ForkEvent(SampleEvent, frozen=True):
    """From the next step on, the beam in `slot` continues the state of beam `parent`."""

    slot: Count
    parent: Count


class ConcurrencyEvent(_Event, frozen=True):
    """From now on, at most `limit` rows are in flight at a server.

    Reason: "overload" (the server refused one) or "success" (it answered as many as the limit).
    """

    step: int
    time: Seconds
    limit: int
    reason: ConcurrencyReason


class DropEvent(SampleEvent, frozen=True):
    """A sample that finished for `reason` has no result: with best_of, others are better."""

    reason: FinishReason


class TokenEvent(_Event, frozen=True):
    """The tokens that a step gave to a sample, and the text that is final by then.

    Not part of a trace: `run --stream` writes it among the results.  tokens: None if a server does
    not send them.  state: where the text was generated, if the request names states.  logprobs: of
    the tokens, if requested.
    """

    step: int
    id: str
    index: int
    tokens: list[int] | None
    text: str
    state: str | None = None
    logprobs: list[TokenLogprob] | None = None


class RejectEvent(SampleEvent, frozen=True):
    """An invalid input line became an error result. reason: the error code."""

    reason: str


class RestartEvent(_Event, frozen=True):
    """A worker died, and its replacement continues with `step` at `time`.

    Workers decode its open requests again.  Readers of a trace end them here with the reason
    "lost", which no other line has.
    Reason: "killed" (by a signal; code: the signal), "exited" (code: the exit status) or "lost" (no
    message for too long).
    """

    step: int
    time: Seconds
    reason: RestartReason
    code: int = 0

    @property
    def last_step(self) -> int:
        """The last step of the dead worker, where views mark the restart; 0 if it took none."""
        return max(self.step - 1, 0)


class EndEvent(_Event, frozen=True):
    """The last line of a complete trace of a run, or of one of its workers."""

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
