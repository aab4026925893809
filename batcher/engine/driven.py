"""What drives a run, as a Protocol: all that whoever reads requests and writes results asks for.

Rule: `Engine` and `RemoteEngine` are what a driver may be handed, and it asks for nothing else.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

from batcher.events import ArriveReason, EndEvent, RequestEvent, RunEvent, TokenEvent
from batcher.request import Request
from batcher.requests.validation import ModelCapabilities
from batcher.result import Result
from batcher.scheduling.sequence import Schedulable

if TYPE_CHECKING:
    from batcher.decoding.constraints import ConstraintTimes
    from batcher.scheduling.blocks import BlockUse

NOTHING_REPLAYED: Mapping[int, Result] = {}


class StepOutcome(NamedTuple):
    """What one step did.

    events: in the order they happened.  results: of the samples that ended, first those that never
    held a slot, then by slot.  tokens: what each row was given, by slot, if the engine streams.
    """

    events: Sequence[RequestEvent]
    results: Sequence[Result]
    tokens: Sequence[TokenEvent]


NOTHING_HAPPENED = StepOutcome((), (), ())  # as in most steps


class DrivenEngine(Protocol):
    """Decodes requests in slots, one `step()` at a time; see Engine for what each member means.

    capabilities: what it can decode, as `find_problems` wants to know it.
    """

    batch_size: int
    capabilities: ModelCapabilities

    @property
    def num_steps(self) -> int: ...

    @property
    def now(self) -> float: ...

    @property
    def num_waiting(self) -> int: ...

    @property
    def num_running(self) -> int: ...

    @property
    def num_pending(self) -> int: ...

    @property
    def num_coming(self) -> int: ...

    @property
    def last_start(self) -> float: ...

    @property
    def num_results(self) -> int: ...

    @property
    def has_work(self) -> bool: ...

    @property
    def wants_request(self) -> bool: ...

    @property
    def first_waiting(self) -> Schedulable | None: ...

    @property
    def block_use(self) -> "BlockUse | None": ...

    @property
    def constraint_counts(self) -> tuple[int, int]: ...

    @property
    def constraint_times(self) -> "ConstraintTimes | None": ...

    def run_event(self) -> RunEvent: ...

    def end_event(self) -> EndEvent: ...

    def enqueue(
        self,
        request: Request,
        *,
        input_index: int | None = None,
        reason: ArriveReason = "input",
        replayed: Mapping[int, Result] = NOTHING_REPLAYED,
    ) -> str: ...

    def step(self) -> StepOutcome: ...

    def hand_out(self) -> StepOutcome: ...

    def wake(self) -> None:
        """Let a step that waits for something come back, since there is more to read.

        Any thread may call this.
        """

    def close(self) -> None:
        """Let go of all that is not memory; nothing else is asked for after that."""
