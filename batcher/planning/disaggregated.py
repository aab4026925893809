"""A fleet in which prompts are computed on some replicas, and their requests decode on others.

An engine that computes prompts gives the first token, too.  The keys and values of the prompt go to
an engine that decodes, once that has blocks for all tokens of the request; it looks for them when a
step of its has ended.  The first engine keeps its blocks until all is there, and only then a slot
is asked for.  So blocks are held on both sides while they travel, as by vLLM's connectors, and a
full decode side backs up into the memory of the other one (DistServe: Zhong et al., OSDI 2024).

Rule: an engine knows a phase of a sequence alone, and nothing that comes before the end of its last
step; the sequence learns from its phases what came of it.
"""

from collections import deque
from collections.abc import Callable, Collection, Sequence
from heapq import heappop, heappush
from math import inf
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from batcher.errors import InvariantError
from batcher.planning.fleet import (
    BEGINS,
    NOTHING,
    Fleet,
    Member,
    Replica,
    ReplicaResult,
    ServedColumns,
)
from batcher.planning.routers import ReplicaStats, ReplicaView, Router
from batcher.planning.simulated_sequence import SimulatedSequence, Turns
from batcher.planning.simulator import OnEnded, ReplicaSettings
from batcher.scheduling.clock import ticks_until
from batcher.scheduling.grouped_kv_cache import CountedBlocks
from batcher.scheduling.queue import ARRIVAL_ORDER
from batcher.timing.step_time import TICKS_PER_SECOND

PROMPT_TOKENS = 1  # of the output: the engine that computes the prompt gives the first


class Transfer(Struct, frozen=True, kw_only=True):
    """The time of keys and values from one replica to another."""

    seconds_per_token: float
    latency: float = 0.0

    def seconds(self, num_tokens: int) -> float:
        return self.latency + num_tokens * self.seconds_per_token


class Phase(SimulatedSequence, eq=False, gc=False, kw_only=True):
    """A part of the sequence `whole`, as an engine takes it.

    source: the replica with the prompt, if this comes after the first token; None: this is the
    prompt and the first token.
    """

    whole: SimulatedSequence
    source: int | None = None


def _fields_of(whole: SimulatedSequence) -> dict[str, Any]:
    return {name: getattr(whole, name) for name in SimulatedSequence.__struct_fields__}


# -- the engines of both sides -------------------------------------------------------------------


class PrefillReplica(Replica):
    """An engine that keeps the blocks of a prompt until they are released.

    With all blocks kept it stands still, though requests wait, until the next release.
    """

    needs_tables = True

    def __init__(self, turns: Turns, settings: ReplicaSettings) -> None:
        super().__init__(turns, settings)
        self._kept: dict[SimulatedSequence, list[int]] = {}
        self._releases: list[tuple[float, int, SimulatedSequence]] = []  # a heap
        self._num_releases = 0
        self._is_stuck = False

    def release(self, whole: SimulatedSequence, time: float) -> None:
        self._num_releases += 1
        heappush(self._releases, (time, self._num_releases, whole))

    def next_event(self) -> tuple[float, int]:
        """Return what Replica does; if no block is free, when that may change."""
        if not self._is_stuck:
            return super().next_event()
        times = [self._releases[0][0]] if self._releases else []
        if self._queue.num_pending:
            times.append(self._queue.next_arrival or self._now)
        return (max(min(times), self._now), BEGINS) if times else NOTHING

    def go_on(self) -> None:
        if self._is_stuck:
            begin, self._ticks = self._ticks, max(self._ticks, ticks_until(self.next_event()[0]))
            self.result.stalled_ticks += self._ticks - begin
            self._now = self._ticks / TICKS_PER_SECOND
        self._next_stretch = None  # blocks may be given back first
        super().go_on()

    def close(self) -> ReplicaResult:
        self._give_back(inf)
        return super().close()

    def count(self, sequence: SimulatedSequence, columns: ServedColumns) -> None:
        """Count a sequence that has ended, or of which others do the rest."""
        if sequence.has_failed or sequence.num_output_tokens <= PROMPT_TOKENS:
            super().count(sequence, columns)
        else:
            self.result.add_prompt(sequence)
            self.result.note_served(sequence.admitted_ticks)

    def _give_back(self, now: float) -> None:
        while self._releases and self._releases[0][0] <= now:
            self._pool.give_back(self._kept.pop(heappop(self._releases)[-1]))

    def _go_on(self) -> None:
        self._give_back(self._now)
        step = self._step
        super()._go_on()
        self._is_stuck = step == self._step and self._queue.num_slots > 0

    def _end_all(self, ending: Collection[int]) -> None:
        for slot in ending:
            row = self._batch.slots[slot]
            if isinstance(row, Phase) and row.whole.num_output_tokens > PROMPT_TOKENS:
                self._kept[row.whole] = table = row.block_table.copy()
                self._pool.share(table)
        super()._end_all(ending)


