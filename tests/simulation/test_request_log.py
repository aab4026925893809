"""Logs of real runs: what they may hold, and what a replay of them comes to."""

import json
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace
from timing.smooth_profile import SMOOTH

from batcher.errors import BatchdecodeError
from batcher.planning.replay import fit_requests, replay
from batcher.planning.replica import ReplicaSettings
from batcher.planning.request_log import LoggedRequest, read_request_log, workload_of_log
from batcher.planning.simulator import simulate
from batcher.settings import SchedulingSettings
from batcher.timing.carrying import load_profile
from batcher.timing.roofline import load_gpu, load_model_shape
from batcher.timing.step_time import StepTime
from batcher.timing.term_search import roofline_profile

SETTINGS = SchedulingSettings(kv_blocks=24, max_batch_tokens=64)
NUM_SLOTS = 6
_ROOFLINE = roofline_profile(load_model_shape("llama-3.1-8b"), load_gpu("h100-sxm"))
STARTS = {
    "a roofline": _ROOFLINE,
    "too slow": replace(SMOOTH, **{term: 60 * value for term, value in SMOOTH.terms.items()}),
}


def line(**more: Any) -> dict[str, Any]:
    """A line of a log."""
    return {
        "request_id": "a",
        "input_toks": 10,
        "output_toks": 5,
        "queued_ts": 100.0,
        "scheduled_ts": 100.5,
        "first_token_ts": 101.0,
        "last_token_ts": 103.0,
        **more,
    }


def read(*lines: dict[str, Any]) -> list[LoggedRequest]:
    numbered = [(number, json.dumps(one).encode()) for number, one in enumerate(lines, 1)]
    return read_request_log(numbered, "log")


def simulated_log(
    step_time: StepTime, num_requests: int = 40, gap: float = 0.06
) -> list[LoggedRequest]:
    """The log of a run that was a simulation itself."""
    lines = [
        line(
            request_id=f"r{number}",
            input_toks=40 + 37 * number % 90,
            output_toks=1 + 29 * number % 60,
            queued_ts=50 + gap * number,
            scheduled_ts=None,
            first_token_ts=99,
            last_token_ts=99,
        )
        for number in range(num_requests)
    ]
    log = read(*lines)
    result = simulate(workload_of_log(log), NUM_SLOTS, SETTINGS, step_time)
    return read(
        *(
            one
            | {
                "scheduled_ts": 50 + sequence.admitted,
                "first_token_ts": 50 + sequence.first_token,
                "last_token_ts": 50 + sequence.end,
            }
            for one, sequence in zip(lines, result.sequences, strict=True)
        )
    )


def test_requests_come_in_the_order_they_were_queued_from_0_on() -> None:
    log = read(line(request_id="b", queued_ts=100.25), line())
    jobs = workload_of_log(log).jobs
    assert [(job.id, job.arrival_time) for job in jobs] == [("a", 0.0), ("b", 0.25)]


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([line(queued_ts="x")], "log:1: expected a number, got a text at `queued_ts`; fields: req"),
        ([line(input_toks=1.5)], "log:1: expected a whole number, got a number at `input_toks`"),
        ([{"request_id": "a"}], "log:1: object missing required field `input_toks`; fields: req"),
        ([line(output_toks=0)], "log:1: expected a whole number >= 1 at `output_toks`"),
        ([line(first_token_ts=90.0)], "log:1: first_token_ts 90.0 is before scheduled_ts 100.5"),
        ([line(), line()], "log:2: request_id 'a' is in line 1 already"),
        ([], "log: there are no requests in it"),
    ],
)
def test_a_log_that_cannot_be_used_says_why(lines: list[dict[str, Any]], message: str) -> None:
    with pytest.raises(BatchdecodeError) as caught:
        read(*lines)
    assert str(caught.value).startswith(message)


def test_json_that_is_none_is_called_so() -> None:
    with pytest.raises(BatchdecodeError, match=r"^log:1: JSON is malformed"):
        read_request_log([(1, b"nope")], "log")


def test_a_line_that_is_nested_too_deeply_is_named() -> None:
    deep = "[" * 5000 + "]" * 5000
    text = json.dumps(line(extra=None)).replace("null", deep).encode()
    with pytest.raises(BatchdecodeError, match=r"^log:1: maximum recursion depth exceeded"):
        read_request_log([(1, text)], "log")


def engine_of(
    num_slots: int, scheduling: SchedulingSettings, step_time: StepTime
) -> ReplicaSettings:
    return ReplicaSettings(num_slots=num_slots, scheduling=scheduling, step_time=step_time)


