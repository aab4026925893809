"""Fleets from a file, managed or not: what it may say, what it costs, and errors that say where."""

from pathlib import Path
from random import Random

import numpy as np
import pytest
from examples import examples
from hypothesis import given
from hypothesis import strategies as st
from jobs import poisson, workload_of_jobs
from msgspec.structs import replace
from served import deployment_of, question_of

from batcher.errors import BatchdecodeError
from batcher.metrics.slo import Slo
from batcher.planning.compare import GridCell, compare
from batcher.planning.deployments import (
    AXES,
    Deployment,
    check_fleets,
    engines_of,
    grid_of,
    groups_of,
)
from batcher.planning.measure import Price, Question, measure, price_of, problem_of, read_prices
from batcher.planning.plan import changed_limit, find_plan, value_at
from batcher.planning.routers import ROUTERS
from batcher.settings import SchedulingSettings
from batcher.timing.catalog import CatalogError
from cli.views.plan_tables import cost_text, details, sources_text, table_of

MIXED = """
router: least-loaded
replicas:
  - {name: large, count: 1, batch: 8, kv_blocks: 100}
  - {name: small, count: 2, batch: 2, max_batch_tokens: 16, prefix_cache: off}
"""
PREFILL = "{count: 2, role: prefill, kv_blocks: 100}"
DECODE = "{count: 1, role: decode, kv_blocks: 100, batch: 4}"
TWO = "replicas: [{count: 2}]"
BUSY = [(0.4 * number, 10 + number % 7, 5 + number % 9) for number in range(60)]


@pytest.fixture
def fleet_of(tmp_path):
    def make(text, **settings):
        path = tmp_path / "fleet.yaml"
        path.write_text(text)
        (fleet,) = AXES["fleet"].values(str(path))
        return AXES["fleet"].set(Deployment(**settings), fleet)

    return make


def test_what_a_group_leaves_out_is_as_it_is_for_all(fleet_of):
    deployment = fleet_of(MIXED, batch=4, scheduling=SchedulingSettings(kv_blocks=50))
    large, small = engines_of([deployment])
    assert (deployment.replicas, deployment.router) == (3, "least-loaded")
    assert (large.batch, large.scheduling) == (8, SchedulingSettings(kv_blocks=100))
    expected = SchedulingSettings(kv_blocks=50, max_batch_tokens=16, prefix_cache=False)
    assert (small.batch, small.scheduling) == (2, expected)
    assert hash(deployment) == hash(fleet_of(MIXED, batch=4, scheduling=deployment.scheduling))


