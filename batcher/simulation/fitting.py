"""Fits a profile to the times of requests: simulates their run until it is like the real one."""

from collections.abc import Callable
from typing import Any

import numpy as np
from msgspec import Struct

from batcher.settings import SchedulingSettings
from batcher.simulation.replaying import Comparison, replay
from batcher.simulation.request_log import LoggedRequest
from batcher.simulation.result import SimulationResult
from batcher.timing.profiles import Profile
from batcher.timing.term_search import fit_profile

MAX_TRIES = 200
STATED = ("ttft mean", "ttft p99", "tpot mean", "e2e mean", "makespan")


class RequestFit(Struct, frozen=True):
    """The profile that was found, how many were tried, and how far off its replay is.

    comparisons: the numbers STATED.  loss: the sum of the mean errors of the requests' TTFT, TPOT
    and E2E, as shares of the means.
    """

    profile: Profile
    num_tries: int
    loss: float
    comparisons: list[Comparison]

    def describe(self) -> str:
        """Return the error as a person reads it."""
        errors = [
            f"{one.name} {one.error:+.1%}".replace("%", " %")
            for one in self.comparisons
            if one.error is not None
        ]
        return f"of the replay it was fitted to: {', '.join(errors)}"


def fit_requests(
    log: list[LoggedRequest],
    num_slots: int,
    settings: SchedulingSettings,
    start: Profile,
    max_tries: int = MAX_TRIES,
) -> RequestFit:
    """Return the profile, found by a search from `start`, whose simulation of a log is nearest.

    Raises:
        BatchdecodeError: the settings make no sense, or a request of the log can never run.
    """
    found = fit_profile(start, _loss(log, num_slots, settings), max_tries)
    best = replay(log, num_slots, settings, found.profile.step_time("fitted"))
    stated = [one for one in best.comparisons if one.name in STATED]
    return RequestFit(found.profile, found.num_tries, found.loss, stated)


def _loss(
    log: list[LoggedRequest], num_slots: int, settings: SchedulingSettings
) -> Callable[[Profile], float]:
    """Return what tells how far off the simulation with a profile is: see RequestFit."""
    real = _latencies(
        np.array([request.queued_ts for request in log]),
        np.array([request.first_token_ts for request in log]),
        np.array([request.last_token_ts for request in log]),
        np.array([request.output_toks for request in log]),
    )

    def loss_of(profile: Profile) -> float:
        result = replay(log, num_slots, settings, profile.step_time("tried")).result
        simulated = _latencies_of(result)
        pairs = zip(real, simulated, strict=True)
        return sum(
            float(np.abs(ours - theirs).mean() / max(float(theirs.mean()), 1e-9))
            for theirs, ours in pairs
        )

    return loss_of


def _latencies_of(result: SimulationResult) -> tuple[Any, Any, Any]:
    sequences = result.sequences
    return _latencies(
        np.array([sequence.arrival_time for sequence in sequences]),
        np.array([sequence.first_token for sequence in sequences]),
        np.array([sequence.end for sequence in sequences]),
        np.array([sequence.num_output_tokens for sequence in sequences]),
    )


def _latencies(queued: Any, first: Any, last: Any, num_tokens: Any) -> tuple[Any, Any, Any]:
    """Return TTFT, TPOT (0 for one token) and E2E of each request, in seconds."""
    return first - queued, (last - first) / np.maximum(num_tokens - 1, 1), last - queued
