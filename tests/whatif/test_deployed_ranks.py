"""Data-parallel ranks of a deployment, by option or in a file: what they are, and cost."""

import pytest
from jobs import poisson, workload_of_jobs
from msgspec.structs import replace

from batcher.errors import BatchdecodeError
from batcher.metrics.slo import Slo
from batcher.planning.compare import compare
from batcher.planning.deployments import AXES, Deployment
from batcher.planning.fleets import check_router, groups_of
from batcher.planning.limits import wider
from batcher.planning.measure import Question, measure, problem_of
from batcher.planning.plan import find_plan
from batcher.planning.prices import Price
from batcher.planning.running import most_parts
from batcher.planning.streamed import parse_streamed
from batcher.settings import SchedulingSettings

PRICES = {"h100-sxm": Price(dollars_per_hour=3.0, busy_watts=600, idle_watts=100)}
WORKLOAD = workload_of_jobs(poisson(20, 300), [40] * 300, 100)
QUESTION = Question(WORKLOAD, Slo({"ttft": 0.5}), prices=PRICES)
DENSE, EXPERTS = "h100_llama3.1-8b_tp1", "h100_qwen3-30b-a3b"


@pytest.fixture
def fleet_of(tmp_path):
    def make(text, **settings):
        path = tmp_path / "fleet.yaml"
        path.write_text(text)
        (fleet,) = AXES["fleet"].values(str(path))
        return AXES["fleet"].set(Deployment(**settings), fleet)

    return make


def test_a_server_of_dense_ranks_serves_nearly_as_replicas_behind_the_same_queue_do():
    ranks = Deployment(profile=DENSE, ranks=4)
    replicas = replace(ranks, ranks=1, replicas=4, router="shortest-queue")
    one, other = (measure(QUESTION, each).latencies.ttft for each in (ranks, replicas))
    assert one.p50 == pytest.approx(other.p50, rel=0.05)


def test_each_rank_has_its_gpus_and_counts_by_itself(fleet_of):
    text = f"replicas: [{{count: 2, ranks: 4, profile: {EXPERTS}}}]"
    outcome = measure(QUESTION, fleet_of(text))
    (group,) = outcome.groups
    assert (group.replicas, group.settings["ranks"], group.served) == (2, 4, 300)
    assert outcome.cost.gpus == 8
    assert outcome.replicas.busiest > outcome.replicas.idlest  # two replicas
    assert sum(outcome.binding.shares.values()) == pytest.approx(1, abs=1e-5)
    same = measure(QUESTION, Deployment(profile=EXPERTS, replicas=2, ranks=4))
    assert same.latencies == outcome.latencies


def test_twice_as_many_tokens_of_all_ranks_hit_less_than_twice_as_many_experts():
    few = Question(workload_of_jobs([0.0] * 40, [100] * 40), prices=None)
    deployment = Deployment(profile=EXPERTS, ranks=2, batch=2)
    alone = measure(few, replace(deployment, ranks=1)).binding.doubling
    assert measure(few, deployment).binding.doubling > alone


def test_replicas_of_a_managed_fleet_are_paid_for_with_all_ranks(fleet_of):
    failures = "failures: {planned: [{replica: 0, at: 5, back_after: 5}], health_check: 1}"
    text = f"replicas: [{{count: 2, ranks: 2, profile: {DENSE}}}]"
    outcome = measure(QUESTION, fleet_of(f"{text}\n{failures}"))
    assert outcome.fleet.most_replicas == 2
    assert outcome.fleet.replica_seconds == pytest.approx(2 * outcome.makespan, abs=1e-5)
    assert outcome.cost.gpus == 4
    assert outcome.fleet.lost
    assert outcome.served == 300


def test_a_fleet_with_ranks_is_run_in_one_part():
    question = Question(parse_streamed("synthetic:rate=5,duration=60,prompt=100,output=20"))
    deployment = Deployment(profile=DENSE, replicas=4, ranks=2)
    assert most_parts(question.workload, deployment) == 1
    assert most_parts(question.workload, replace(deployment, ranks=1)) == 4
    cells = [compare(question, [deployment], growth=0.1, num_jobs=n, small=0) for n in (1, 2)]
    assert cells[0] == cells[1]


def test_a_report_interval_has_an_effect_on_ranks():
    check_router(["report_interval"], [Deployment(ranks=2)])
    with pytest.raises(BatchdecodeError, match="--router has no effect"):
        check_router(["router"], [Deployment(ranks=2)])
    with pytest.raises(BatchdecodeError, match="--report-interval has no effect"):
        check_router(["report_interval"], [Deployment()])


SIDES = """
transfer: {gbytes_per_s: 1, bytes_per_token: 1}
replicas:
  - {count: 1, role: prefill, kv_blocks: 100, ranks: 2}
  - {count: 1, role: decode, kv_blocks: 100}
"""


def test_replicas_with_roles_have_ranks(fleet_of):
    question = replace(QUESTION, workload=workload_of_jobs([0.0] * 4, [80] * 4, 10))
    gpus = {}
    for text, ranks in ((SIDES, 1), (SIDES.replace(", ranks: 2", ""), 2)):
        deployment = fleet_of(text, profile=EXPERTS, ranks=ranks)
        assert problem_of(deployment) is None
        outcome = measure(question, deployment)
        assert outcome.served == 4
        assert [use.replicas for use in outcome.groups] == [1, 1]
        gpus[ranks] = outcome.cost.gpus
    assert gpus == {1: 3, 2: 4}  # of the prompts alone, and of both


def test_limits_are_changed_and_ranks_stay(fleet_of):
    deployment = fleet_of("replicas: [{count: 2, ranks: 4, batch: 8}]")
    assert [group.engine.ranks for group in groups_of(wider(deployment, "slots"))] == [4]


def test_the_fewest_servers_with_ranks_are_found():
    question = replace(QUESTION, workload=workload_of_jobs(poisson(60, 600), [80] * 600, 100))
    base = Deployment(profile=DENSE, ranks=2, scheduling=SchedulingSettings(kv_blocks=1000))
    plan = find_plan(replace(question, asked=0.99), base, "replicas")
    assert plan.is_met
    assert plan.deployment.ranks == 2
    assert plan.value > 1