def test_the_fewest_of_a_file_are_those_of_the_same_without_one(fleet_of):
    question = question_of(*BUSY[:30], slo=Slo({"e2e": 30.0}), asked=0.99)
    engine = {"batch": 2, "scheduling": SchedulingSettings(kv_blocks=20)}
    of_file = fleet_of("replicas: [{count: 4}]", **engine)
    plans = [find_plan(question, base, "replicas") for base in (of_file, Deployment(**engine))]
    one, other = plans
    assert (one.is_met, one.value, one.trials) == (True, other.value, other.trials)
    assert one.value > 1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("replicas: []", "replicas: expected a list of groups"),
        ("router: least-loaded", "replicas missing"),
        ("replica: []", "unknown field replica (did you mean replicas?); allowed: replicas"),
        ("replicas: [{batch: 3}]", ":1: group 1: count is missing"),
        ("replicas: [{count: 1, kv-blocks: 3}]", "kv-blocks (did you mean kv_blocks?)"),
        (
            "replicas:\n  - count: 1\n    batch: many\n",
            "fleet.yaml:3: group 1: batch 'many': expected",
        ),
        (
            "replicas: [{count: 1, name: a}, {count: 2, name: a}]",
            "the name a is used by another group",
        ),
        ("replicas: [{count: 65000}, {count: 65000}]", "all replicas together 130000: expected"),
        ("{router: least-load, replicas: [{count: 1}]}", "did you mean least-loaded"),
        (f"replicas: [{PREFILL}]", "role: expected groups with prefill and with decode"),
        (f"replicas: [{PREFILL}, {DECODE}]", "transfer is missing: set gbytes_per_s"),
        ("{transfer: {gbytes_per_s: 1}, replicas: [{count: 1}]}", "transfer has no effect"),
        (
            "replicas:\n  - {count: 1}\n  - name: big\n    count: 1\n    role: prefil\n",
            (
                "fleet.yaml:5: group 2 (big): role: expected both, prefill, decode, not 'prefil' "
                "(did you mean prefill?)"
            ),
        ),
        ("replicas: [{count: 1, role: decode, capacity: on-demand}]", "capacity has no effect"),
        ("{report_interval: 0, replicas: [{count: 1}]}", "report_interval 0: expected seconds"),
        (f"{TWO}\nadmission: {{}}", "fleet.yaml:2: admission: max_in_flight missing"),
        (f"{TWO}\nfailures: {{restart: 3}}", "fleet.yaml:2: failures: set mtbf or planned"),
        (f"{TWO}\nfailures: {{planned: [{{replica: 2, at: 1}}]}}", "replica 2 is out of range"),
        (
            f"{TWO}\nfailures: {{planned: [{{replica: 0, at: 1, after: 2}}]}}",
            "fleet.yaml:2: failures: planned: expected a list of failures",
        ),
        (f"{TWO}\nautoscale: {{policy: queue, max: 4}}", "policy queue needs a target"),
        (f"{TWO}\nautoscale: {{policy: queue, target: 1, max: 1}}", "starts with 2 replicas"),
        (f"{TWO}\nautoscale: {{policy: slo, target: 2, max: 4, slo: ttft=1}}", "up to 1"),
        (f"{TWO}\nautoscale: {{policy: slo, target: 1, max: 4, slo: tfft=1}}", "unknown metric"),
        (
            f"{TWO}\nautoscale: {{policy: queue, target: 1, max: 4, slo: ttft=1}}",
            "fleet.yaml:2: autoscale: slo has no effect",
        ),
        *(
            (
                f"replicas: [{{count: 2}}, {{count: 1, name: old}}]\n{section}: {{}}",
                f"fleet.yaml:2: {section}: expected one group of replicas, without a role, not 2",
            )
            for section in ("admission", "failures", "autoscale")
        ),
    ],
)
def test_files_that_are_no_fleets(fleet_of, text, message):
    with pytest.raises(CatalogError) as caught:
        fleet_of(text)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("text", "given_names", "message"),
    [
        (MIXED, ["fleet", "replicas"], "--replicas has no effect with --fleet"),
        (MIXED, ["fleet", "router"], "--router has no effect: all replicas of --fleet"),
        (MIXED, ["fleet", "batch"], "--batch has no effect: all replicas of --fleet"),
        ("replicas: [{count: 1, capacity: on-demand}]", ["fleet"], "group 1: --capacity has no"),
        (
            f"{{transfer: {{gbytes_per_s: 1}}, replicas: [{PREFILL}, {DECODE}]}}",
            ["fleet"],
            "the size of keys and values is unknown with constant: set bytes_per",
        ),
        ("{report_interval: 1, replicas: [{count: 2}]}", ["fleet"], "uses no reports"),
    ],
)
def test_what_has_no_effect(fleet_of, text, given_names, message):
    with pytest.raises(BatchdecodeError, match=message):
        check_fleets(given_names, [fleet_of(text)])
    check_fleets(["fleet", "kv_blocks"], [fleet_of(MIXED)])


@examples(100)
@given(st.integers(0, 2**32), st.sampled_from(sorted(ROUTERS)))
def test_a_file_of_equal_replicas_is_the_fleet_without_it(tmp_path_factory, seed, router):
    random = Random(seed)
    settings = {
        "batch": random.randint(1, 6),
        "kv_blocks": random.choice(["none", 4, 20]),
        "max_batch_tokens": random.choice(["none", 16, 40]),
        "policy": random.choice(["fcfs", "sjf"]),
        "capacity": "watermark",
    }
    counts = random.choice([[1], [3], [1, 2]])
    path = tmp_path_factory.mktemp("fleet") / "fleet.yaml"
    groups = [{"count": count, **settings} for count in counts]
    path.write_text(f"{{router: {router}, replicas: {groups}}}")
    question = question_of(*random.sample(BUSY, 20), slo=Slo({"ttft": 3.0}))
    axes = {name: AXES[name].values(str(value)) for name, value in settings.items()}
    (alike,) = grid_of(axes, Deployment(replicas=sum(counts), router=router))
    (from_file,) = grid_of({"fleet": AXES["fleet"].values(str(path))}, Deployment())
    expected, outcome = measure(question, alike), measure(question, from_file)
    assert replace(outcome, groups=None, binding=expected.binding) == expected
    assert outcome.binding.shares == expected.binding.shares
    assert [use.replicas for use in outcome.groups] == counts
    assert sum(use.served for use in outcome.groups) == expected.served
    assert sum(use.steps for use in outcome.groups) == expected.steps


