"""A fleet in which prompts are computed on some replicas, and their requests decode on others."""

from collections.abc import Sequence
from heapq import heappush

from batcher.errors import InvariantError
from batcher.planning.fleet import Fleet, OnEnded, order_of
from batcher.planning.fleet_result import ReplicaResult
from batcher.planning.phases import DecodePhase, PromptPhase, decode_phase, prompt_phase
from batcher.planning.ranks import LockstepRank, RankedReplica, ranks_of
from batcher.planning.replica import Replica, ReplicaSettings
from batcher.planning.routers import ReplicaView, Router
from batcher.planning.sides import (
    DecodeEngine,
    DecodeRank,
    DecodeReplica,
    PrefillEngine,
    PrefillRank,
    PrefillReplica,
    Transfer,
)
from batcher.planning.simulated_sequence import SimulatedSequence, Turns


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
    ) -> Replica | RankedReplica:
        turns, taken = self._turns, (self._transfer, self._release)

        def alone(result: ReplicaResult | None) -> Replica:
            if settings.role == "decode":
                return DecodeReplica(turns, settings, *taken, result)
            return PrefillReplica(turns, settings, result)

        def in_step(result: ReplicaResult | None) -> LockstepRank:
            if settings.role == "decode":
                return DecodeRank(turns, settings, *taken, result)
            return PrefillRank(turns, settings, result)

        if settings.ranks > 1:
            return ranks_of(settings, self._interval, alone, in_step, results)
        return alone(results[0] if results else None)

    def _keeper(self, sequence: DecodePhase) -> PrefillEngine | None:
        """Return the engine that has the prompt of a sequence; None if none has any more."""
        for engine in self._replicas[sequence.source].engines:
            if isinstance(engine, PrefillEngine) and engine.keeps(sequence.whole):
                return engine
        return None

    def _release(self, sequence: DecodePhase, time: float) -> None:
        """Let who has the prompt of a sequence keep it until `time` only."""
        keeper = self._keeper(sequence)
        if keeper is not None:
            keeper.release(sequence.whole, time)
            self._replicas[sequence.source].look_again()
            self._plan(sequence.source)

    def _note(self, view: ReplicaView) -> None:
        is_decoding = isinstance(self._replicas[view.index].engines[0], DecodeEngine)
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
