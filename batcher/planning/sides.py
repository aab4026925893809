"""The engines of both sides where prompts are computed here, and their requests decode there.

An engine that computes prompts gives the first token, too.  The keys and values of the prompt go to
an engine that decodes, once that has blocks for all tokens of the request; it looks for them when a
step of its has ended.  The first engine keeps its blocks until all is there, and only then a slot
is asked for.  So blocks are held on both sides while they travel, as by vLLM's connectors, and a
full decode side backs up into the memory of the other one (DistServe: Zhong et al., OSDI 2024).

Rule: an engine is told of nothing that comes before the end of its last step.
"""

from collections import deque
from collections.abc import Callable, Collection
from heapq import heappop, heappush
from math import inf

from msgspec import Struct
from msgspec.structs import replace

from batcher.errors import InvariantError
from batcher.planning.fleet_result import ReplicaResult, ServedColumns
from batcher.planning.phases import PROMPT_TOKENS, DecodePhase, PromptPhase
from batcher.planning.ranks import LockstepRank
from batcher.planning.replica import BEGINS, NOTHING, Replica, ReplicaSettings
from batcher.planning.routers import ReplicaStats
from batcher.planning.simulated_sequence import SimulatedSequence, Turns
from batcher.scheduling.clock import BatchStats, ticks_until
from batcher.scheduling.reserved_blocks import ReservedBlocks
from batcher.settings import SchedulingSettings
from batcher.timing.step_time import TICKS_PER_SECOND


class Transfer(Struct, frozen=True, kw_only=True):
    """How long keys and values travel from one replica to another."""

    seconds_per_token: float
    latency: float = 0.0

    def seconds(self, num_tokens: int) -> float:
        """Return how long those of so many tokens take."""
        return self.latency + num_tokens * self.seconds_per_token


class PrefillEngine(Replica):
    """An engine that keeps the blocks of a prompt until it is told from when on nobody needs them.

    With all blocks kept it stands still, though requests wait; then the next release goes on.
    """

    needs_tables = True

    def __init__(
        self, turns: Turns, settings: ReplicaSettings, result: ReplicaResult | None = None
    ) -> None:
        super().__init__(turns, settings, result)
        self._kept: dict[SimulatedSequence, list[int]] = {}
        self._releases: list[tuple[float, int, SimulatedSequence]] = []  # a heap
        self._num_releases = 0
        self._is_stuck = False

    def release(self, whole: SimulatedSequence, time: float) -> None:
        """Let the blocks of a prompt be free from `time` on."""
        self._num_releases += 1
        heappush(self._releases, (time, self._num_releases, whole))

    def keeps(self, whole: SimulatedSequence) -> bool:
        """Return whether it has the prompt of a sequence."""
        return whole in self._kept

    def keeps_any(self, now: float) -> bool:
        """Return whether it has to keep blocks of a prompt at `now`, to which it has gone on."""
        return len(self._kept) > sum(time <= now for time, *_ in self._releases)

    def close(self) -> ReplicaResult:
        """Return what it has done, with no block kept any more."""
        self._give_back(inf)
        return super().close()

    def take(self, sequence: SimulatedSequence, columns: ServedColumns) -> None:
        """Take in a sequence that has ended, or of which others do the rest."""
        if sequence.has_failed or sequence.num_output_tokens <= PROMPT_TOKENS:
            super().take(sequence, columns)
        else:
            self.result.add_prompt(sequence)
            self.result.note_served(sequence.admitted_ticks)

    def _give_back(self, now: float) -> None:
        while self._releases and self._releases[0][0] <= now:
            self._pool.give_back(self._kept.pop(heappop(self._releases)[-1]))

    def _end_all(self, ending: Collection[int]) -> None:
        for slot in ending:
            row = self._batch.slots[slot]
            if isinstance(row, PromptPhase) and not row.is_all:
                self._kept[row.whole] = table = row.block_table.copy()
                self._pool.share(table)
        super()._end_all(ending)


class PrefillReplica(PrefillEngine):
    """One that takes its steps by itself."""

    def next_event(self) -> tuple[float, int]:
        """Return what Replica does; if no block is free, when that may change."""
        if not self._is_stuck:
            return super().next_event()
        times = [self._releases[0][0]] if self._releases else []
        if self._queue.num_pending:
            times.append(self._queue.next_arrival or self._now)
        return (max(min(times), self._now), BEGINS) if times else NOTHING

    def go_on(self) -> None:
        """Take the steps up to the next event, or the one that is it."""
        if self._is_stuck:
            begin, self._ticks = self._ticks, max(self._ticks, ticks_until(self.next_event()[0]))
            self.result.stalled_ticks += self._ticks - begin
            self._now = self._ticks / TICKS_PER_SECOND
        self._next_stretch = None  # blocks may be given back first
        super().go_on()

    def advance(self, until: float) -> None:
        """Take all steps that begin before `until`, as Replica does; it may have to stand still."""
        if not self._is_stuck:
            super().advance(until)

    def _go_on(self) -> None:
        self._give_back(self._now)
        step = self._step
        super()._go_on()
        self._is_stuck = step == self._step and self._queue.num_slots > 0


