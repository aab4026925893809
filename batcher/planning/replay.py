"""A real run and its simulation side by side, and the profile under which they are most alike."""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from msgspec import Struct

from batcher.errors import BatchdecodeError
from batcher.metrics.arrays import ServedTimes
from batcher.planning.fleet import Fleet
from batcher.planning.fleet_result import FleetResult
from batcher.planning.replica import ReplicaSettings
from batcher.planning.request_log import LoggedRequest, workload_of_log
from batcher.planning.routers import DEFAULT_REPORT_INTERVAL, ReplicaView, Router
from batcher.planning.simulated_sequence import SimulatedSequence, Turns
from batcher.planning.simulator import served_times, simulate, times_of
from batcher.settings import SchedulingSettings
from batcher.timing.profiles import Profile
from batcher.timing.term_search import Residuals, fit_profile

PERCENTS = (50, 99)


class Comparison(Struct, frozen=True):
    """A number of the real run and of its simulation, in seconds; error: a share of the real one.

    The error is None where the real one is 0.
    """

    name: str
    real: float
    simulated: float
    error: float | None


def check_has_run(sequences: Iterable[SimulatedSequence], settings: SchedulingSettings) -> None:
    """Make sure that all requests of a log have run in its simulation.

    Raises:
        BatchdecodeError: they have not.
    """
    failed = [sequence.id for sequence in sequences if sequence.has_failed]
    if failed:
        raise BatchdecodeError(
            f"{len(failed):,} requests, the first of them {failed[0]!r}, can never run with "
            f"--kv-blocks {settings.kv_blocks}, and they did"
        )


def compare_runs(
    log: Sequence[LoggedRequest], sequences: Sequence[SimulatedSequence]
) -> list[Comparison]:
    """Return how requests of a log compare to the same ones as they were simulated."""
    real, simulated = _numbers(_times_of(log)), _numbers(times_of(sequences))
    return [
        Comparison(name, value, simulated[name], simulated[name] / value - 1 if value else None)
        for name, value in real.items()
    ]


def _times_of(log: Sequence[LoggedRequest]) -> ServedTimes:
    """Return the times of the requests of a log; when they were scheduled is NaN if not known."""
    return served_times(
        (
            request.queued_ts,
            request.scheduled_ts,
            request.first_token_ts,
            request.last_token_ts,
            request.output_toks,
        )
        for request in log
    )


def _numbers(times: ServedTimes) -> dict[str, float]:
    """Return mean and percentiles, by nearest rank, of all latencies, and the makespan."""
    arrival, admitted, first, last, num_tokens = times
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


# A log of a real run, of one engine or several behind a router, simulated: how far off that is.


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


MAX_TRIES = 200
LEAST_REQUESTS = 2  # to be fitted to, and to be held out
_PARTS = {"input_toks": 5, "output_toks": 5, "queued_ts": 8}
_LEAST_SHARE = 1e-3  # of the mean: what is shorter is as good as 0
STATED = ("ttft mean", "ttft p99", "tpot mean", "e2e mean", "makespan")


class RequestFit(Struct, frozen=True):
    """The profile that was found, how many were tried, and how far off its replay is.

    num_fitted: to how many requests it was fitted, the first that came.  loss: the mean of the
    errors of TTFT, TPOT, E2E and the makespan, each the logarithm of the ratio of means, over all
    requests and over groups of them.
    comparisons: the numbers STATED of these requests; held_out: those of the others.
    """

    profile: Profile
    num_tries: int
    num_fitted: int
    loss: float
    comparisons: list[Comparison]
    held_out: list[Comparison]

    @property
    def largest_error(self) -> float:
        """The largest error of a mean, or of the makespan; a p99 is that of few requests."""
        means = [one for one in self.comparisons if not one.name.endswith("p99")]
        return max(abs(one.error) for one in means if one.error is not None)

    def describe(self) -> list[str]:
        """Return the error as a person reads it: where it was fitted, and where it was not."""
        fitted = f"of the replay it was fitted to: {_describe(self.comparisons)}"
        if not self.held_out:
            return [fitted]
        return [fitted, f"of the requests after these: {_describe(self.held_out)}"]


