"""A fleet of which some replicas compute prompts and others decode, and that is managed.

Rule: only requests that come are refused, or wait at the router; whose prompt is computed is sent
on at once, and waits where it decodes.
"""

from collections.abc import Sequence
from functools import partial
from math import inf

from batcher.errors import InvariantError
from batcher.fleet.disaggregated import DisaggregatedFleet, PrefillReplica, Transfer
from batcher.fleet.fleet import OnEnded
from batcher.fleet.managed import ManagedFleet
from batcher.fleet.management import Management
from batcher.fleet.pool import Pool
from batcher.fleet.replica import ReplicaSettings
from batcher.fleet.routers import ReplicaView, Router
from batcher.simulation.phases import DecodePhase
from batcher.simulation.sequence import SimulatedSequence, Turns


class ManagedDisaggregatedFleet(ManagedFleet, DisaggregatedFleet):
    """One run over `turns`; see both. No replica fails.

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
        if management.failures is not None:
            raise InvariantError("replicas with a role do not fail")
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

    def _is_decoding(self, view: ReplicaView) -> bool:
        return self._settings[view.index].role == "decode"

    def _pool_of(self, view: ReplicaView) -> Pool:
        return self._decode_pool if self._is_decoding(view) else self._pool

    def _release(self, sequence: DecodePhase, time: float) -> None:
        super()._release(sequence, time)
        self._at(time, partial(self._go_down_if_drained, sequence.source))

    def _go_down_if_drained(self, index: int, now: float) -> None:
        replica = self._replicas[index]
        if not (isinstance(replica, PrefillReplica) and replica.keeps_any(now)):
            super()._go_down_if_drained(index, now)

    def _admit(self, sequence: SimulatedSequence, now: float) -> None:
        if isinstance(sequence, DecodePhase):
            self._send(sequence, now)
        else:
            super()._admit(sequence, now)