class ReservedBlocks(CountedBlocks[SimulatedSequence]):
    """Blocks that sequences have before they are admitted, whose prompts came from elsewhere."""

    def reserve(self, sequence: SimulatedSequence) -> bool:
        if not self.has_room(self.num_blocks(sequence.most_tokens)):
            return False
        self.extend(sequence, sequence.most_tokens)
        return True

    def admit(
        self,
        sequence: SimulatedSequence,
        stop: int,
        max_tokens: int,
        *,
        is_alone: bool,  # noqa: ARG002 - others leave room for those that run
    ) -> int:
        """Let a sequence continue behind its prompt: see KVCache; there is room for it."""
        num_there = sequence.num_prompt_tokens
        sequence.num_cached_tokens = num_there
        sequence.num_computed_tokens = max(min(stop, num_there + max_tokens), num_there)
        return 0


class DecodeReplica(Replica):
    """An engine to which prompts come computed; none is preempted there.

    on_taken: called with a sequence, and when it has its blocks.
    """

    def __init__(
        self,
        turns: Turns,
        settings: ReplicaSettings,
        transfer: Transfer,
        on_taken: Callable[[Phase, float], object],
    ) -> None:
        self._blocks = ReservedBlocks(settings.scheduling)
        super().__init__(turns, settings, kv_cache=self._blocks)
        self._transfer, self._on_taken = transfer, on_taken
        self._incoming: deque[Phase] = deque()

    def add(self, sequence: SimulatedSequence) -> None:
        """Advance to the arrival of the second phase of a sequence, and take it in."""
        self.advance(sequence.arrival_time)
        if not isinstance(sequence, Phase):
            raise InvariantError(f"{sequence.id!r} comes to where requests decode, not computed")
        if self._scheduler.why_never(sequence) is not None:
            sequence.has_failed = True
            self.ended.append(sequence)
            self._on_taken(sequence, sequence.arrival_time)
            return
        self._incoming.append(sequence)
        self._take_in()

    def report(self, time: float) -> ReplicaStats:
        """Return its state; those without blocks wait, too."""
        report = super().report(time)
        return replace(report, waiting=report.waiting + len(self._incoming))

    def count(self, sequence: SimulatedSequence, columns: ServedColumns) -> None:
        if sequence.has_failed:
            super().count(sequence, columns)
        else:
            num_output = sequence.num_output_tokens
            self.result.add_output(sequence.num_prompt_tokens, num_output)
            self.result.note_served(sequence.first_token_ticks)
            columns.add(sequence, num_output)

    def _take_in(self) -> None:
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


# -- the fleet -----------------------------------------------------------------------------------


class DisaggregatedFleet(Fleet):
    """A fleet of which some replicas compute prompts, and others decode.

    router: for the former; decode_router: for second phases, once the first token is there.
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
        for member in self._members:
            sides[isinstance(member.replica, DecodeReplica)].append(member.view)
        router.use(sides[False])
        decode_router.use(sides[True])

    def _make_replica(self, settings: ReplicaSettings) -> Replica:
        if settings.role == "decode":
            return DecodeReplica(self._turns, settings, self._transfer, self._release)
        return PrefillReplica(self._turns, settings)

    def _release(self, sequence: Phase, time: float) -> None:
        source = None if sequence.source is None else self._members[sequence.source]
        if source is not None and isinstance(source.replica, PrefillReplica):
            source.replica.release(sequence.whole, time)
            self._plan(source)

    def _note(self, view: ReplicaView) -> None:
        is_decoding = isinstance(self._members[view.index].replica, DecodeReplica)
        (self._decode_router if is_decoding else self._router).note(view)

    def _choose(self, sequence: SimulatedSequence) -> ReplicaView | None:
        if isinstance(sequence, Phase):
            return self._decode_router.choose(sequence, sequence.arrival_time)
        return super()._choose(sequence)

    def _deliver(self, sequence: SimulatedSequence, view: ReplicaView) -> None:
        if not isinstance(sequence, Phase):
            most = min(sequence.max_tokens, PROMPT_TOKENS)
            phase = _fields_of(sequence) | {"max_tokens": most}
            sequence = Phase(whole=sequence, **phase)
        super()._deliver(sequence, view)

    def _end(self, member: Member, sequence: SimulatedSequence) -> None:
        if not isinstance(sequence, Phase):
            raise InvariantError(f"{sequence.id!r} has ended whole, where phases do")
        whole = sequence.whole
        whole.has_failed, whole.num_preemptions = sequence.has_failed, sequence.num_preemptions
        whole.admitted_ticks, whole.end_ticks = sequence.admitted_ticks, sequence.end_ticks
        whole.first_token_ticks = sequence.first_token_ticks
        whole.num_cached_at_first = sequence.num_cached_at_first
        is_over = sequence.source is not None or whole.num_output_tokens <= PROMPT_TOKENS
        if whole.has_failed or is_over:
            super()._end(member, whole)
            return
        replica = member.replica
        replica.count(whole, self._columns)
        self._note_end(member, whole)
        phase = _fields_of(whole) | {
            "arrival_time": replica.now,
            "num_tokens": whole.num_prompt_tokens + PROMPT_TOKENS,
            "has_siblings": False,
        }
        rest = Phase(whole=whole, source=member.view.index, **phase)
        heappush(self._turns_ahead, (*ARRIVAL_ORDER(rest), rest))

    def _refuse(self, sequence: SimulatedSequence) -> None:
        if isinstance(sequence, Phase):
            self._release(sequence, sequence.arrival_time)
            sequence = sequence.whole
        super()._refuse(sequence)
