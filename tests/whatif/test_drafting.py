"""What drafts gain in a grid and a plan, when they are off, and options without effect."""

import pytest
from served import MODEL, deployment_of, requests_of

from batcher.errors import BatchdecodeError
from batcher.metrics.slo import parse_slo
from batcher.planning.compare import compare
from batcher.planning.deployments import (
    AXES,
    Deployment,
    check_drafts,
    grid_of,
    without_drafts,
)
from batcher.planning.measure import Question, measure
from batcher.planning.plan import find_plan, gain_of, off_from
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


def test_without_drafts_nothing_is_told_of_them() -> None:
    outcome = measure(at_once(2), deployment_of(2))
    assert outcome.drafts is None
    assert measure(at_once(2), grid(draft_acceptance="0.5", batch="2")[0]) == outcome


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
def test_options_of_drafts_go_together(texts: dict[str, str], message: str) -> None:
    with pytest.raises(BatchdecodeError, match=message):
        check_drafts(texts, grid(**texts))
