"""What drafts gain in a grid and a plan, when they are off, and options without effect."""

import pytest
from served import MODEL, deployment_of, requests_of

from batcher.errors import BatchdecodeError
from batcher.metrics.slo import parse_slo
from batcher.planning.compare import compare
from batcher.planning.deployments import AXES, Deployment, grid_of
from batcher.planning.draft_memory import beside_draft, draft_memory_of
from batcher.planning.drafting import beside_none, check_drafts, gain_of, off_from, without_drafts
from batcher.planning.measure import Question, measure, problem_of
from batcher.planning.plan import find_plan
from batcher.planning.workload import workload_of

COMPUTE_BOUND = "h100_llama3.1-8b_tp1"


def grid(**texts: str) -> list[Deployment]:
    return grid_of({name: AXES[name].values(text) for name, text in texts.items()}, Deployment())


def at_once(num_requests: int, num_tokens: int = 100) -> Question:
    return Question(workload_of(requests_of(*[(0, 100, num_tokens)] * num_requests), MODEL))


def test_a_draft_that_is_always_right_saves_steps_by_arithmetic() -> None:
    # 1 token with the prompt, then 5 a step: 21 s instead of 101
    cells = compare(
        at_once(1, 101), grid(draft_tokens="none,4", draft_acceptance="1", batch="1"), growth=0.1
    )
    assert [cell.outcome.makespan for cell in cells if cell.outcome] == [101.0, 21.0]
    assert [cell.speedup for cell in cells] == [None, pytest.approx(101 / 21, rel=1e-5)]
    drafts = cells[1].outcome and cells[1].outcome.drafts
    assert drafts is not None
    assert (drafts.verified, drafts.accepted) == (80, 80)
    assert (drafts.acceptance, drafts.tokens_per_step, drafts.making) == (1.0, 5.0, 0.0)


def test_the_time_to_make_drafts_is_a_share_of_all() -> None:
    (deployment,) = grid(draft_tokens="4", draft_acceptance="1", draft_cost="0.25", batch="1")
    drafts = measure(at_once(1, 101), deployment).drafts
    assert drafts is not None
    assert drafts.making == pytest.approx(20 / 41, abs=1e-6)


def test_without_drafts_nothing_is_told_of_them() -> None:
    outcome = measure(at_once(2), deployment_of(2))
    assert outcome.drafts is None
    assert measure(at_once(2), grid(draft_acceptance="0.5", batch="2")[0]) == outcome


def test_they_gain_at_small_batches_and_are_off_from_the_one_on_that_arithmetic_binds() -> None:
    sizes = "1,16,512"
    cells = compare(
        at_once(512),
        grid(
            draft_tokens="none,4",
            draft_acceptance="0.7",
            draft_cost="0.05",
            batch=sizes,
            profile=COMPUTE_BOUND,
        ),
        growth=0.1,
    )
    gains = [(c.deployment.batch, c.speedup) for c in cells if c.speedup is not None]
    assert [batch for batch, _ in gains] == [1, 16, 512]
    assert gains[0][1] > 1.5
    assert gains[2][1] < 1
    assert off_from(gains) == 512


@pytest.mark.parametrize(
    ("gains", "least"),
    [
        ([], None),
        ([(1, 2.0), (4, 1.1)], None),
        ([(1, 2.0), (4, 1.0), (8, 0.9)], 4),
        ([(8, 0.9), (1, 0.9), (4, 1.1)], 8),
        ([(1, 0.5), (2, 1.0)], 1),
    ],
)
def test_off_from_the_least_batch_that_no_larger_one_gains_at(
    gains: list[tuple[int, float]], least: int | None
) -> None:
    assert off_from(gains) == least


