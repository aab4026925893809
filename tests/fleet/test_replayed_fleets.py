"""A log of several engines, replayed: those that it names, or behind a router."""

import numpy as np
import pytest
from msgspec.structs import replace

from batcher.errors import BatchdecodeError
from batcher.planning.fleet import Fleet
from batcher.planning.replay import AsLogged, LoggedRequest, replay, workload_of_log
from batcher.planning.routers import OwnRouter, Router, router_of
from batcher.planning.simulated_sequence import Turns
from batcher.planning.simulator import ReplicaSettings
from batcher.settings import SchedulingSettings
from batcher.timing.profiles import step_time_of

ENGINE = ReplicaSettings(
    num_slots=4,
    scheduling=SchedulingSettings(kv_blocks=40, max_batch_tokens=256),
    step_time=step_time_of("rtx4090_llama3.1-8b"),
)
NAMES = ["a", 7, "c"]


class Noting(Router):
    """Does what another router does, and notes where each request went."""

    def __init__(self, name):
        super().__init__()
        self._router, self.went = router_of(name), []
        self.hears_ends = self._router.hears_ends
        self.note = self._router.note

    def use(self, replicas):
        self._router.use(replicas)

    def choose(self, request, now):
        view = self._router.choose(request, now)
        self.went.append(view.index)
        return view


def log_of_a_fleet(name, number=3):
    """A log that simulated engines behind a router wrote, each request with its replica."""
    chance = np.random.default_rng(5)
    arrivals = np.cumsum(chance.exponential(0.05, 90)).round(6).tolist()
    asked = [
        LoggedRequest(
            request_id=str(number),
            input_toks=int(chance.integers(1, 200)),
            output_toks=int(chance.integers(1, 60)),
            queued_ts=time,
            first_token_ts=time,
            last_token_ts=time,
        )
        for number, time in enumerate(arrivals)
    ]
    turns, router = Turns(workload_of_log(asked)), Noting(name)
    Fleet(turns, [ENGINE] * number, router, 0.1).run()
    first = asked[0].queued_ts
    return [
        replace(
            request,
            scheduled_ts=first + done.admitted,
            first_token_ts=first + done.first_token,
            last_token_ts=first + done.end,
            replica=NAMES[place],
        )
        for request, done, place in zip(asked, turns.sequences, router.went, strict=True)
    ]


def errors_of(outcome):
    return [one.error for one in outcome.comparisons]


@pytest.mark.parametrize(
    ("name", "number"), [("round-robin", 3), ("least-loaded", 3), ("round-robin", 1)]
)
def test_the_replay_of_a_simulated_fleet_is_that_fleet(name, number):
    log = log_of_a_fleet(name, number)
    assert AsLogged(log).num_replicas == number
    as_logged = replay(log, ENGINE, number)
    routed = replay(log, ENGINE, number, router_of(name))
    assert as_logged.result.totals.num_preemptions
    for outcome in (as_logged, routed):
        assert errors_of(outcome) == pytest.approx([0] * 13, abs=1e-7)
    served = sorted(one.num_served for one in as_logged.result.replicas)
    assert served == sorted(sum(one.replica == name for one in log) for name in NAMES[:number])


def test_what_a_router_refuses_was_served_all_the_same():
    log = log_of_a_fleet("round-robin")
    with pytest.raises(BatchdecodeError, match="the router refuses 90 requests that were served"):
        replay(log, ENGINE, 3, OwnRouter("none", lambda request, replicas: None))
