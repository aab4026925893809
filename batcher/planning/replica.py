"""A replica of a fleet: one engine that is fed while it runs, and told how far to go.

Rule: it takes exactly the steps that `simulate` takes if all that is sent to it is its workload.
"""

from collections.abc import Sequence
from math import inf
from typing import Literal, Self

from msgspec import Struct
from msgspec.structs import replace

from batcher.planning.fleet_result import ReplicaResult, ServedColumns
from batcher.planning.routers import ReplicaStats
from batcher.planning.simulated_sequence import SimulatedSequence, Turns
from batcher.planning.simulator import AssumedDrafts, EventSimulation, KVOffload, settings_of_trial
from batcher.scheduling.sequence import NEVER
from batcher.settings import SchedulingSettings
from batcher.timing.step_time import TICKS_PER_SECOND, StepTime

Role = Literal["both", "prefill", "decode"]

ENDS, ARRIVES, BEGINS = range(3)
NOTHING = (inf, BEGINS)


class ReplicaSettings(Struct, frozen=True, kw_only=True):
    """What an engine is made with; see `simulate`.  group: of a file, that it is in.

    role: whether it computes prompts, or decodes, if others do the rest.
    ranks: how many such engines the replica is made of, see batcher.planning.ranks.
    is_trial: see StepSimulation.
    """

    num_slots: int
    scheduling: SchedulingSettings
    step_time: StepTime
    drafts: AssumedDrafts | None = None
    offload: KVOffload | None = None
    group: str = ""
    role: Role = "both"
    ranks: int = 1
    is_trial: bool = False

    @property
    def of_trial(self) -> Self | None:
        """The same for a trial, see settings_of_trial; None if that would not do."""
        if self.offload is not None:
            return None
        scheduling = settings_of_trial(self.scheduling)
        return None if scheduling is None else replace(self, scheduling=scheduling, is_trial=True)


class Replica(EventSimulation):
    """An engine that stands still until it is told to go on.

    turns: of all the fleet; which turn goes on after which is not for a replica to say.
    ended: the sequences that have ended or failed since somebody last took them from here.
    result: what it has done by now; given one, it goes on with that of an engine before it.
    """

    def __init__(
        self, turns: Turns, settings: ReplicaSettings, result: ReplicaResult | None = None
    ) -> None:
        scheduling = settings.scheduling
        super().__init__(
            turns,
            settings.num_slots,
            scheduling,
            settings.step_time,
            drafts=settings.drafts,
            offload=settings.offload,
            is_trial=settings.is_trial,
        )
        self.ended: list[SimulatedSequence] = []
        if result is None:
            result = ReplicaResult(
                settings.num_slots,
                scheduling.kv_blocks,
                scheduling.max_batch_tokens,
                group=settings.group,
            )
        self.result, self._totals = result, result.totals
        self._last_end, self._num_last = NEVER, 0  # when somebody ended last, and how many
        # Steps up to the next event, and their ticks, if it ends some that decide nothing.
        self._next_stretch: tuple[int, int] | None = None

    @property
    def now(self) -> float:
        """When the last step it has taken ended, in seconds."""
        return self._now

    @property
    def engines(self) -> Sequence[Self]:
        """The engines that it is made of: itself."""
        return (self,)

    def add(self, sequence: SimulatedSequence) -> None:
        """Take in a sequence, which arrives when no step begun by now can know of it."""
        self._next_stretch = None
        self._queue.add(sequence, self._now)

    def look_again(self) -> None:
        """Take note that it was told something by somebody else, see RankedReplica: it knows."""

    def next_event(self) -> tuple[float, int]:
        """Return when it ends steps that decide nothing, or begins one that does, if none is added.

        Nobody joins, is admitted or ends before; at the same time, ENDS come before what arrives
        then, and that before what BEGINS; NOTHING if there is nothing to do.
        """
        queue, now, self._next_stretch = self._queue, self._now, None
        if queue.num_pending:
            arrival = queue.next_arrival
            if arrival is None or arrival <= now:
                return now, BEGINS
            if not (queue.num_slots or self._batch.num_occupied):
                return arrival, BEGINS
        elif not (queue.num_slots or self._batch.num_occupied):
            return NOTHING
        num_steps, until = (0, now) if self._drafts else self._fast_forward.num_steps(now)
        if not num_steps:
            return now, BEGINS
        self._next_stretch = _, ticks = self._time_of(num_steps, until)
        return (self._ticks + ticks) / TICKS_PER_SECOND, ENDS

    def go_on(self) -> None:
        """Take the steps up to the next event, or the one that is it."""
        if self._next_stretch is not None:
            planned, self._next_stretch = self._next_stretch, None
            self._skip(*planned)
            return
        if self._queue.num_pending:
            num_pending = self._queue.num_pending
            self._join_arrivals()
            self._until = inf if num_pending == self._queue.num_pending else self._now
        self._go_on()
        self._until = inf

    def advance(self, until: float) -> None:
        """Take all steps that begin before `until`, if all that arrive before then were added."""
        queue, batch, self._until, self._next_stretch = self._queue, self._batch, until, None
        while self._now < until:
            if queue.num_pending:
                if not (queue.num_slots or batch.num_occupied):
                    arrival = queue.next_arrival
                    if arrival is not None and arrival >= until:
                        break
                self._join_arrivals()
            elif not (queue.num_slots or batch.num_occupied):
                break
            self._go_on()
        self._until = inf

    def take(self, sequence: SimulatedSequence, columns: ServedColumns) -> None:
        """Count a sequence that has ended here, or failed, and keep its times in `columns`."""
        self.result.add(sequence, columns)

    def report(self, time: float) -> ReplicaStats:
        """Return how it stands at `time`, up to which it has gone on; a step may end after it."""
        running = self._batch.num_occupied
        if self._now > time and self._last_end == self._ticks:
            running += self._num_last
        return ReplicaStats(time, running, self._queue.num_waiting + self._queue.num_pending)

    def close(self) -> ReplicaResult:
        """Return what it has done."""
        self._totals.num_steps += self._step
        self.result.end_ticks = max(self.result.end_ticks, self._ticks)
        return self.result

    def _note_over(self, sequence: SimulatedSequence) -> None:
        if self._last_end != self._ticks:
            self._last_end, self._num_last = self._ticks, 0
        self._num_last += 1
        self.ended.append(sequence)