def test_a_gain_is_that_of_two_simulations_and_where_it_ends_is_looked_for_in_doublings() -> None:
    tried: list[tuple[int, int | None]] = []

    def tokens_per_s(deployment: Deployment) -> float:
        tried.append((deployment.batch, deployment.draft_tokens))
        return 1.0 if deployment.draft_tokens is None else 8 / deployment.batch

    (deployment,) = grid(draft_tokens="4", draft_acceptance="0.5", draft_cost="0.1", batch="2")
    gain = gain_of(deployment, 100, tokens_per_s)
    assert gain is not None
    assert (gain.tokens_per_s, gain.without, gain.speedup, gain.off_from) == (4.0, 1.0, 4.0, 8)
    assert gain.expected == pytest.approx((1 - 0.5**5) / (0.5 * 1.4))
    assert gain.simple == pytest.approx(4 * 0.5 / 1.1)
    assert tried == [(2, 4), (2, None), (4, 4), (4, None), (8, 4), (8, None)]
    few = gain_of(deployment, 3, tokens_per_s)
    assert few is not None
    assert few.off_from is None, "no more than 3 slots are of use"
    assert gain_of(without_drafts(deployment), 100, tokens_per_s) is None


def test_a_plan_tells_the_gain_of_what_it_found() -> None:
    rows = [(0, 3, 41)] * 4
    question = Question(workload_of(requests_of(*rows), MODEL), parse_slo("e2e=20"), 1.0)
    (base,) = grid(draft_tokens="4", draft_acceptance="1")
    plan = find_plan(question, base, "batch")
    assert (plan.value, plan.is_met) == (2, True)  # 9 s each, as 41 tokens take 1 + 8 steps
    assert plan.gain is not None
    assert plan.gain.speedup == pytest.approx(41 / 9, rel=1e-5)
    assert plan.gain.off_from is None
    assert find_plan(question, Deployment(), "batch").gain is None


# -- the memory of a draft model -------------------------------------------------------------------

MODEL_DRAFTS = {
    "draft_tokens": "4",
    "draft_acceptance": "0.7",
    "draft_model": "llama-3.2-1b",
    "kv_blocks": "2587",
    "profile": "rtx4090_llama3.1-8b",
}


def test_a_draft_model_takes_its_weights_and_a_part_of_each_block() -> None:
    (deployment,) = grid(**MODEL_DRAFTS)
    memory = draft_memory_of(deployment)
    assert memory is not None
    assert memory.weights == pytest.approx(2 * 1.236e9, rel=1e-3)
    assert (memory.kv_per_token, memory.kv_per_token_without) == (32768, 131072)
    left = 2587 * 16 * 131072 - memory.weights
    assert memory.kv_blocks == left // (16 * (131072 + 32768)) == 1126
    assert beside_draft(deployment).scheduling.kv_blocks == 1126
    assert draft_memory_of(without_drafts(deployment)) is None


def test_with_a_draft_model_a_workload_has_the_blocks_that_it_leaves() -> None:
    question = at_once(40, 300)
    none, beside = compare(question, grid(**MODEL_DRAFTS | {"draft_tokens": "none,4"}), growth=0.1)
    (fewer,) = grid(**MODEL_DRAFTS | {"draft_model": "none", "kv_blocks": "1126"})
    assert beside.outcome == measure(question, fewer)
    assert beside.draft_memory is not None
    assert none.draft_memory is None


def test_a_draft_model_that_leaves_no_block_is_told() -> None:
    (deployment,) = grid(**MODEL_DRAFTS | {"kv_blocks": "99"})
    assert "leaves no KV block" in (problem_of(deployment) or "")


def test_drafts_are_compared_with_none() -> None:
    assert beside_none([2, 4]) == [None, 2, 4]
    assert beside_none([2, None]) == [2, None]
    assert AXES["draft_tokens"].values("0,2") == [None, 2]


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
        ({**MODEL_DRAFTS, "kv_blocks": "none"}, "--draft-model has no effect without --kv-blocks"),
        ({**MODEL_DRAFTS, "profile": "constant"}, "a --profile of a known model, and constant"),
    ],
)
def test_options_of_drafts_go_together(texts: dict[str, str], message: str) -> None:
    with pytest.raises(BatchdecodeError, match=message):
        check_drafts(texts, grid(**texts))


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("draft_tokens", "65", "expected a whole number from 1 to 64, or none"),
        ("draft_tokens", "0,none", "none is there twice"),
        ("draft_acceptance", "1.1", "expected a share from 0 to 1"),
        ("draft_acceptance", "nan", "expected a share from 0 to 1"),
        ("draft_cost", "-1", "expected a share of a step, from 0 to 1,000"),
    ],
)
def test_values_that_drafts_cannot_have(name: str, text: str, message: str) -> None:
    with pytest.raises(BatchdecodeError, match=message):
        AXES[name].values(text)
