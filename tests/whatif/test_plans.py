"""Plans: what is searched, what binds, helps and gains, and that processes change nothing."""

import pytest
from examples import examples, mostly_heavy
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from served import MODEL, deployment_of, driving, grid, question_of

from batcher.errors import BatchdecodeError
from batcher.metrics.slo import parse_slo
from batcher.planning.compare import compare
from batcher.planning.deployments import Deployment, check_drafts
from batcher.planning.measure import Question, measure, problem_of
from batcher.planning.plan import (
    NUM_PROBES,
    SETTING_OF,
    Edge,
    Ladder,
    LeastSearch,
    changed_limit,
    doublings,
    find_plan,
    likely,
    try_deployment,
)
from batcher.planning.workload import parse_streamed, workload_of
from batcher.request import Request
from batcher.settings import SchedulingSettings

EIGHT = [(0, 1, 10)] * 8


def plan(*rows, slo, searched="rate", batch=8, **scheduling):
    question = question_of(*rows, slo=parse_slo(slo))
    return find_plan(question, deployment_of(batch, **scheduling), searched)


def reached_by(found):
    return {
        (relief.setting, relief.value): relief.reached
        for relief in found.reliefs
        if relief.reached is not None
    }


NO_EVICT = {"block_size": 4, "capacity": "no-evict", "prefix_cache": False}


@pytest.mark.parametrize(
    ("rows", "slo", "searched", "settings", "value", "binding", "reached"),
    [
        (EIGHT, "e2e=80", "batch", {}, 1, [], {}),  # the first is enough
        # of 4 + 5 - 1 tokens: 2 blocks of 4; two rounds of two requests, 5 s each
        ([(0, 4, 5)] * 4, "e2e=10", "kv_blocks", {"batch": 4} | NO_EVICT, 4, ["kv"], {}),
        # 4 prompts of 8 tokens in 2 steps
        ([(0, 8, 1)] * 4, "ttft=2", "max_batch_tokens", {"batch": 4}, 16, ["tokens"], {}),
        # two rounds in four slots of two blocks each
        ([(0, 4, 5)] * 8, "e2e=10", "batch", {"kv_blocks": 8} | NO_EVICT, 4, ["slots"], {}),
        # two prompts of 16 in steps of 8 tokens take 4 steps; in steps of 16, one by one, 8 in all
        (
            [(0, 16, 2)] * 4,
            "e2e=10",
            "batch",
            {"max_batch_tokens": 8},
            2,
            ["slots"],  # one more slot is enough
            {("max_batch_tokens", 16): 1},
        ),
    ],
)
def test_the_least_that_is_enough_and_what_binds_there(
    rows, slo, searched, settings, value, binding, reached
):
    found = plan(*rows, slo=slo, searched=searched, **settings)
    assert (found.is_met, found.value, found.binding) == (True, value, binding)
    assert found.is_last == (value == 1)
    assert reached_by(found) == reached


def test_each_limit_is_doubled_and_halved():
    found = plan(*[(0, 4, 5)] * 4, slo="e2e=10", searched="kv_blocks", batch=4, **NO_EVICT)
    assert {relief.share for relief in found.reliefs} == {0.5}
    tried = [relief.value for relief in found.reliefs]
    assert tried == [8, 2, 1, 2048, 1024, 512, 256, 128], "of slots, then of tokens"
    rows = [(10 * i, 32, 2) for i in range(12)]
    found = plan(*rows, slo="ttft=4", batch=2, long_prefill_threshold=8)
    assert found.binding == ["threshold"]
    assert {4, 16} <= {each.value for each in found.reliefs if each.constraint == "threshold"}


def test_requests_that_can_never_run_are_bound_by_kv():
    # of 16 tokens in 4 blocks of 4; neither twice the blocks nor any number makes a step shorter
    found = plan(*[(0, 13, 4)] * 4, slo="ttft=1ms", searched="batch", kv_blocks=1, block_size=4)
    assert (found.outcome.failed, found.binding) == (4, ["kv"])


