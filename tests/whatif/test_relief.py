"""What would help at the edge of an SLO, in both directions of each limit, and how far."""

import pytest
from msgspec.structs import replace
from served import deployment_of, question_of

from batcher.metrics.slo import parse_slo
from batcher.planning.measure import measure
from batcher.planning.plan import Edge, Ladder, changed_limit, find_plan

# A step takes 1 s and 0.1 s for each token: a long prompt makes those wait who decode beside it.
BY_TOKENS = "{t0: 1000, w: 0, f: 100, g: 0, d: 0, h: 0, e: 0}"


@pytest.fixture
def by_tokens(tmp_path):
    path = tmp_path / "p.yaml"
    path.write_text(BY_TOKENS)
    return str(path)


def plan(*rows, slo, searched="rate", asked=1.0, **deployment):
    question = question_of(*rows, slo=parse_slo(slo), asked=asked)
    return find_plan(question, deployment_of(**deployment), searched)


def reached_by(found):
    return {
        (relief.setting, relief.value): relief.reached
        for relief in found.reliefs
        if relief.reached is not None
    }


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


def test_nothing_else_that_lets_fewer_do_leaves_what_is_searched():
    # two rounds in four slots of two blocks each
    settings = {"block_size": 4, "capacity": "no-evict", "prefix_cache": False}
    rows = [(0, 4, 5)] * 8
    found = plan(*rows, slo="e2e=10", searched="batch", batch=8, kv_blocks=8, **settings)
    assert (found.value, found.binding, reached_by(found)) == (4, ["slots"], {})


def test_another_setting_that_lets_fewer_do_helps():
    # two prompts of 16 in steps of 8 tokens take 4 steps; in steps of 16, one by one, 8 in all
    found = plan(*[(0, 16, 2)] * 4, slo="e2e=10", searched="batch", batch=8, max_batch_tokens=8)
    assert (found.value, found.binding) == (2, ["slots"]), "one more slot is enough"
    assert reached_by(found) == {("max_batch_tokens", 16): 1}


def test_less_than_a_hundredth_is_no_help():
    # it is said what is enough: 1,000 blocks, with twice the slots 999, with half of them 900
    question = question_of(*[(0, 1, 1)] * 8, slo=parse_slo("e2e=1"))
    needed = {8: 1000, 16: 999, 4: 900}
    outcome = measure(question, deployment_of(8))

    def simulate(deployment):
        has_enough = deployment.scheduling.kv_blocks >= needed.get(deployment.batch, 1000)
        goodput = replace(outcome.goodput, good=8 if has_enough else 7)
        return replace(outcome, goodput=goodput)

    ladder = Ladder(question.workload, deployment_of(8), "kv_blocks")
    missed = simulate(ladder.deployment_of(999))
    edge = Edge(
        question=question,
        ladder=ladder,
        number=999,
        outcome=missed,
        enough=1000,
        measure_all=lambda deployments: [simulate(each) for each in deployments],
    )
    binding, reliefs, _ = edge.analyse()
    reached = {relief.value: relief.reached for relief in reliefs if relief.reached}
    assert reached == {4: pytest.approx(900, abs=15)}
    assert binding == ["kv"]


def test_static_batching_can_be_continuous():
    rows = [(3 * i, 1, 10) for i in range(12)]
    found = plan(*rows, slo="queue=5", batch=4, batching="static")
    assert found.binding == ["static"]
    assert reached_by(found)["batching", "continuous"] > found.value


def test_a_threshold_of_long_prompts_is_a_limit_in_both_directions():
    rows = [(10 * i, 32, 2) for i in range(12)]
    found = plan(*rows, slo="ttft=4", batch=2, long_prefill_threshold=8)
    assert found.binding == ["threshold"]
    tried = {relief.value for relief in found.reliefs if relief.constraint == "threshold"}
    assert {4, 16} <= tried


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