TO_THE_SMALL = """
def choose(_, replicas):
    small = [view for view in replicas if view.group == "small" and view.batch == 1]
    return min(small, key=lambda view: view.num_requests).index
"""


def test_each_group_is_told_by_itself(fleet_of, tmp_path, monkeypatch):
    (tmp_path / "to_the_small.py").write_text(TO_THE_SMALL)
    monkeypatch.syspath_prepend(tmp_path)
    text = """
        router: to_the_small:choose
        replicas: [{name: large, count: 1, batch: 8}, {name: small, count: 2, batch: 1}]"""
    outcome = measure(question_of(*BUSY), fleet_of(text))
    large, small = outcome.groups
    assert (large.served, large.steps, large.busy, large.slots_used) == (0, 0, 0.0, 0.0)
    assert (small.served, small.name, small.replicas) == (60, "small", 2)
    assert small.settings["batch"] == 1
    assert small.slots_used == 1.0
    assert 0 < small.busy <= 1


def test_prompts_here_and_decoding_there(fleet_of):
    transfer = "{gbytes_per_s: 2, latency: 0.5, bytes_per_token: 1e9}"
    deployment = fleet_of(f"{{transfer: {transfer}, replicas: [{PREFILL}, {DECODE}]}}")
    _, decoding = groups_of(deployment)
    assert (decoding.role, decoding.engine.scheduling.capacity) == ("decode", "no-evict")
    outcome = measure(question_of((0, 4, 6)), deployment)  # 1 + 0.5 + 4 / 2 + 5 seconds
    assert (outcome.latencies.ttft.max, outcome.latencies.e2e.max) == (1.0, 8.5)
    assert [(use.role, use.served, use.steps) for use in outcome.groups] == [
        ("prefill", 1, 1),
        ("decode", 1, 5),
    ]
    without = fleet_of(
        f"{{transfer: {transfer}, replicas: [{PREFILL}, {{count: 1, role: decode}}]}}"
    )
    assert problem_of(without) == "group 2: --kv-blocks is needed with role: decode"


def test_gpus_of_each_group_have_their_own_price(fleet_of, tmp_path):
    seconds = "t0: 1000.0, w: 0, f: 0, g: 0, d: 0, h: 0, e: 0"
    (tmp_path / "p.yaml").write_text(
        f"a: {{{seconds}, hardware: one, tensor_parallel: 2}}\nb: {{{seconds}, hardware: two}}"
    )
    file = f"{tmp_path}/p.yaml"
    deployment = fleet_of(
        f"replicas: [{{count: 1, profile: '{file}:a'}}, {{count: 3, profile: '{file}:b'}}]"
    )
    prices = {
        "one": Price(dollars_per_hour=36, busy_watts=3600, idle_watts=0),
        "two": Price(dollars_per_hour=3.6, busy_watts=360, idle_watts=36),
    }
    question = replace(question_of((0, 1, 10), (90, 1, 10)), prices=prices)
    cost = measure(question, deployment).cost  # 100 s, the first two replicas busy for 10 each
    assert (cost.gpus, cost.dollars_per_hour) == (5, pytest.approx(2 * 36 + 3 * 3.6))
    assert cost.dollars_per_million_tokens == pytest.approx(82.8 / 36 / 20 * 1e6)
    joules = 2 * 10 * 3600 + 10 * 360 + 290 * 36
    assert cost.kwh_per_million_tokens == pytest.approx(joules / 3.6e6 / 20 * 1e6, abs=1e-6)


PARTS = [(1000, 0), (0, 1000)]  # of a step, and of a token


def test_what_binds_is_found_for_each_group_by_its_own_steps(fleet_of, tmp_path):
    by_step, by_token = (f"t0: {a}, w: 0, f: {b}, g: 0, d: 0, h: 0, e: 0" for a, b in PARTS)
    (tmp_path / "p.yaml").write_text(f"a: {{{by_step}}}\nb: {{{by_token}}}")
    file = f"{tmp_path}/p.yaml"
    requests = [(0, 1, 10)] * 8
    shares = {}
    for names in ("a", "b", "ab"):
        groups = [f"{{count: {2 // len(names)}, batch: 1, profile: '{file}:{n}'}}" for n in names]
        outcome = measure(question_of(*requests), fleet_of(f"replicas: [{', '.join(groups)}]"))
        shares[names] = outcome.binding.shares
    assert set(shares["a"]) == {"slots", "compute"}
    assert set(shares["b"]) == {"compute"}
    assert shares["ab"]["slots"] == pytest.approx(shares["a"]["slots"] / 2)