def fit_requests(
    log: list[LoggedRequest],
    num_slots: int,
    settings: SchedulingSettings,
    start: Profile,
    max_tries: int = MAX_TRIES,
    holdout: float = 0.0,
) -> RequestFit:
    """Return the profile, found by searches around `start`, whose simulation of a log is nearest.

    holdout: the share of the requests, those that came last, whose times have no part in the fit.
    They are simulated with the others, as they were run with them.

    Raises:
        BatchdecodeError: the settings make no sense, a request of the log can never run, or too few
            requests are held out or not.
    """
    num_fitted = len(log) - round(holdout * len(log))
    if holdout and not LEAST_REQUESTS <= num_fitted <= len(log) - LEAST_REQUESTS:
        raise BatchdecodeError(
            f"a holdout of {holdout:g} leaves {num_fitted} of {len(log)} requests to fit to: "
            f"at least {LEAST_REQUESTS} have to be fitted to, and held out"
        )
    residuals_of = _residuals(log, num_fitted, num_slots, settings)
    found = fit_profile(start, residuals_of, max_tries)
    step_time = found.profile.step_time("fitted")
    ran = simulate(workload_of_log(log), num_slots, settings, step_time).sequences
    return RequestFit(
        found.profile,
        found.num_tries,
        num_fitted,
        found.loss,
        _stated(log[:num_fitted], ran[:num_fitted]),
        _stated(log[num_fitted:], ran[num_fitted:]) if holdout else [],
    )


def _stated(
    log: Sequence[LoggedRequest], sequences: Sequence[SimulatedSequence]
) -> list[Comparison]:
    return [one for one in compare_runs(log, sequences) if one.name in STATED]


def _describe(comparisons: list[Comparison]) -> str:
    errors = [f"{one.name} {one.error:+.1%}" for one in comparisons if one.error is not None]
    return ", ".join(errors).replace("%", " %")


def _residuals(
    log: list[LoggedRequest], num_fitted: int, num_slots: int, settings: SchedulingSettings
) -> Residuals:
    """Return what tells how far off the simulation with a profile is, of the first requests."""
    workload, fitted = workload_of_log(log), log[:num_fitted]
    groups = _groups(fitted)
    real = _latencies(_times_of(fitted))

    def residuals_of(profile: Profile) -> Any:
        result = simulate(workload, num_slots, settings, profile.step_time("tried"))
        check_has_run(result.sequences, settings)
        simulated = _latencies(times_of(result.sequences[:num_fitted]))
        parts = [_ratios(*both, groups) for both in zip(simulated, real, strict=True)]
        return np.concatenate(parts) / len(parts)

    return residuals_of


def _groups(log: Sequence[LoggedRequest]) -> list[list[Any]]:
    """Return the places of all requests, and of parts of them: by prompt, output and time.

    A mean over many is no matter of chance, as it is for one of them whether it just missed a step.
    """
    groups = [[np.arange(len(log))]]
    for key, num_parts in _PARTS.items():
        order = np.argsort([getattr(request, key) for request in log], kind="stable")
        groups.append(np.array_split(order, min(num_parts, len(log))))
    return groups


def _ratios(simulated: Any, real: Any, groups: list[list[Any]]) -> Any:
    """Return the logarithms of ratios of means, of all times and of groups of them.

    The sum of their sizes is the mean of the error in all ways of grouping.
    """
    if len(real) == 1:
        groups = [[slice(None)]]
    least = max(_LEAST_SHARE * float(real.mean()), 1e-9)
    return np.array(
        [
            np.log(max(simulated[part].mean(), least) / max(real[part].mean(), least))
            / len(parts)
            / len(groups)
            for parts in groups
            for part in parts
        ]
    )


def _latencies(times: ServedTimes) -> tuple[Any, Any, Any, Any]:
    """Return TTFT, TPOT (0 for one token) and E2E of each request, and the makespan, in seconds."""
    queued, _, first, last, num_tokens = times
    per_token = (last - first) / np.maximum(num_tokens - 1, 1)
    return first - queued, per_token, last - queued, np.array([last.max() - queued.min()])
