"""What a file states of admission, failures and autoscaling: read, carried out, paid for, or an
error that says where it stands."""

import numpy as np
import pytest
from jobs import poisson, workload_of_jobs

from batcher.metrics.slo import Slo
from batcher.planning.compare import GridCell, compare
from batcher.planning.deployments import AXES, Deployment
from batcher.planning.measure import Price, Question, measure
from batcher.planning.plan import find_plan
from batcher.timing.catalog import CatalogError
from cli.views.plan_tables import details, table_of

GROUP = "{count: 2, profile: h100_llama3.1-8b_tp1, batch: 8}"
PRICES = {"h100-sxm": Price(dollars_per_hour=3.0, busy_watts=600, idle_watts=100)}
WAVE = np.concatenate([poisson(40, 800), 40 + poisson(2, 80, seed=1)])
QUESTION = Question(workload_of_jobs(WAVE, [60] * 880, 100), Slo({"ttft": 0.5}), prices=PRICES)


@pytest.fixture
def fleet_of(tmp_path):
    """What makes a deployment of the sections of a file."""

    def make(*sections, replicas=GROUP):
        path = tmp_path / "fleet.yaml"
        path.write_text("\n".join([f"replicas: [{replicas}]", *sections]))
        axis = AXES["fleet"]
        (fleet,) = axis.values(str(path))
        return axis.set(Deployment(), fleet)

    return make


AUTOSCALE = (
    "autoscale: {policy: target-utilisation, target: 0.5, max: 6, interval: 5, startup: 5, "
    "cooldown: 10}"
)


def test_gpus_are_paid_while_they_are_there(fleet_of):
    outcome = measure(QUESTION, fleet_of(AUTOSCALE))
    use, cost = outcome.fleet, outcome.cost
    assert 2 < use.most_replicas <= 6
    assert use.mean_replicas < use.most_replicas
    assert cost.gpu_hours == pytest.approx(use.replica_seconds / 3600, abs=1e-6)
    assert cost.dollars_per_hour == pytest.approx(3 * use.mean_replicas, rel=1e-5)
    assert sum(outcome.binding.shares.values()) == pytest.approx(1, abs=1e-5)
    (group,) = outcome.groups
    assert group.replicas >= use.most_replicas == group.most_replicas


def test_a_table_has_how_many_replicas_there_were_at_once_and_how_many_ever_started(fleet_of):
    times = np.concatenate([WAVE, 100 + WAVE])
    deployment = fleet_of(AUTOSCALE)
    outcome = measure(Question(workload_of_jobs(times, [60] * len(times), 100)), deployment)
    (grown,) = outcome.groups
    assert grown.replicas > grown.most_replicas == outcome.fleet.most_replicas
    table = table_of([GridCell(deployment=deployment, outcome=outcome)])
    head, row = table.split("\n\n")[1].splitlines()
    assert head.split()[:3] == ["group", "at", "once"]
    assert row.split()[:3] == ["1", str(grown.most_replicas), str(grown.replicas)]


def test_a_replica_is_paid_for_while_it_is_away(fleet_of):
    failures = "failures: {planned: [{replica: 0, at: 5, back_after: 10}], health_check: 1}"
    outcome = measure(QUESTION, fleet_of(failures))
    assert outcome.fleet.replica_seconds == pytest.approx(2 * outcome.makespan, abs=1e-5)
    assert outcome.fleet.serving == pytest.approx(1 - 10 / (2 * outcome.makespan), abs=1e-5)
    assert outcome.fleet.timeline == [(0.0, 2, 2), (5.0, 1, 2), (15.0, 2, 2)]
    assert outcome.fleet.lost


def test_what_is_refused_misses_the_slo_and_is_no_failure(fleet_of):
    outcome = measure(QUESTION, fleet_of("admission: {max_in_flight: 2}"))
    assert outcome.refused
    assert outcome.failed == 0
    assert outcome.served + outcome.refused == outcome.goodput.requests == 880
    assert outcome.goodput.missed["failed"] == outcome.refused


@pytest.mark.parametrize(
    ("section", "why"),
    [
        ("admission: {}", "admission: max_in_flight missing"),
        ("failures: {restart: 3}", "nothing fails without mtbf or planned"),
        ("failures: {planned: [{replica: 2, at: 1}]}", "there is no replica 2, the last is 1"),
        ("failures: {planned: [{replica: 0, at: 1, after: 2}]}", "expected a list of failures"),
        ("autoscale: {policy: queue, max: 4}", "policy queue needs a target"),
        ("autoscale: {policy: queue, target: 1, max: 1}", "begins with 2 replicas"),
        ("autoscale: {policy: slo, target: 2, max: 4, slo: ttft=1}", "up to 1"),
        ("autoscale: {policy: slo, target: 1, max: 4, slo: tfft=1}", "unknown metric"),
        ("autoscale: {policy: queue, target: 1, max: 4, slo: ttft=1}", "slo has no effect"),
    ],
)
def test_what_means_nothing_is_an_error_that_says_where(fleet_of, section, why):
    with pytest.raises(CatalogError, match=why) as error:
        fleet_of(section)
    assert "fleet.yaml:2: " in str(error.value)


@pytest.mark.parametrize("section", ["admission", "failures", "autoscale"])
def test_only_replicas_that_are_alike_are_managed(fleet_of, section):
    why = f"fleet.yaml:2: {section}: expected one group .*, and there are 2: 1, old"
    with pytest.raises(CatalogError, match=why):
        fleet_of(f"{section}: {{}}", replicas=f"{GROUP}, {{count: 1, name: old}}")


def test_a_table_says_why_requests_were_refused(fleet_of):
    cells = compare(QUESTION, [fleet_of("admission: {max_in_flight: 8, max_queue: 2}")], growth=0.1)
    (cell,) = cells
    refused = cell.outcome.refused
    assert refused
    assert cell.outcome.fleet.refusals == {"queue_full": refused}
    assert table_of(cells).splitlines()[-2] == f"refused: {refused} found no room in the queue"


@pytest.mark.parametrize(
    ("at", "told"), [(1, "1 replica failed, 4 requests lost"), (1e6, "none fell into the run")]
)
def test_a_plan_says_which_failures_fell_into_the_run(fleet_of, at, told):
    question = Question(workload_of_jobs(poisson(4, 40), [60] * 40, 100), Slo({"ttft": 60}))
    failures = f"failures: {{planned: [{{replica: 0, at: {at}, back_after: 1}}]}}"
    lines = details(find_plan(question, fleet_of(failures), "rate"))
    (line,) = (line for line in lines if line.startswith("  failures"))
    assert line == f"  failures   {told}"