def test_a_group_that_makes_no_sense_is_named(fleet_of):
    deployment = fleet_of("replicas: [{count: 1}, {count: 1, name: odd, max_batch_tokens: 4}]")
    assert "group odd: --max-batch-tokens 4 is less than the 8 slots" in problem_of(deployment)


def test_a_limit_of_a_fleet_is_changed_in_all_groups(fleet_of):
    deployment = fleet_of(MIXED)
    for limit, is_wider, values in (
        ("slots", True, [16, 4]),
        ("kv", False, [50, None]),
        ("tokens", True, [None, 32]),
        ("static", True, "continuous"),
        ("threshold", False, None),
    ):
        assert value_at(changed_limit(deployment, limit, is_wider=is_wider), limit) == values


GROUP = "{count: 2, profile: h100_llama3.1-8b_tp1, batch: 8}"
PRICES = {"h100-sxm": Price(dollars_per_hour=3.0, busy_watts=600, idle_watts=100)}
WAVE = np.concatenate([poisson(40, 800), 40 + poisson(2, 80, seed=1)])
QUESTION = Question(workload_of_jobs(WAVE, [60] * 880, 100), Slo({"ttft": 0.5}), prices=PRICES)


@pytest.fixture
def managed_of(fleet_of):
    return lambda section: fleet_of(f"replicas: [{GROUP}]\n{section}")


AUTOSCALE = (
    "autoscale: {policy: target-utilisation, target: 0.5, max: 6, interval: 5, startup: 5, "
    "cooldown: 10}"
)


def test_gpus_are_paid_while_they_are_there(managed_of):
    outcome = measure(QUESTION, managed_of(AUTOSCALE))
    use, cost = outcome.fleet, outcome.cost
    assert 2 < use.most_replicas <= 6
    assert use.mean_replicas < use.most_replicas
    assert cost.gpu_hours == pytest.approx(use.replica_seconds / 3600, abs=1e-6)
    assert cost.dollars_per_hour == pytest.approx(3 * use.mean_replicas, rel=1e-5)
    assert sum(outcome.binding.shares.values()) == pytest.approx(1, abs=1e-5)
    (group,) = outcome.groups
    assert group.replicas >= use.most_replicas == group.most_replicas


def test_a_table_has_how_many_replicas_there_were_at_once_and_how_many_ever_started(managed_of):
    times = np.concatenate([WAVE, 100 + WAVE])
    deployment = managed_of(AUTOSCALE)
    outcome = measure(Question(workload_of_jobs(times, [60] * len(times), 100)), deployment)
    (grown,) = outcome.groups
    assert grown.replicas > grown.most_replicas == outcome.fleet.most_replicas
    table = table_of([GridCell(deployment=deployment, outcome=outcome)])
    head, row = table.split("\n\n")[1].splitlines()
    assert head.split()[:3] == ["group", "at", "once"]
    assert row.split()[:3] == ["1", str(grown.most_replicas), str(grown.replicas)]


def test_a_replica_is_paid_for_while_it_is_away(managed_of):
    failures = "failures: {planned: [{replica: 0, at: 5, back_after: 10}], health_check: 1}"
    outcome = measure(QUESTION, managed_of(failures))
    assert outcome.fleet.replica_seconds == pytest.approx(2 * outcome.makespan, abs=1e-5)
    assert outcome.fleet.serving == pytest.approx(1 - 10 / (2 * outcome.makespan), abs=1e-5)
    assert outcome.fleet.timeline == [(0.0, 2, 2), (5.0, 1, 2), (15.0, 2, 2)]
    assert outcome.fleet.lost


def test_what_is_refused_misses_the_slo_and_is_no_failure(managed_of):
    outcome = measure(QUESTION, managed_of("admission: {max_in_flight: 2}"))
    assert outcome.refused
    assert outcome.failed == 0
    assert outcome.served + outcome.refused == outcome.goodput.requests == 880
    assert outcome.goodput.missed["failed"] == outcome.refused


