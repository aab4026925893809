"""Disaggregated serving: replicas that compute prompts, and replicas that decode.

A prefill replica also generates the first token.  The keys and values of the prompt are sent to a
decode replica once that has blocks for all tokens of the request, which it checks at the end of
each step.  The prefill replica keeps its blocks until the transfer is complete; only then the
request waits for a slot.  So blocks are held on both sides during a transfer, as by vLLM's
connectors, and a full decode side backs up into the memory of the prefill side (DistServe: Zhong et
al., OSDI 2024).

Rule: a replica knows only a phase of a sequence; the results of the phases are copied to it.
"""

from collections import deque
from collections.abc import Callable, Collection, Mapping
from heapq import heappop, heappush
from math import inf
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from batcher.errors import InvariantError
from batcher.planning.routers import ReplicaStats
from batcher.planning.simulated_sequence import SimulatedSequence
from batcher.planning.simulator import (
    BEGINS,
    NOTHING,
    PROMPT_TOKENS,
    Replica,
    ReplicaResult,
    ReplicaSettings,
)
from batcher.planning.workload import Turns
from batcher.scheduling.blocks import PrefixMatch
from batcher.scheduling.clock import ticks_until
from batcher.scheduling.kv_cache import KVCache
from batcher.timing.catalog import Amount, Positive
from batcher.timing.step_time import TICKS_PER_SECOND


class Transfer(Struct, frozen=True, kw_only=True):
    """The link of keys and values between replicas; bytes_per_token: None for the model's."""

    gbytes_per_s: Positive
    latency: Amount = 0.0
    bytes_per_token: Positive | None = None

    def seconds(self, num_tokens: int) -> float:
        seconds_per_token = (self.bytes_per_token or 0.0) / (self.gbytes_per_s * 1e9)
        return self.latency + num_tokens * seconds_per_token


class Phase(SimulatedSequence, eq=False, gc=False, kw_only=True):
    """A part of the sequence `whole` for one replica.

    source: the replica that computed the prompt; None: this is the prompt and the first token.
    """

    whole: SimulatedSequence
    source: int | None = None


def phase_of(whole: SimulatedSequence, source: int | None = None, **changed: Any) -> Phase:
    fields = {name: getattr(whole, name) for name in SimulatedSequence.__struct_fields__}
    return Phase(whole=whole, source=source, **(fields | changed))


class PrefillReplica(Replica):
    """A replica that keeps the blocks of a prompt until they are released.

    With all blocks kept it stalls, though requests wait, until the next release.
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
        """Return the next event; while stalled, the time of the next release or arrival."""
        if not self._is_stuck:
            return super().next_event()
        times = [self._releases[0][0]] if self._releases else []
        if self._queue.num_pending:
            times.append(self._queue.next_arrival or self.now)
        return (max(min(times), self.now), BEGINS) if times else NOTHING

    def step_on(self) -> None:
        if self._is_stuck:
            begin, self._ticks = self._ticks, max(self._ticks, ticks_until(self.next_event()[0]))
            self.result.stalled_ticks += self._ticks - begin
            self.now = self._ticks / TICKS_PER_SECOND
        self._next_stretch = None  # blocks may be returned first
        super().step_on()

    def close(self) -> ReplicaResult:
        self._give_back(inf)
        return super().close()

    def _give_back(self, now: float) -> None:
        while self._releases and self._releases[0][0] <= now:
            self._pool.give_back(self._kept.pop(heappop(self._releases)[-1]))

    def _take_steps(self) -> None:
        self._give_back(self.now)
        step = self._step
        super()._take_steps()
        self._is_stuck = step == self._step and self._queue.num_slots > 0

    def _end_all(self, ending: Collection[int]) -> None:
        for slot in ending:
            row = self._batch.slots[slot]
            if isinstance(row, Phase) and row.whole.num_output_tokens > PROMPT_TOKENS:
                self._kept[row.whole] = table = row.block_table.copy()
                self._pool.share(table)
        super()._end_all(ending)


class ReservedBlocks(KVCache[SimulatedSequence]):
    """A KV cache that reserves blocks for transferred prompts before admission."""

    def reserve(self, sequence: SimulatedSequence) -> bool:
        if not self.has_room(self.num_blocks(sequence.most_tokens)):
            return False
        sequence.block_table = []
        self.extend(sequence, sequence.most_tokens)
        return True

    def match(self, sequence: SimulatedSequence) -> PrefixMatch:
        return PrefixMatch([], sequence.num_prompt_tokens, sequence.num_tokens)

    def num_needed(
        self,
        matches: Mapping[SimulatedSequence, PrefixMatch],  # noqa: ARG002
        *,
        is_alone: bool,  # noqa: ARG002
    ) -> int:
        return 0

    def admit(self, matches: Mapping[SimulatedSequence, PrefixMatch]) -> None:
        """Continue behind the prompt; the sequence has all its blocks."""
        for row, match in matches.items():
            row.num_cached_tokens = match.num_tokens


class DecodeReplica(Replica):
    """A replica that receives computed prompts and never preempts.

    on_taken: called with a sequence and the time when it has its blocks.
    """

    def __init__(
        self,
        turns: Turns,
        settings: ReplicaSettings,
        transfer: Transfer,
        on_taken: Callable[[Phase, float], object],
    ) -> None:
        self._blocks = ReservedBlocks(settings.scheduling, None)
        super().__init__(turns, settings, kv_cache=self._blocks)
        self._transfer, self._on_taken = transfer, on_taken
        self._incoming: deque[Phase] = deque()

    def add(self, sequence: SimulatedSequence) -> bool:
        """Advance to the arrival of a second phase, and add it."""
        self.advance(sequence.arrival_time)
        if not isinstance(sequence, Phase):
            raise InvariantError(f"{sequence.id!r}: a decode replica received an uncomputed prompt")
        if self._scheduler.why_never(sequence) is not None:
            sequence.has_failed = True
            self.ended.append(sequence)
            self._on_taken(sequence, sequence.arrival_time)
            return True
        self._incoming.append(sequence)
        self._reserve_incoming()
        return True

    def report(self, time: float) -> ReplicaStats:
        """Return its state; sequences without blocks count as waiting."""
        report = super().report(time)
        return replace(report, waiting=report.waiting + len(self._incoming))

    def _reserve_incoming(self) -> None:
        incoming = self._incoming
        while incoming and self._blocks.reserve(incoming[0]):
            sequence = incoming.popleft()
            begin = max(self.now, sequence.arrival_time)
            sequence.send(begin + self._transfer.seconds(sequence.num_prompt_tokens))
            self._on_taken(sequence, sequence.arrival_time)
            self._queue.add(sequence)

    def _advance(self, num_steps: int, ticks: int, num_tokens: int) -> None:
        super()._advance(num_steps, ticks, num_tokens)
        if self._incoming and not self._queue.num_slots:
            self.result.binding_ticks["arrivals"] -= ticks
            self.result.binding_ticks["kv"] += ticks

    def _end_all(self, ending: Collection[int]) -> None:
        super()._end_all(ending)
        if ending:
            self._reserve_incoming()
