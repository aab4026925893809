"""A log of a real run, of one engine or several behind a router, simulated: how far off that is."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from msgspec import Struct

from batcher.errors import BatchdecodeError
from batcher.planning.fleet import Fleet
from batcher.planning.fleet_result import FleetResult
from batcher.planning.replay import Comparison, check_has_run, compare_runs
from batcher.planning.replica import ReplicaSettings
from batcher.planning.request_log import LoggedRequest, workload_of_log
from batcher.planning.routers import DEFAULT_REPORT_INTERVAL, ReplicaView, Router
from batcher.planning.simulated_sequence import Turns

if TYPE_CHECKING:
    from batcher.planning.simulated_sequence import SimulatedSequence


class Replay(Struct, frozen=True):
    """comparisons: one for each number.  result: all that the simulation came to."""

    comparisons: list[Comparison]
    result: FleetResult


class AsLogged(Router):
    """To the replica that had the request; they are counted in the order in which the log has them.

    log: each of its requests names a replica.
    """

    def __init__(self, log: Sequence[LoggedRequest]) -> None:
        super().__init__()
        places: dict[int | str | None, int] = {}
        self._places = [places.setdefault(one.replica, len(places)) for one in log]
        self.num_replicas = len(places)

    def choose(self, request: "SimulatedSequence", now: float) -> ReplicaView:  # noqa: ARG002 - it has been
        """Return the one that had it."""
        return self.replicas[self._places[request.input_index]]


def replay(
    log: list[LoggedRequest],
    engine: ReplicaSettings,
    num_replicas: int = 1,
    router: Router | None = None,
    report_interval: float = DEFAULT_REPORT_INTERVAL,
) -> Replay:
    """Return how a simulation of the requests of a log compares to the run that wrote it.

    engine: each of the replicas.  router: None for AsLogged.

    Raises:
        BatchdecodeError: the settings make no sense, the router fails or refuses a request, or one
            of the log can never run.
    """
    turns = Turns(workload_of_log(log))
    router = AsLogged(log) if router is None else router
    result = Fleet(turns, [engine] * num_replicas, router, report_interval).run()
    if result.refused:
        num_refused = result.refused.total()
        raise BatchdecodeError(f"the router refuses {num_refused:,} requests that were served")
    check_has_run(turns.sequences, engine.scheduling)
    return Replay(compare_runs(log, turns.sequences), result)