@pytest.mark.parametrize(("num_gained", "binding"), [(24, ["compute"]), (25, ["tokens"])])
def test_a_change_that_helps_a_few_of_many_does_not_bind(num_gained, binding):
    # a hundred a time where only the first half is in time; a budget is said to help some more
    question = question_of(*[(0, 1, 1)] * 100, slo=parse_slo("e2e=1"), asked=1.0)
    ladder = Ladder(question.workload, deployment_of(50), "replicas")

    def measured(deployment):
        outcome = measure(question, deployment)
        if deployment.scheduling.max_batch_tokens is None:
            return outcome
        goodput = outcome.goodput
        return replace(outcome, goodput=replace(goodput, good=50 + num_gained))

    def told(deployment):
        return outcome if deployment.batch != 50 else measured(deployment)

    outcome = measured(ladder.deployment_of(1))
    assert outcome.goodput.good == 50
    edge = Edge(
        question=question, ladder=ladder, number=1, outcome=outcome, enough=2, drive=driving(told)
    )
    assert edge.analyse()[0] == binding


def test_more_that_is_not_enough_is_reported(tmp_path):
    # a step lasts a second for each row, so tpot is the batch; one at a time, the last waits 9 s
    profile = tmp_path / "p.yaml"
    profile.write_text("{t0: 0, w: 0, f: 0, g: 1000, d: 0, h: 0, e: 0}")
    question = question_of(*[(0, 1, 3)] * 4, slo=parse_slo("queue=6,tpot=2"))
    found = find_plan(question, deployment_of(8, profile=str(profile)), "batch")
    assert (found.is_met, found.value) == (True, 2)
    assert [trial.value for trial in found.contradictions] == [3, 4]


def test_rates_and_blocks_of_a_workload():
    workload = question_of((0, 10, 7), (4, 16, 1), (10, 1, 1)).workload
    assert workload.mean_rate == pytest.approx(0.2)
    assert workload.num_blocks(16) == 2 + 2 + 1
    turns = [Request(prompt=[1] * 10, max_tokens=6, ignore_eos=True, session="s")] * 2
    assert workload_of(turns, MODEL).num_blocks(16) == 1 + 2
    assert question_of((3, 1, 1), (3, 1, 1)).workload.mean_rate is None


# A step takes 1 s and 0.1 s for each token: a long prompt makes those wait who decode beside it.
BY_TOKENS = "{t0: 1000, w: 0, f: 100, g: 0, d: 0, h: 0, e: 0}"


@pytest.fixture
def by_tokens(tmp_path):
    path = tmp_path / "p.yaml"
    path.write_text(BY_TOKENS)
    return str(path)


def test_a_smaller_token_budget_that_serves_more_is_found_and_binds(by_tokens):
    # beside a piece of a prompt a token takes up to 4.2 s with 32 tokens a step, 2.6 s with 16
    rows = [(40 * i, 60, 8) for i in range(12)]
    limits = {"batch": 3, "max_batch_tokens": 32, "profile": by_tokens}
    found = plan(*rows, slo="tpot=2.8,ttft=60", **limits)
    assert (found.is_met, found.binding) == (True, ["tokens"])
    rate = reached_by(found)["max_batch_tokens", 16]
    assert rate > 1.4 * found.value
    again = plan(*rows, slo="tpot=2.8,ttft=60", **(limits | {"max_batch_tokens": 16}))
    assert again.value == pytest.approx(rate, rel=0.03), "what was promised is what is found"


def test_static_batching_can_be_continuous():
    rows = [(3 * i, 1, 10) for i in range(12)]
    found = plan(*rows, slo="queue=5", batch=4, batching="static")
    assert found.binding == ["static"]
    assert reached_by(found)["batching", "continuous"] > found.value


@pytest.mark.parametrize(
    ("is_wider", "limit", "settings", "expected"),
    [
        (True, "slots", {"batch": 4}, {"batch": 8}),
        (False, "slots", {"batch": 4}, {"batch": 2}),
        (False, "slots", {"batch": 1}, {}),
        (True, "slots", {"batch": 4, "max_batch_tokens": 5}, {"batch": 8, "max_batch_tokens": 8}),
        (True, "tokens", {"batch": 4}, {}),
        (False, "tokens", {"batch": 4}, {"max_batch_tokens": 2048}),
        (False, "tokens", {"batch": 4000}, {"max_batch_tokens": 4000}),
        (False, "tokens", {"batch": 4, "max_batch_tokens": 9}, {"max_batch_tokens": 4}),
        (True, "kv", {"batch": 4}, {}),
        (False, "kv", {"batch": 4, "kv_blocks": 7}, {"kv_blocks": 3}),
        (True, "threshold", {"batch": 4}, {}),
        (True, "static", {"batch": 4, "batching": "static"}, {"batching": "continuous"}),
        (True, "static", {"batch": 4}, {}),
        (False, "static", {"batch": 4, "batching": "static"}, {}),
    ],
)
def test_limits_in_both_directions(is_wider, limit, settings, expected):
    changed = changed_limit(deployment_of(**settings), limit, is_wider=is_wider)
    assert changed == deployment_of(**(settings | expected))


