"""Logs of real runs: what they may hold, and what a replay of them comes to."""

import json

import pytest
from jobs import engine_of

from batcher.errors import BatchdecodeError
from batcher.planning.replay import replay, workload_of_log
from batcher.settings import SchedulingSettings
from batcher.timing.profiles import step_time_of
from batcher.trace.logs import read_request_log

PROFILE = "rtx4090_llama3.1-8b"


def line(**more):
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


def read(*lines):
    texts = [one if isinstance(one, bytes) else json.dumps(one).encode() for one in lines]
    return read_request_log(enumerate(texts, 1), "log")


def test_requests_come_in_the_order_they_were_queued_from_0_on():
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
        ([line(), line()], "log:2: request_id 'a' is already in line 1"),
        ([], "log contains no requests"),
        ([b"nope"], "log:1: JSON is malformed"),
        ([b'{"extra":' + b"[" * 5000], "log:1: maximum recursion depth exceeded"),
    ],
)
def test_a_log_that_cannot_be_used_says_why(lines, message):
    with pytest.raises(BatchdecodeError) as caught:
        read(*lines)
    assert str(caught.value).startswith(message)


def test_numbers_are_vllms():
    log = read(
        line(),
        line(request_id="b", output_toks=1, queued_ts=101.0, scheduled_ts=None, last_token_ts=101),
    )
    outcome = replay(log, engine_of(2, SchedulingSettings(), step_time_of(PROFILE)))
    real = {one.name: one.real for one in outcome.comparisons}
    assert real["ttft mean"] == 0.5
    assert real["tpot mean"] == real["tpot p99"] == 0.5  # of the one with several tokens
    assert real["e2e mean"] == 1.5
    assert real["makespan"] == 3.0
    assert "queue mean" not in real  # it is not known of all of them


def test_a_request_that_can_never_run_cannot_have_run():
    settings = SchedulingSettings(kv_blocks=24, max_batch_tokens=64)
    with pytest.raises(BatchdecodeError, match="'a', can never run with --kv-blocks 24"):
        replay(read(line(input_toks=5000)), engine_of(6, settings, step_time_of(PROFILE)))
