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
    def num_steps(self) -> int:
        """How many steps were taken; the index of the next one."""

    @property
    def now(self) -> float:
        """When the next step starts, in seconds of the engine's clock."""

    @property
    def num_waiting(self) -> int:
        """How many samples, or requests for beams, are in the waiting queue."""

    @property
    def num_running(self) -> int:
        """How many slots are held."""

    @property
    def num_pending(self) -> int:
        """How many are known that have not joined the waiting queue yet."""

    @property
    def num_coming(self) -> int:
        """How many are known that have not arrived: too early, or turns that wait for others."""

    @property
    def last_start(self) -> float:
        """When the last step started, or the first one will, in seconds of the engine's clock."""

    @property
    def num_results(self) -> int:
        """How many results are there that no step has handed out."""

    @property
    def has_work(self) -> bool:
        """Whether `step` still has something to do or to hand out."""

    @property
    def wants_request(self) -> bool:
        """Whether the next step could make use of one more request."""

    @property
    def first_waiting(self) -> Schedulable | None:
        """The sequence that is to be admitted first; None if none waits."""

    @property
    def block_use(self) -> "BlockUse | None":
        """What the KV blocks are used for; None if there are none."""

    @property
    def constraint_counts(self) -> tuple[int, int]:
        """How many constraints were compiled, and for how many rows one was there already."""

    @property
    def constraint_times(self) -> "ConstraintTimes | None":
        """What constraints have taken on the wall; None if none was asked for."""

    def run_event(self) -> RunEvent:
        """Return the first line of this run's trace."""

    def end_event(self) -> EndEvent:
        """Return the last line of this run's trace."""

    def enqueue(
        self,
        request: Request,
        *,
        input_index: int | None = None,
        reason: ArriveReason = "input",
        replayed: Mapping[int, Result] = NOTHING_REPLAYED,
    ) -> str:
        """Take in a request in which `find_problems` has found none; return its id."""

    def step(self) -> StepOutcome:
        """Take one step; return what happened."""

    def hand_out(self) -> StepOutcome:
        """Return what has come of requests that need no slot, without taking a step."""

    def wake(self) -> None:
        """Let a step that waits for something come back, since there is more to read.

        Any thread may call this.
        """

    def close(self) -> None:
        """Let go of all that is not memory; nothing else is asked for after that."""