def search(is_enough, *, high=1000, start=0):
    found = LeastSearch(1.0, doublings(1, high))
    for number in found.asks(start):
        found.scores[number] = float(is_enough(number)), 0.0
    return found


@given(st.integers(1, 5000), st.integers(1, 5000), st.integers(0, 100))
def test_of_what_stays_enough_the_least_is_found_in_few_tries(least, high, start):
    rungs = doublings(1, high)
    found = search(lambda number: number >= least, high=high, start=start % len(rungs))
    assert found.least == (least if least <= high else None)
    assert found.contradictions == []
    assert len(found.scores) <= 2 * len(rungs) + NUM_PROBES + 8
    assert all(1 <= number <= high for number in found.scores)


@given(st.sets(st.integers(1, 200)), st.integers(1, 200))
def test_whatever_it_is_told_is_what_it_has_seen(enough, high):
    asked = []

    def is_enough(number):
        asked.append(number)
        return number in enough

    found = search(is_enough, high=high)
    assert len(asked) == len(set(asked)), "nothing is simulated twice"
    seen = sorted(set(asked) & enough)
    assert found.least == (seen[0] if seen else None)
    if seen:
        assert found.least == 1 or found.least - 1 in asked, "the one before it was tried"
        assert found.contradictions == sorted(n for n in asked if n > seen[0] and n not in enough)


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
    of_file = question_of(*[(0, 1, 5)] * 40, slo=parse_slo(limit), asked=0.9)
    alone = replace(FLEET, replicas=1)  # which is simulated to its end
    assert find_plan(of_file, alone, "batch", has_all_trials=False).trials[0].share is not None
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
    for limit in SETTING_OF:
        changed = changed_limit(base, limit, is_wider=is_wider)
        if changed != base and problem_of(changed) is None and not tried.binds(limit, changed):
            outcome = measure(question, changed)
            for name in ("latencies", "goodput", "steps", "tails"):
                assert getattr(outcome, name) == getattr(tried.outcome, name)


@given(st.sets(st.integers(1, 100)), st.integers(1, 6), st.integers(0, 6))
def test_what_is_likely_begins_with_what_is_next(enough, count, start):
    rungs = doublings(1, 100)
    asked = search(enough.__contains__, high=100, start=start).scores
    known = {}
    for number, score in asked.items():
        numbers = likely(known, 1.0, rungs, start, count)
        assert numbers[0] == number
        assert 1 <= len(numbers) <= count
        assert len(set(numbers)) == len(numbers)
        assert known.keys().isdisjoint(numbers)
        known[number] = score
    assert likely(known, 1.0, rungs, start, count) == []


def test_a_draft_that_is_always_right_saves_steps_by_arithmetic():
    # 1 token with the prompt, then 5 a step: 21 s instead of 101
    drafted = grid(draft_tokens="none,4", draft_acceptance="1", batch="1")
    cells = compare(question_of((0, 100, 101)), drafted, growth=0.1)
    assert [cell.outcome.makespan for cell in cells if cell.outcome] == [101.0, 21.0]
    assert [cell.speedup for cell in cells] == [None, pytest.approx(101 / 21, rel=1e-5)]
    drafts = cells[1].outcome.drafts
    assert (drafts.verified, drafts.accepted) == (80, 80)
    assert (drafts.acceptance, drafts.tokens_per_step, drafts.making) == (1.0, 5.0, 0.0)


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        ({"draft_acceptance": "0.5"}, "--draft-acceptance has no effect without --draft-tokens"),
        ({"draft_cost": "0.5"}, "--draft-cost has no effect without --draft-tokens"),
        (
            {"draft_tokens": "none", "draft_cost": "0.5", "draft_acceptance": "1"},
            "--draft-acceptance has no effect without",
        ),
        ({"draft_tokens": "4"}, "--draft-tokens needs --draft-acceptance"),
    ],
)
def test_options_of_drafts_go_together(texts, message):
    with pytest.raises(BatchdecodeError, match=message):
        check_drafts(texts, grid(**texts))