def test_a_table_says_why_requests_were_refused(managed_of):
    cells = compare(
        QUESTION, [managed_of("admission: {max_in_flight: 8, max_queue: 2}")], growth=0.1
    )
    (cell,) = cells
    refused = cell.outcome.refused
    assert refused
    assert cell.outcome.fleet.refusals == {"queue_full": refused}
    assert table_of(cells).splitlines()[-2] == f"refused: {refused} found the queue full"


@pytest.mark.parametrize(
    ("at", "told"), [(1, "1 replica failed, 4 requests lost"), (1e6, "none during the run")]
)
def test_a_plan_says_which_failures_fell_into_the_run(managed_of, at, told):
    question = Question(workload_of_jobs(poisson(4, 40), [60] * 40, 100), Slo({"ttft": 60}))
    failures = f"failures: {{planned: [{{replica: 0, at: {at}, back_after: 1}}]}}"
    lines = details(find_plan(question, managed_of(failures), "rate"))
    (line,) = (line for line in lines if line.startswith("  failures"))
    assert line == f"  failures   {told}"


ROOT = Path(__file__).parents[2]
SECOND_A_STEP = "t0: 1000.0, w: 0, f: 0, g: 0, d: 0, h: 0, e: 0"


def cost_of_run(tmp_path, price, replicas=1, more=""):
    """One request of 10 steps at 0 s and one at 90 s: 100 s, of which 20 are busy; 20 tokens."""
    profile = tmp_path / "p.yaml"
    profile.write_text(f"it: {{{SECOND_A_STEP}, hardware: ours{more}}}")
    question = replace(question_of((0, 1, 10), (90, 1, 10)), prices={"ours": price})
    deployment = replace(deployment_of(1, str(profile)), replicas=replicas)
    return measure(question, deployment).cost


@pytest.mark.parametrize(
    ("price", "replicas", "parallel", "joules"),
    [
        ({"busy_watts": 360, "idle_watts": 36}, 1, 1, 20 * 360 + 80 * 36),
        ({"busy_watts": 360, "idle_watts": 36}, 2, 4, 4 * (20 * 360 + 180 * 36)),
        ({"busy_watts": 360}, 1, 1, 100 * 360),
        ({}, 1, 1, None),
    ],
)
def test_all_gpus_are_paid_all_the_time_and_draw_by_what_they_do(
    tmp_path, price, replicas, parallel, joules
):
    price = Price(dollars_per_hour=3.6, **price)
    cost = cost_of_run(tmp_path, price, replicas, f", tensor_parallel: {parallel}")
    gpus = replicas * parallel
    assert (cost.gpus, cost.dollars_per_hour) == (gpus, pytest.approx(3.6 * gpus))
    assert cost.dollars_per_million_tokens == pytest.approx(gpus * 0.1 / 20 * 1e6)
    expected = None if joules is None else pytest.approx(joules / 3.6e6 / 20 * 1e6, abs=1e-6)
    assert cost.kwh_per_million_tokens == expected


def test_a_cost_says_where_its_prices_are_from(tmp_path):
    cost = cost_of_run(tmp_path, Price(dollars_per_hour=1, source="a bill of May"))
    assert cost.price_sources == ["a bill of May"]
    assert cost_of_run(tmp_path, Price(dollars_per_hour=1)).price_sources == ["not stated"]
    text = "source of the prices: a bill of May, not stated"
    assert sources_text([cost, cost_of_run(tmp_path, Price(dollars_per_hour=1))]) == text
    assert cost_text(cost)[-1] == "source of the prices: a bill of May"


def test_a_roofline_names_its_gpus_and_a_data_sheet_is_called_as_its_file():
    price = Price(dollars_per_hour=1)
    hardware, _ = price_of("roofline:llama-3.1-8b:h100-sxm:2x2", {"h100-sxm": price})
    assert hardware.num_gpus == 4
    sheet = f"roofline:llama-3.1-8b:{ROOT}/samples/timing/our-gpu.yaml"
    assert price_of(sheet, {"our-gpu": price})[1] is price


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: {busy_watts: 3}", "a: dollars_per_hour missing"),
        ("a: {dollars_per_hour: -1}", "expected a number from 0 to 1e9"),
        ("a: {dollars_per_hour: 1, idle_watts: 3}", "idle_watts: expected at most busy_watts"),
        ("a: {dollars_per_hour: 1, watts: 3}", "unknown field watts"),
    ],
)
def test_prices_that_are_none(tmp_path, text, message):
    (tmp_path / "prices.yaml").write_text(text)
    with pytest.raises(BatchdecodeError, match=message):
        read_prices(str(tmp_path / "prices.yaml"))
