"""A real run and its simulation side by side: how far off each number is."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from msgspec import Struct

from batcher.errors import BatchdecodeError
from batcher.settings import SchedulingSettings
from batcher.simulation.request_log import LoggedRequest, workload_of_log
from batcher.simulation.result import SimulationResult
from batcher.simulation.sequence import SimulatedSequence
from batcher.simulation.simulator import simulate
from batcher.timing.step_time import StepTime

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
    result: SimulationResult


def replay(
    log: list[LoggedRequest], num_slots: int, settings: SchedulingSettings, step_time: StepTime
) -> Replay:
    """Return how a simulation of the requests of a log compares to the run that wrote it.

    Raises:
        BatchdecodeError: the settings make no sense, or a request of the log can never run.
    """
    result = simulate(workload_of_log(log), num_slots, settings, step_time)
    check_has_run(result, settings)
    return Replay(compare_runs(log, result.sequences), result)


def check_has_run(result: SimulationResult, settings: SchedulingSettings) -> None:
    """Make sure that all requests of a log have run in its simulation.

    Raises:
        BatchdecodeError: they have not.
    """
    failed = [sequence.id for sequence in result.sequences if sequence.has_failed]
    if failed:
        raise BatchdecodeError(
            f"{len(failed):,} requests, the first of them {failed[0]!r}, can never run with "
            f"--kv-blocks {settings.kv_blocks}, and they did"
        )


def compare_runs(
    log: Sequence[LoggedRequest], sequences: Sequence[SimulatedSequence]
) -> list[Comparison]:
    """Return how requests of a log compare to the same ones as they were simulated."""
    real, simulated = _numbers_of_log(log), _numbers_of_sequences(sequences)
    return [
        Comparison(name, value, simulated[name], simulated[name] / value - 1 if value else None)
        for name, value in real.items()
    ]


def _numbers_of_log(log: Sequence[LoggedRequest]) -> dict[str, float]:
    scheduled: Any = None
    if all(request.scheduled_ts is not None for request in log):
        scheduled = np.array([request.scheduled_ts for request in log])
    return _numbers(
        np.array([request.queued_ts for request in log]),
        scheduled,
        np.array([request.first_token_ts for request in log]),
        np.array([request.last_token_ts for request in log]),
        np.array([request.output_toks for request in log]),
    )


def _numbers_of_sequences(sequences: Sequence[SimulatedSequence]) -> dict[str, float]:
    return _numbers(
        np.array([sequence.arrival_time for sequence in sequences]),
        np.array([sequence.admitted for sequence in sequences]),
        np.array([sequence.first_token for sequence in sequences]),
        np.array([sequence.end for sequence in sequences]),
        np.array([sequence.num_output_tokens for sequence in sequences]),
    )


def _numbers(
    queued: Any, scheduled: Any, first: Any, last: Any, num_tokens: Any
) -> dict[str, float]:
    """Return mean and percentiles, by nearest rank, of all latencies, and the makespan.

    Of each request [requests]: when it was queued, scheduled (None: not known), given its first and
    its last token, and how many it was given.
    """
    several = num_tokens > 1
    latencies = {
        "queue": None if scheduled is None else scheduled - queued,
        "ttft": first - queued,
        "tpot": (last - first)[several] / (num_tokens[several] - 1),
        "e2e": last - queued,
    }
    numbers: dict[str, float] = {}
    for name, times in latencies.items():
        if times is None or not len(times):
            continue
        numbers[f"{name} mean"] = float(times.mean())
        for percent in PERCENTS:
            value = np.percentile(times, percent, method="inverted_cdf")
            numbers[f"{name} p{percent}"] = float(value)
    numbers["makespan"] = float(last.max() - queued.min())
    return numbers
