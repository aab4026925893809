"""Plans whose simulations are spread over processes: the same answers, and nothing asked twice."""

import pytest
from examples import mostly_heavy
from hypothesis import given
from hypothesis import strategies as st

from batcher.metrics.slo import parse_slo
from batcher.planning.deployments import Deployment
from batcher.planning.measure import Question
from batcher.planning.plan import LeastSearch, doublings, find_plan, likely
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