class PrefillRank(PrefillEngine, LockstepRank):
    """One that takes its steps with others."""

    @property
    def is_idle(self) -> bool:
        """Whether nobody runs, or could."""
        return self._is_stuck or super().is_idle

    @property
    def next_arrival(self) -> float:
        """When the next sequence joins those who wait, or one that waits may find blocks."""
        arrival = super().next_arrival
        if not (self._is_stuck and self._releases):
            return arrival
        return min(arrival, max(self._releases[0][0], self._now))

    def jump(self, ticks: int) -> None:
        """Let the next step begin at a time, to which nobody runs."""
        if self._is_stuck:
            self.result.stalled_ticks += ticks - self._ticks
        super().jump(ticks)

    def join(self) -> bool:
        """Let those wait who have arrived by now, and be looked at; return whether there is any."""
        if not super().join():
            return False
        self._is_stuck = False
        return True

    def begin_step(self) -> tuple[BatchStats, int]:
        """Plan the next step, see LockstepRank."""
        self._give_back(self._now)
        begun = super().begin_step()
        self._is_stuck = self.has_no_rows and self._queue.num_slots > 0
        return begun


class DecodeEngine(Replica):
    """An engine to which prompts come computed; nobody is preempted there.

    on_taken: called with a sequence and when all that it brings is there.
    """

    def __init__(
        self,
        turns: Turns,
        settings: ReplicaSettings,
        transfer: Transfer,
        on_taken: Callable[[DecodePhase, float], object],
        result: ReplicaResult | None = None,
    ) -> None:
        super().__init__(turns, settings, result)
        self._transfer, self._on_taken = transfer, on_taken
        self._incoming: deque[DecodePhase] = deque()

    def _make_kv_cache(self, settings: SchedulingSettings) -> ReservedBlocks[SimulatedSequence]:
        self._blocks = ReservedBlocks[SimulatedSequence](settings)
        return self._blocks

    def add(self, sequence: SimulatedSequence) -> None:
        """Take in the second phase of a sequence, whose first has ended when it arrives.

        It has gone on to when the step ends that is under way then.
        """
        if not isinstance(sequence, DecodePhase):
            raise InvariantError(f"{sequence.id!r} comes to where requests decode, not computed")
        if self._scheduler.why_never(sequence) is not None:
            sequence.fail()
            self.ended.append(sequence)
            self._on_taken(sequence, sequence.arrival_time)
            return
        self._incoming.append(sequence)
        self._take_in()

    def report(self, time: float) -> ReplicaStats:
        """Return how it stands at `time`; those that have no blocks yet wait, too."""
        told = super().report(time)
        return replace(told, waiting=told.waiting + len(self._incoming))

    def take(self, sequence: SimulatedSequence, columns: ServedColumns) -> None:
        """Take in a sequence that has ended, or failed."""
        if sequence.has_failed:
            super().take(sequence, columns)
        else:
            num_output = sequence.num_output_tokens
            self.result.add_output(sequence.num_prompt_tokens, num_output)
            self.result.note_served(sequence.first_token_ticks)
            columns.add(sequence, num_output)

    def drop(self, source: int, now: float) -> list[DecodePhase]:
        """Forget the sequences whose prompts are not all here at `now`, and lost where they were.

        source: that replica, which has failed.  Returns them.
        """
        waiting = [one for one in self._incoming if one.source == source]
        coming = [
            one
            for one in self._queue.pending
            if isinstance(one, DecodePhase) and one.source == source and one.arrival_time > now
        ]
        for sequence in coming:
            self._queue.remove(sequence)
            self._blocks.close(sequence, 0)
        self._incoming = deque(one for one in self._incoming if one.source != source)
        self._take_in()
        return coming + waiting

    def _take_in(self) -> None:
        """Let what waits for blocks travel, in turn, as far as there are any."""
        incoming = self._incoming
        while incoming and self._blocks.reserve(incoming[0]):
            sequence = incoming.popleft()
            begin = max(self._now, sequence.arrival_time)
            sequence.send(begin + self._transfer.seconds(sequence.num_prompt_tokens))
            self._on_taken(sequence, sequence.arrival_time)
            self._queue.add(sequence, self._now)

    def _advance(self, num_steps: int, ticks: int, num_tokens: int) -> None:
        super()._advance(num_steps, ticks, num_tokens)
        if self._incoming and not self._queue.num_slots:
            self._totals.binding_ticks["arrivals"] -= ticks
            self._totals.binding_ticks["kv"] += ticks

    def _end_all(self, ending: Collection[int]) -> None:
        super()._end_all(ending)
        if ending:
            self._take_in()


class DecodeReplica(DecodeEngine):
    """One that takes its steps by itself."""

    def add(self, sequence: SimulatedSequence) -> None:
        """Go on to when a sequence arrives, and take it in."""
        self.advance(sequence.arrival_time)
        super().add(sequence)


class DecodeRank(DecodeEngine, LockstepRank):
    """One that takes its steps with others."""

    stands_at_arrivals = True