def test_the_replay_of_a_simulated_run_is_that_run() -> None:
    _, profile = load_profile("rtx4090_llama3.1-8b")
    step_time = profile.step_time("p")
    outcome = replay(simulated_log(step_time), engine_of(NUM_SLOTS, SETTINGS, step_time))
    assert outcome.result.totals.num_preemptions
    for one in outcome.comparisons:
        assert one.simulated == pytest.approx(one.real, abs=1e-9)
    names = [one.name for one in outcome.comparisons]
    assert names[:3] == ["queue mean", "queue p50", "queue p99"]
    assert names[-1] == "makespan"


def test_numbers_are_vllms() -> None:
    log = read(
        line(),
        line(request_id="b", output_toks=1, queued_ts=101.0, scheduled_ts=None, last_token_ts=101),
    )
    _, profile = load_profile("rtx4090_llama3.1-8b")
    outcome = replay(log, engine_of(2, SchedulingSettings(), profile.step_time("p")))
    real = {one.name: one.real for one in outcome.comparisons}
    assert real["ttft mean"] == 0.5
    assert real["tpot mean"] == real["tpot p99"] == 0.5  # of the one with several tokens
    assert real["e2e mean"] == 1.5
    assert real["makespan"] == 3.0
    assert "queue mean" not in real  # it is not known of all of them


def test_a_request_that_can_never_run_cannot_have_run() -> None:
    _, profile = load_profile("rtx4090_llama3.1-8b")
    with pytest.raises(BatchdecodeError, match="'a', can never run with --kv-blocks 24"):
        replay(
            read(line(input_toks=5000)),
            engine_of(NUM_SLOTS, SETTINGS, profile.step_time("p")),
        )


def test_a_profile_is_found_again_from_the_times_of_requests() -> None:
    _, start = load_profile("h100_llama3.1-8b_tp1")
    log = simulated_log(SMOOTH.step_time("p"))
    fit = fit_requests(log, NUM_SLOTS, SETTINGS, start, max_tries=200)
    assert fit.num_tries <= 200
    errors = {one.name: one.error for one in fit.comparisons}
    assert abs(errors["e2e mean"]) < 0.02
    assert abs(errors["tpot mean"]) < 0.02
    assert abs(errors["makespan"]) < 0.02
    (described,) = fit.describe()
    assert described.startswith("of the replay it was fitted to: ttft mean ")
    assert fit.held_out == []


@pytest.mark.heavy
@pytest.mark.parametrize(("name", "gap"), [("a roofline", 0.3), ("too slow", 0.2)])
def test_a_fit_is_found_from_afar(name: str, gap: float) -> None:
    log = simulated_log(SMOOTH.step_time("p"), 60, gap)
    fit = fit_requests(log, NUM_SLOTS, SETTINGS, STARTS[name], max_tries=150)
    errors = {one.name: one.error for one in fit.comparisons}
    assert abs(errors["ttft mean"]) < 0.02
    assert fit.largest_error < 0.02


def test_the_makespan_is_a_part_of_what_is_fitted() -> None:
    log = simulated_log(SMOOTH.step_time("p"))
    fit = fit_requests(log, NUM_SLOTS, SETTINGS, SMOOTH, max_tries=1)
    assert fit.loss == pytest.approx(0, abs=1e-6)
    last = max(range(len(log)), key=lambda place: log[place].last_token_ts)
    log[last] = replace(log[last], last_token_ts=log[last].last_token_ts * 2)
    fit = fit_requests(log, NUM_SLOTS, SETTINGS, SMOOTH, max_tries=1)
    makespan = next(one.error for one in fit.comparisons if one.name == "makespan")
    assert makespan < -0.5
    assert fit.loss > -np.log(1 + makespan) / 4, "it counts in full, as the means do"
    assert fit.largest_error == -makespan


def test_what_is_held_out_has_no_part_in_the_fit_and_judges_it() -> None:
    log = simulated_log(SMOOTH.step_time("p"))
    half = len(log) // 2
    slower = [
        replace(one, first_token_ts=one.first_token_ts + 9, last_token_ts=one.last_token_ts + 9)
        for one in log[half:]
    ]
    fit = fit_requests([*log[:half], *slower], NUM_SLOTS, SETTINGS, SMOOTH, 30, holdout=0.5)
    assert fit.num_fitted == half
    assert fit.loss == pytest.approx(0, abs=1e-6), "nothing is seen of the others"
    assert fit.profile.terms == SMOOTH.terms
    held_out = {one.name: one for one in fit.held_out}
    assert held_out["ttft mean"].simulated == pytest.approx(held_out["ttft mean"].real - 9)
    assert fit.describe()[1].startswith("of the requests after these: ttft mean -")


@pytest.mark.parametrize("holdout", [0.01, 0.99])
def test_too_few_to_be_held_out_or_fitted_to_are_refused(holdout: float) -> None:
    _, profile = load_profile("rtx4090_llama3.1-8b")
    log = simulated_log(profile.step_time("p"))
    with pytest.raises(BatchdecodeError, match=f"a holdout of {holdout} leaves "):
        fit_requests(log, NUM_SLOTS, SETTINGS, profile, holdout=holdout)
