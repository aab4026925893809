"""Plans that can be worked out by hand: a step lasts a second."""

import pytest
from msgspec.structs import replace
from served import MODEL, deployment_of, question_of

from batcher.errors import BatchdecodeError
from batcher.metrics.slo import parse_slo
from batcher.planning.measure import measure
from batcher.planning.plan import Edge, Ladder, Removal, find_plan
from batcher.planning.workload import workload_of
from batcher.request import Request

EIGHT = [(0, 1, 10)] * 8


def plan(*rows, slo, searched, asked=1.0, batch=8, **scheduling):
    question = question_of(*rows, slo=parse_slo(slo), asked=asked)
    return find_plan(question, deployment_of(batch, **scheduling), searched)


def test_if_the_first_is_enough_nothing_binds():
    found = plan(*EIGHT, slo="e2e=80", searched="batch")
    assert (found.value, found.is_last, found.binding, found.next_value) == (1, True, [], None)
    assert not plan(*EIGHT, slo="e2e=20", searched="batch").is_last


def test_the_fewest_blocks():
    # of 4 + 5 - 1 tokens: 2 blocks of 4; two rounds of two requests, 5 s each
    found = plan(
        *[(0, 4, 5)] * 4,
        slo="e2e=10",
        searched="kv_blocks",
        batch=4,
        block_size=4,
        capacity="no-evict",
        prefix_cache=False,
    )
    assert (found.value, found.binding) == (4, ["kv"])
    assert {relief.share for relief in found.reliefs} == {0.5}
    tried = [relief.value for relief in found.reliefs]
    assert tried == [8, 2, 1, 2048, 1024, 512, 256, 128], "of slots, then of tokens"


def test_the_smallest_token_budget():
    # 4 prompts of 8 tokens in 2 steps
    found = plan(*[(0, 8, 1)] * 4, slo="ttft=2", searched="max_batch_tokens", batch=4)
    assert (found.value, found.binding) == (16, ["tokens"])


def test_requests_that_can_never_run_are_bound_by_kv():
    # of 16 tokens in 4 blocks of 4; neither twice the blocks nor any number makes a step shorter
    found = plan(*[(0, 13, 4)] * 4, slo="ttft=1ms", searched="batch", kv_blocks=1, block_size=4)
    assert found.outcome.failed == 4
    assert found.binding == ["kv"]


def test_limits_that_only_help_together_are_named_together():
    # with 4 slots there are blocks for one, with more blocks there is one slot
    question = question_of(*[(0, 4, 5)] * 4, slo=parse_slo("e2e=5"), asked=1.0)
    base = deployment_of(1, kv_blocks=2, block_size=4, prefix_cache=False)
    ladder = Ladder(question.workload, base, "max_batch_tokens")
    outcome = measure(question, ladder.deployment_of(100))
    edge = Edge(
        question=question,
        ladder=ladder,
        number=100,
        outcome=outcome,
        enough=None,
        measure_all=lambda deployments: [measure(question, each) for each in deployments],
    )
    binding, reliefs, removal = edge.analyse()
    assert binding == ["slots", "kv"]
    assert removal == Removal(constraints=["slots", "kv"], share=1.0)
    assert max(relief.share for relief in reliefs) == 0.25


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

    outcome = measured(ladder.deployment_of(1))
    assert outcome.goodput.good == 50
    edge = Edge(
        question=question,
        ladder=ladder,
        number=1,
        outcome=outcome,
        enough=2,
        measure_all=lambda deployments: [
            outcome if each.batch != 50 else measured(each) for each in deployments
        ],
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


def test_nothing_to_search():
    with pytest.raises(BatchdecodeError, match="all requests arrive at once"):
        plan(*EIGHT, slo="e2e=9", searched="rate")


def test_rates_and_blocks_of_a_workload():
    workload = question_of((0, 10, 7), (4, 16, 1), (10, 1, 1)).workload
    assert workload.mean_rate == pytest.approx(0.2)
    assert workload.num_blocks(16) == 2 + 2 + 1
    turns = [Request(prompt=[1] * 10, max_tokens=6, ignore_eos=True, session="s")] * 2
    assert workload_of(turns, MODEL).num_blocks(16) == 1 + 2
    assert question_of((3, 1, 1), (3, 1, 1)).workload.mean_rate is None
