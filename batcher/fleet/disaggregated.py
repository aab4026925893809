"""Prompts are computed on some replicas, and their requests decode on others.

A replica that computes prompts gives the first token, too.  The keys and values of the prompt go to
a replica that decodes, once that has blocks for all tokens of the request; it looks for them when a
step of its has ended.  The first replica keeps its blocks until all is there, and only then a slot
is asked for.  So blocks are held on both sides while they travel, as by vLLM's connectors, and a
full decode side backs up into the memory of the other one (DistServe: Zhong et al., OSDI 2024).

Rule: a replica is told of nothing that comes before the end of its last step.
"""

from collections import deque
from collections.abc import Callable, Collection, Sequence
from heapq import heappop, heappush
from math import inf

from msgspec import Struct
from msgspec.structs import replace

from batcher.errors import InvariantError
from batcher.fleet.fleet import Fleet, OnEnded, order_of
from batcher.fleet.replica import BEGINS, NOTHING, Replica, ReplicaSettings
from batcher.fleet.result import Columns, ReplicaResult
from batcher.fleet.routers import ReplicaStats, ReplicaView, Router
from batcher.scheduling.clock import ticks_until
from batcher.scheduling.reserved_blocks import ReservedBlocks
from batcher.settings import SchedulingSettings
from batcher.simulation.phases import (
    PROMPT_TOKENS,
    DecodePhase,
    PromptPhase,
    decode_phase,
    prompt_phase,
)
from batcher.simulation.sequence import SimulatedSequence, Turns
from batcher.timing.step_time import TICKS_PER_SECOND


class Transfer(Struct, frozen=True, kw_only=True):
    """How long keys and values travel from one replica to another."""

    seconds_per_token: float
    latency: float = 0.0

    def seconds(self, num_tokens: int) -> float:
        """Return how long those of so many tokens take."""
        return self.latency + num_tokens * self.seconds_per_token


class PrefillReplica(Replica):
    """A replica that keeps the blocks of a prompt until it is told from when on nobody needs them.

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

    def close(self) -> ReplicaResult:
        """Return what it has done, with no block kept any more."""
        self._give_back(inf)
        return super().close()

    def take(self, sequence: SimulatedSequence, columns: Columns) -> None:
        """Take in a sequence that has ended, or of which others do the rest."""
        if sequence.has_failed or sequence.num_output_tokens <= PROMPT_TOKENS:
            super().take(sequence, columns)
        else:
            self.result.add_prompt(sequence)
            self.result.note_served(sequence.admitted_ticks)

    def _go_on(self) -> None:
        self._give_back(self._now)
        step = self._step
        super()._go_on()
        self._is_stuck = step == self._step and self._queue.num_slots > 0

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


class DecodeReplica(Replica):
    """A replica to which prompts come computed; nobody is preempted there.

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
        """Take in the second phase of a sequence, whose first has ended when it arrives."""
        if not isinstance(sequence, DecodePhase):
            raise InvariantError(f"{sequence.id!r} comes to where requests decode, not computed")
        if self._scheduler.why_never(sequence) is not None:
            sequence.fail()
            self.ended.append(sequence)
            self._on_taken(sequence, sequence.arrival_time)
            return
        self.advance(sequence.arrival_time)  # to when the step ends that is under way
        self._incoming.append(sequence)
        self._take_in()

    def report(self, time: float) -> ReplicaStats:
        """Return how it stands at `time`; those that have no blocks yet wait, too."""
        told = super().report(time)
        return replace(told, waiting=told.waiting + len(self._incoming))

    def take(self, sequence: SimulatedSequence, columns: Columns) -> None:
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


class DisaggregatedFleet(Fleet):
    """A fleet of which some replicas compute prompts, and others decode.

    router: sends requests to the former, decode_router their second phases to the latter, where a
    request is sent when its first token is there.  See Fleet.
    """

    def __init__(
        self,
        turns: Turns,
        replicas: Sequence[ReplicaSettings],
        router: Router,
        report_interval: float,
        on_ended: OnEnded = lambda _: None,
        *,
        decode_router: Router,
        transfer: Transfer,
    ) -> None:
        self._decode_router, self._transfer = decode_router, transfer
        super().__init__(turns, replicas, router, report_interval, on_ended)
        self._has_turns = True
        sides: dict[bool, list[ReplicaView]] = {False: [], True: []}
        for view, settings in zip(self._views, replicas, strict=True):
            sides[settings.role == "decode"].append(view)
        router.use(sides[False])
        decode_router.use(sides[True])

    def _make_replica(
        self, settings: ReplicaSettings, results: Sequence[ReplicaResult] = ()
    ) -> Replica:
        if settings.role == "decode":
            return DecodeReplica(self._turns, settings, self._transfer, self._release, *results)
        return PrefillReplica(self._turns, settings, *results)

    def _release(self, sequence: DecodePhase, time: float) -> None:
        """Let the replica that has the prompt of a sequence keep it until `time` only."""
        source = self._replicas[sequence.source]
        if isinstance(source, PrefillReplica):
            source.release(sequence.whole, time)
            self._plan(sequence.source)

    def _note(self, view: ReplicaView) -> None:
        is_decoding = isinstance(self._replicas[view.index], DecodeReplica)
        (self._decode_router if is_decoding else self._router).note(view)

    def _choose(self, sequence: SimulatedSequence) -> ReplicaView | None:
        if isinstance(sequence, DecodePhase):
            return self._decode_router.choose(sequence, sequence.arrival_time)
        return super()._choose(sequence)

    def _deliver(self, sequence: SimulatedSequence, view: ReplicaView) -> None:
        is_whole = not isinstance(sequence, DecodePhase)
        super()._deliver(prompt_phase(sequence) if is_whole else sequence, view)

    def _end(self, view: ReplicaView, engine: Replica, sequence: SimulatedSequence) -> None:
        """Take note of a phase that has ended: the second one begins, or all is over."""
        if not isinstance(sequence, PromptPhase | DecodePhase):
            raise InvariantError(f"{sequence.id!r} has ended whole, where phases do")
        sequence.tell()
        whole = sequence.whole
        if whole.has_failed or isinstance(sequence, DecodePhase) or sequence.is_all:
            super()._end(view, engine, whole)
            return
        engine.take(whole, self._columns)
        self._tell_end(view, whole, engine.now)
        rest = decode_phase(whole, view.index, engine.now)
        heappush(self._turns_ahead, (*order_of(rest), rest))

    def _refuse(self, sequence: SimulatedSequence) -> None:
        if isinstance(sequence, DecodePhase):
            self._release(sequence, sequence.arrival_time)
            sequence = sequence.whole
        super()._refuse(sequence)
