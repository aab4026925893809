"""Plans whose simulations are spread over processes: the same answers, and nothing asked twice."""

import pytest
from examples import examples, mostly_heavy
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from batcher.metrics.slo import parse_slo
from batcher.planning.deployments import Deployment
from batcher.planning.measure import Question, measure, problem_of
from batcher.planning.plan import (
    SETTING_OF,
    LeastSearch,
    changed_limit,
    doublings,
    find_plan,
    likely,
    try_deployment,
)
from batcher.planning.streamed import parse_streamed
from batcher.settings import SchedulingSettings

STREAMED = parse_streamed("synthetic:rate=40,duration=1,prompt=200,output=30")


@pytest.mark.parametrize("searched", mostly_heavy(["batch", "rate"], "batch"))
def test_a_plan_does_not_depend_on_the_number_of_processes(searched):
    question = Question(STREAMED, parse_slo("ttft=0.2,e2e=1"), 0.9)
    base = Deployment(
        batch=4,
        profile="h100_llama3.1-8b_tp1",
        scheduling=SchedulingSettings(kv_blocks=100, max_batch_tokens=256),
    )
    alone, several = (find_plan(question, base, searched, num_jobs=n, small=0) for n in (1, 2))
    assert alone == several
    assert alone.reliefs, "what would help was looked for"


FLEET = Deployment(
    batch=4,
    replicas=2,
    profile="h100_llama3.1-8b_tp1",
    scheduling=SchedulingSettings(kv_blocks=100, max_batch_tokens=256),
)


@pytest.mark.parametrize("limit", ["e2e=0.2", "e2e=1ms"])
def test_what_is_given_up_changes_nothing_but_its_trial(monkeypatch, limit):
    monkeypatch.setattr("batcher.planning.measure.CHECKED_AT_ONCE", 8)
    question = Question(STREAMED, parse_slo(limit), 0.9)
    whole, quick = (
        find_plan(question, FLEET, "replicas", has_all_trials=has_all) for has_all in (True, False)
    )
    assert replace(quick, trials=whole.trials) == whole
    given_up = [one.value for one in quick.trials if one.share is None]
    assert bool(given_up) == whole.is_met
    for one, other in zip(whole.trials, quick.trials, strict=True):
        assert one.value == other.value
        assert one == other or (one.value in given_up and one.share < 0.9)


@examples(60)
@given(
    st.sampled_from([2, 8, 40]),
    st.sampled_from([20, 100, 4000]),
    st.sampled_from([None, 60, 300, 5000]),
    st.booleans(),
    st.sampled_from(["watermark", "on-demand", "no-evict"]),
)
def test_a_limit_that_was_not_reached_may_be_another(batch, kv_blocks, budget, is_wider, capacity):
    scheduling = SchedulingSettings(
        kv_blocks=kv_blocks, max_batch_tokens=budget, capacity=capacity, watermark=0.01
    )
    if budget is not None and budget < batch:
        return
    question = Question(STREAMED, parse_slo("ttft=0.2"))
    base = replace(FLEET, batch=batch, scheduling=scheduling)
    tried = try_deployment(question, (base, False))
    for limit in SETTING_OF if tried.reached is not None else ():
        changed = changed_limit(base, limit, is_wider=is_wider)
        if (
            changed != base
            and problem_of(changed) is None
            and not tried.reached.binds(limit, changed)
        ):
            outcome = measure(question, changed)
            for name in ("latencies", "goodput", "steps", "tails"):
                assert getattr(outcome, name) == getattr(tried.outcome, name)


class Score:
    """Which numbers are enough, and those that were asked for."""

    def __init__(self, enough):
        self._enough, self.asked = enough, []

    def __call__(self, number):
        self.asked.append(number)
        return (1.0 if number in self._enough else 0.5, -abs(number - 37))


@given(st.sets(st.integers(1, 100)), st.integers(1, 6), st.integers(0, 6))
def test_what_is_likely_begins_with_what_is_next(enough, count, start):
    score, rungs = Score(enough), doublings(1, 100)
    search = LeastSearch(1.0, rungs)
    for number in search.asks(start):
        search.scores[number] = score(number)
    known = {}
    for number in list(score.asked):
        numbers = likely(known, 1.0, rungs, start, count)
        assert numbers[0] == number
        assert 1 <= len(numbers) <= count
        assert len(set(numbers)) == len(numbers)
        assert known.keys().isdisjoint(numbers)
        known[number] = score(number)
    assert likely(known, 1.0, rungs, start, count) == []
