"""A fleet of which some replicas compute prompts and others decode, and that is managed.

Rule: only requests that come wait at the router; whose prompt is computed is sent on at once, waits
where it decodes, and is refused if nobody does.

A replica that fails takes along what it computes, and the prompts that it keeps for others.  What
was to get one of these from it knows at once; all else is known when the failure is noticed.
"""

from collections.abc import Sequence
from functools import partial
from math import inf

from batcher.planning.disaggregated import DisaggregatedFleet
from batcher.planning.fleet import OnEnded
from batcher.planning.life import STEPPING, ReplicaState
from batcher.planning.managed import ManagedFleet
from batcher.planning.management import Management
from batcher.planning.phases import DecodePhase
from batcher.planning.pool import Pool
from batcher.planning.replica import ReplicaSettings
from batcher.planning.routers import ReplicaView, Router
from batcher.planning.sides import DecodeEngine, PrefillEngine, Transfer
from batcher.planning.simulated_sequence import SimulatedSequence, Turns


class ManagedDisaggregatedFleet(ManagedFleet, DisaggregatedFleet):
    """One run over `turns`; see both.

    Raises:
        BatchdecodeError: the settings of a replica, or of the policy, make no sense.
    """

    def __init__(
        self,
        turns: Turns,
        replicas: Sequence[ReplicaSettings],
        router: Router,
        management: Management,
        report_interval: float,
        on_ended: OnEnded = lambda _: None,
        *,
        decode_router: Router,
        transfer: Transfer,
    ) -> None:
        super().__init__(
            turns,
            replicas,
            router,
            management,
            report_interval,
            on_ended,
            decode_router=decode_router,
            transfer=transfer,
        )
        sides: dict[bool, list[ReplicaView]] = {False: [], True: []}
        for view in self._views:
            sides[self._is_decoding(view)].append(view)
        admission = management.admission
        max_in_flight = inf if admission is None else admission.max_in_flight
        self._pool = Pool(router, sides[False], max_in_flight)
        self._decode_pool = Pool(decode_router, sides[True], inf)
        self._pools = [self._pool, self._decode_pool]
        scaled = {each.group or replicas[-1].group for each in management.autoscale}
        self._scales_prompts = any(
            each.group in scaled for each in replicas if each.role == "prefill"
        )
        # The second phases that are in flight, by what they are of, as long as prompts are kept.
        self._untaken: dict[SimulatedSequence, DecodePhase] = {}

    def _is_decoding(self, view: ReplicaView) -> bool:
        return self._settings[view.index].role == "decode"

    def _pool_of(self, view: ReplicaView) -> Pool:
        return self._decode_pool if self._is_decoding(view) else self._pool

    def _release(self, sequence: DecodePhase, time: float) -> None:
        self._untaken.pop(sequence.whole, None)
        if self._keeper(sequence) is not None:
            super()._release(sequence, time)
            self._at(time, partial(self._go_down_if_drained, sequence.source))

    def _go_down_if_drained(self, index: int, now: float) -> None:
        engines = self._replicas[index].engines
        if not any(isinstance(each, PrefillEngine) and each.keeps_any(now) for each in engines):
            super()._go_down_if_drained(index, now)

    def _admit(self, sequence: SimulatedSequence, now: float) -> None:
        if not isinstance(sequence, DecodePhase):
            super()._admit(sequence, now)
        elif self._keeper(sequence) is None:
            self._lose(sequence.whole, now)
        elif self._decode_pool.open:
            self._untaken[sequence.whole] = sequence
            self._send(sequence, now)
        else:
            self._refuse(sequence)

    @property
    def _may_serve(self) -> bool:
        return self._scales_prompts or any(
            life.state is not ReplicaState.DOWN and settings.role == "prefill"
            for life, settings in zip(self._lives, self._settings, strict=True)
        )

    # -- failures --------------------------------------------------------------------------------

    def _fail(self, index: int, back_after: float | None, now: float) -> None:
        has_failed = self._lives[index].state in STEPPING
        super()._fail(index, back_after, now)
        if has_failed and not self._is_decoding(self._views[index]):
            self._drop_prompts(index, now)

    def _drop_prompts(self, source: int, now: float) -> None:
        """Let those begin anew whose prompts a replica had that has failed."""
        for view in self._views:
            replica = self._replicas[view.index]
            if self._lives[view.index].state not in STEPPING or not self._is_decoding(view):
                continue
            replica.advance(now)
            self._take_ended(view.index)
            lost: list[DecodePhase] = []
            for engine in replica.engines:
                if isinstance(engine, DecodeEngine):
                    lost += engine.drop(source, now)
            replica.look_again()
            for sequence in lost:
                del self._flying[view.index][sequence.whole]
                self._hear_end(now, view, sequence.num_prompt_tokens)
            for sequence in lost:
                self._lose(sequence.whole, now)
            self._plan(view.index)

    def _lose(self, sequence: SimulatedSequence, now: float) -> None:
        untaken = self._untaken.get(sequence)
        if untaken is not None:
            self._release(untaken, now)
        super()._lose(sequence, now)
