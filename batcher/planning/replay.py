"""A log of a real run, of one engine or several behind a router, simulated: how far off that is."""

from collections.abc import Iterable, Sequence
from operator import attrgetter

import numpy as np
from msgspec import Struct

from batcher.errors import BatchdecodeError
from batcher.planning.fleet import Fleet, FleetResult
from batcher.planning.request_log import LoggedRequest, workload_of_log
from batcher.planning.routers import DEFAULT_REPORT_INTERVAL, ReplicaView, Router
from batcher.planning.simulated_sequence import SimulatedSequence, Turns
from batcher.planning.simulator import ReplicaSettings

PERCENTS = (50, 99)


class Comparison(Struct, frozen=True):
    """A number of the real run and of its simulation, in seconds; error: a share of the real one.

    The error is None where the real one is 0.
    """

    name: str
    real: float
    simulated: float
    error: float | None


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

    def choose(self, request: SimulatedSequence, now: float) -> ReplicaView:  # noqa: ARG002 - it has been
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
    failed = [sequence.id for sequence in turns.sequences if sequence.has_failed]
    if failed:
        raise BatchdecodeError(
            f"{len(failed):,} requests, the first of them {failed[0]!r}, can never run with "
            f"--kv-blocks {engine.scheduling.kv_blocks}, and they did"
        )
    logged = attrgetter(
        "queued_ts", "scheduled_ts", "first_token_ts", "last_token_ts", "output_toks"
    )
    ran = attrgetter("arrival_time", "admitted", "first_token", "end", "num_output_tokens")
    real, simulated = _numbers(map(logged, log)), _numbers(map(ran, turns.sequences))
    comparisons = [
        Comparison(name, value, simulated[name], simulated[name] / value - 1 if value else None)
        for name, value in real.items()
    ]
    return Replay(comparisons, result)


def _numbers(rows: Iterable[tuple[float | None, ...]]) -> dict[str, float]:
    """Return mean and percentiles, by nearest rank, of all latencies, and the makespan.

    rows: arrival, admission (None if not known), first and last token, and the number of tokens.
    """
    arrival, admitted, first, last, num_tokens = np.ascontiguousarray(np.array([*rows], float).T)
    several = num_tokens > 1
    latencies = {
        "queue": admitted[:0] if np.isnan(admitted).any() else admitted - arrival,
        "ttft": first - arrival,
        "tpot": (last - first)[several] / (num_tokens[several] - 1),
        "e2e": last - arrival,
    }
    numbers: dict[str, float] = {}
    for name, seconds in latencies.items():
        if not len(seconds):
            continue
        numbers[f"{name} mean"] = float(seconds.mean())
        for percent in PERCENTS:
            value = np.percentile(seconds, percent, method="inverted_cdf")
            numbers[f"{name} p{percent}"] = float(value)
    numbers["makespan"] = float(last.max() - arrival.min())
    return numbers
