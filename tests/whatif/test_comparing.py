"""Grids of deployments: their numbers, what binds them, their knees, and SLOs of classes."""

from math import ceil, log2

import pytest
from hypothesis import given
from hypothesis import strategies as st
from served import MODEL, deployment_of, grid, outcome_of, question_of, requests_of

from batcher.errors import BatchdecodeError
from batcher.metrics.slo import Slo, parse_slo, parse_slos
from batcher.planning.compare import Size, compare, knee_of, knees_of, settings_of, varied
from batcher.planning.deployments import AXES, Deployment
from batcher.planning.measure import Question, measure, run
from batcher.planning.plan import find_plan
from batcher.planning.workload import has_exact_length, parse_streamed, workload_of
from batcher.request import Request
from cli.planning import decoded_outputs

ROWS = [(i // 2, 1 + i % 5, 1 + i * 7 % 11) for i in range(30)]


def test_a_grid_is_all_combinations_and_batch_changes_fastest():
    found = [(d.scheduling.policy, d.batch) for d in grid(batch="4,8", policy="sjf,fcfs")]
    assert found == [("sjf", 4), ("sjf", 8), ("fcfs", 4), ("fcfs", 8)]
    assert varied(grid(batch="4,8", policy="sjf")) == ["batch"]
    assert grid() == [Deployment()]


def test_progress_counts_what_is_done_of_a_cell(monkeypatch):
    monkeypatch.setattr("batcher.planning.workers.PART_INTERVAL", 0)
    seen = []
    question = question_of(*[(0, 1, 10)] * 4)
    compare(question, grid(batch="2,4"), growth=0.1, on_done=seen.append)
    assert seen == [0.5, 1.0, 1, 2.0, 2]


def test_the_numbers_of_a_cell():
    # 4 requests of 10 tokens, two at a time: 20 s
    outcome = outcome_of(*[(0, 3, 10)] * 4, batch=2, slo=parse_slo("queue=1"))
    assert (outcome.served, outcome.failed, outcome.steps, outcome.makespan) == (4, 0, 20, 20.0)
    assert (outcome.requests_per_s, outcome.tokens_per_s) == (0.2, 2.0)
    assert (outcome.latencies.queue.p50, outcome.latencies.queue.p99) == (0.0, 10.0)
    assert (outcome.goodput.good, outcome.goodput.share) == (2, 0.5)
    assert (outcome.slots_used, outcome.kv_used, outcome.budget_used) == (1.0, None, None)
    assert outcome.prefix_hits is None
    # the second turn of the loop finds 2 of its 3 blocks: at least a token must be computed
    requests = [Request(prompt=[7] * 9, max_tokens=1, ignore_eos=True)] * 2
    cached = deployment_of(1, prefix_cache=True, block_size=4)
    outcome = measure(Question(workload_of(requests, MODEL)), cached)
    assert outcome.prefix_hits == pytest.approx(8 / 18, abs=1e-6)


def test_the_knee_is_that_of_goodput_if_there_is_an_slo():
    # a long request decides how long it takes; 8 slots serve the 4 short ones at once
    rows, sizes = [(0, 1, 100)] + [(0, 1, 1)] * 4, grid(batch="2,4,8,16")

    def knee(slo):
        cells = compare(question_of(*rows, slo=slo), sizes, growth=0.1)
        return [cell.deployment.batch for cell in cells if cell.is_knee]

    assert knee(None) == [2]
    assert knee(parse_slo("ttft=1")) == [8]


def test_the_knee_is_none_whose_requests_wait_longer_because_arrivals_bind():
    # every 20 s four of 10 s each: two slots serve them all, but two of them wait for 10 s
    bursts = [(20 * burst, 1, 10) for burst in range(10) for _ in range(4)]
    cells = compare(question_of(*bursts), grid(batch="1,2,4,8"), growth=0.1)
    waits = [cell.outcome.latencies.ttft.p99 for cell in cells]
    served = [cell.outcome.tokens_per_s for cell in cells]
    assert served[3] == served[2] < 1.1 * served[1], "what arrives is served in any case"
    assert waits[1] > 10 * waits[2] == 10 * waits[3]
    assert [cell.deployment.batch for cell in cells if cell.is_knee] == [4]


def test_a_combination_that_makes_no_sense_is_told_of_and_the_others_go_on():
    cells = compare(question_of(*ROWS), grid(batch="2,8", max_batch_tokens="4"), growth=0.1)
    assert [cell.outcome is None for cell in cells] == [False, True]
    assert "--max-batch-tokens 4 is less than the 8 slots" in cells[1].problem
    with pytest.raises(BatchdecodeError, match="no combination of settings is valid"):
        compare(question_of(*ROWS), grid(batch="8", max_batch_tokens="4"), growth=0.1)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("batch", "4,x", "--batch 'x': expected a whole number from 1 to 1,048,576"),
        ("batch", "4,4", "--batch 4,4: 4 is repeated"),
        ("policy", "fcfs,sfj", "unknown policy 'sfj'; did you mean sjf"),
        ("profile", "nothing", "unknown profile nothing; known: rtx4090_llama3.1-8b"),
        ("capacity", "evict", "known: watermark, on-demand, no-evict"),
        ("batching", "statik", "did you mean static? known: continuous, static"),
        ("watermark", "1", "expected a share from 0 to less than 1"),
        ("draft_tokens", "65", "expected a whole number from 1 to 64, or none"),
        ("draft_acceptance", "1.1", "expected a share from 0 to 1"),
    ],
)
def test_what_is_no_value_of_an_axis(name, text, message):
    with pytest.raises(BatchdecodeError) as caught:
        AXES[name].values(text)
    assert message in str(caught.value)


def test_every_setting_is_an_axis():
    settings = set(Deployment().scheduling.__struct_fields__)
    assert set(AXES) == settings | {
        *("batch", "profile"),
        *("draft_tokens", "draft_acceptance", "draft_cost"),
        *("fleet", "replicas", "router", "report_interval"),
    }
    for name in AXES.keys() - {"fleet"}:  # which says what others are
        changed = AXES[name].set(deployment_of(8), "x")
        assert settings_of(changed) == settings_of(deployment_of(8)) | {name: "x"}


def test_a_rate_moves_arrivals_and_the_deadlines_with_them():
    (request,) = requests_of((8, 1, 1))
    workload = workload_of([request], MODEL)
    assert workload.at_rate(1.0) is workload
    assert workload.at_rate(4.0).jobs[0].arrival_time == 2.0
    late = workload_of([Request(prompt=[1], arrival_time=8, deadline=11, ignore_eos=True)], MODEL)
    assert late.at_rate(4.0).jobs[0].deadline == 5.0


def test_lengths_that_only_the_model_knows():
    requests = [
        Request(prompt="one", max_tokens=50),
        Request(prompt="two", max_tokens=5, ignore_eos=True, arrival_time=9.0),
        Request(prompt="three", max_tokens=40, n=2, temperature=1.0),
        Request(prompt="four", max_tokens=40, n=1, best_of=3, temperature=1.0),
    ]
    assert [has_exact_length(request) for request in requests] == [False, True, False, False]
    outputs = decoded_outputs(requests, MODEL)
    assert set(outputs) == {(0, 0), (1, 0), (2, 0), (2, 1), (3, 0), (3, 1), (3, 2)}
    assert len(outputs[1, 0]) == 5
    jobs = workload_of(requests, MODEL, outputs).jobs
    lengths = [len(outputs[key]) for key in sorted(outputs)]
    assert [job.output.length for job in jobs] == lengths


AT_ONCE = [(0, 1, 10)] * 4


def check(outcome, constraint, **shares):
    assert outcome.binding.constraint == constraint
    assert outcome.binding.shares == pytest.approx(shares, abs=1e-6)
    assert outcome.binding.share == outcome.binding.shares[constraint]


FEW = {"block_size": 4, "batch": 2}
LITTLE = {"batch": 4, "max_batch_tokens": 4}
STATIC = {"batch": 2, "batching": "static"}
ONE_LONG, APART = [(0, 1, 1), (0, 1, 5), (0, 1, 1)], [(0, 1, 2), (10, 1, 2)]


@pytest.mark.parametrize(
    ("rows", "settings", "constraint", "shares"),
    [
        # one after another: somebody waits for 30 of 40 seconds
        (AT_ONCE, {"batch": 1}, "slots", {"slots": 0.75, "compute": 0.25}),
        # nobody waits, and nobody is to come
        (AT_ONCE, {"batch": 4}, "compute", {"compute": 1.0}),
        # 8 + 5 - 1 tokens are 3 blocks of 4, so one runs at a time: 5 seconds each
        ([(0, 8, 5)] * 3, FEW | {"kv_blocks": 3}, "kv", {"kv": 10 / 15, "compute": 5 / 15}),
        # each prompt takes two steps of 4 tokens
        ([(0, 8, 1)] * 3, LITTLE, "tokens", {"tokens": 4 / 6, "compute": 2 / 6}),
        # in the first step both slots are taken, then one is kept empty for 4
        (ONE_LONG, STATIC, "static", {"slots": 1 / 6, "static": 4 / 6, "compute": 1 / 6}),
        # 2 busy seconds, 8 idle ones, 2 of the last request
        (APART, {"batch": 4}, "arrivals", {"arrivals": 10 / 12, "compute": 2 / 12}),
        # busy while nobody waits is arrivals until the last has come
        ([(0, 1, 10), (6, 1, 4)], {"batch": 4}, "arrivals", {"arrivals": 0.6, "compute": 0.4}),
        # nobody can ever run
        ([(0, 40, 1), (3, 40, 1)], FEW | {"kv_blocks": 4}, "kv", {"kv": 1.0}),
    ],
)
def test_what_is_waited_for_binds(rows, settings, constraint, shares):
    check(outcome_of(*rows, **settings), constraint, **shares)


@pytest.fixture
def profile(tmp_path):
    def write(**terms):
        path = tmp_path / "p.yaml"
        every = dict.fromkeys(["t0", "w", "f", "g", "d", "h", "e"], 0) | terms
        path.write_text("\n".join(f"{name}: {value}" for name, value in every.items()))
        return str(path)

    return write


@pytest.mark.parametrize(
    ("t0", "binds"), [(500, "slots"), (115, "slots"), (105, "compute"), (0, "compute")]
)
def test_a_tenth_more_is_what_pays(profile, t0, binds):
    # 2 (t0 + f) / (t0 + 2 f) - 1 = t0 / (t0 + 2 f), of f = 500: 0.103 and 0.095
    binding = outcome_of(*AT_ONCE, batch=1, profile=profile(t0=t0, f=500)).binding
    assert binding.doubling == pytest.approx(t0 / (t0 + 1000), abs=1e-6)
    assert binding.constraint == binds


@pytest.mark.parametrize("term", ["f", "g", "d", "e"])
def test_a_step_twice_as_large_has_twice_of_all_that_takes_time(profile, term):
    outcome = outcome_of(*[(0, 50, 50)] * 4, batch=2, profile=profile(**{"f": 1, term: 1000}))
    assert outcome.binding.doubling == 0


def test_who_was_preempted_waits_even_while_nobody_is_to_come():
    # both grow to 2 blocks of 4; the third block of one is that of the other, which waits from
    # step 5 to 8, computes 9 tokens again and has its last in step 12
    outcome = outcome_of(*[(0, 4, 9)] * 2, batch=2, kv_blocks=4, block_size=4, prefix_cache=False)
    assert (outcome.preemptions, outcome.steps) == (1, 13)
    check(outcome, "compute", kv=4 / 13, compute=9 / 13)


CURVES = st.dictionaries(st.integers(1, 64), st.floats(0.1, 100), min_size=1, max_size=8).map(
    lambda sizes: sorted(sizes.items())
)


@given(CURVES, st.floats(0.01, 1))
def test_it_is_what_its_definition_says(curve, growth):
    found = knee_of([Size(batch=batch, served=served) for batch, served in curve], growth)
    for place, (batch, served) in enumerate(curve[:-1]):
        gain = max(
            (later / served) ** (1 / log2(larger / batch)) - 1
            for larger, later in curve[place + 1 :]
        )
        if abs(gain - growth) < 1e-9:
            return  # rounding decides
        if gain < growth:
            assert found == place
            return
    assert found is None


def test_each_family_that_differs_in_batch_only_has_its_own():
    cells = [
        (deployment_of(4, policy="fcfs"), Size(batch=4, served=10)),
        (deployment_of(4, policy="sjf"), Size(batch=4, served=10)),
        (deployment_of(16, policy="sjf"), Size(batch=16, served=20)),
        (deployment_of(8, policy="fcfs"), Size(batch=8, served=10)),
        (deployment_of(8, policy="sjf"), Size(batch=8, served=20)),
        (deployment_of(2, policy="fcfs"), None),
    ]
    assert knees_of(cells, 0.1) == {0, 4}


@pytest.mark.parametrize(
    ("rows", "knee"),
    [
        # (batch, served, p99 of TTFT, serves all that arrives)
        ([(8, 90, 9.0, False), (16, 95, 1.0, True), (32, 95, 0.1, True), (64, 95, 0.1, True)], 32),
        ([(8, 95, 0.1, True), (16, 95, 0.1, True)], 8),
        ([(8, 95, 0.2, True), (16, 95, 0.1, True)], None),  # who knows what comes after 16
        ([(8, 95, 0.1, True), (16, 95, 0.2, True), (32, 95, 0.3, True)], 8),
        ([(8, 95, 9.0, False), (16, 95, 1.0, False)], 8),  # nothing tells but what is served
        ([(8, 95, 9.0, True), (16, 95, 1.0, False), (32, 95, 1.0, False)], 16),
        ([(8, 95, None, True), (16, 95, None, True)], 8),
    ],
)
def test_where_arrivals_bind_a_shorter_tail_of_ttft_is_worth_more_slots(rows, knee):
    sizes = [Size(batch=b, served=y, ttft=ttft, is_fed=fed) for b, y, ttft, fed in rows]
    place = knee_of(sizes, 0.1)
    assert (None if place is None else sizes[place].batch) == knee


def question_of_classes(rows, priorities, slo, asked=1.0):
    requests = [
        Request(
            prompt=request.prompt,
            max_tokens=request.max_tokens,
            ignore_eos=True,
            arrival_time=request.arrival_time,
            priority=priority,
        )
        for request, priority in zip(requests_of(*rows), priorities, strict=True)
    ]
    return Question(workload_of(requests, MODEL), slo, asked)


@st.composite
def questions(draw):
    row = st.tuples(st.integers(0, 20), st.integers(1, 12), st.integers(1, 5))
    rows = draw(st.lists(row, min_size=1, max_size=30))
    priority = st.sampled_from([0, 0, 1, -2, 7])
    priorities = draw(st.lists(priority, min_size=len(rows), max_size=len(rows)))
    limits = st.dictionaries(
        st.sampled_from(["queue", "ttft", "e2e"]), st.integers(1, 20), min_size=1
    )
    classes = draw(st.dictionaries(priority, st.builds(Slo, limits)))
    general = draw(limits if not classes else limits | st.just({}))
    return question_of_classes(
        rows, priorities, Slo(general, classes), draw(st.sampled_from([0.5, 1.0]))
    )


@given(questions())
def test_each_class_is_held_to_its_own_limits_and_what_never_ran_has_missed_them(question):
    deployment = Deployment(
        batch=3, replicas=2, scheduling=deployment_of(1, kv_blocks=4, block_size=4).scheduling
    )
    outcome = measure(question, deployment)
    slo, result = question.slo, run(question.workload, deployment)
    served = list(zip(*result.times, strict=True))
    assert len(served) + result.failed.total() == question.workload.num_samples
    names = {None: "others"} | {priority: f"priority={priority}" for priority in slo.classes}
    total = good_in_all = 0
    for group, name in names.items():
        own = slo if group is None else slo.classes[group]
        if not own.limits or not slo.classes:
            assert name not in outcome.classes
            continue
        mine = [row for row in served if (row[-1] if row[-1] in slo.classes else None) == group]
        failed = sum(
            count
            for priority, count in result.failed.items()
            if (priority if priority in slo.classes else None) == group
        )
        times = [
            {"queue": admitted - arrival, "ttft": first - arrival, "e2e": end - arrival}
            for arrival, admitted, first, end, _, _ in mine
        ]
        good = sum(all(each[m] <= limit for m, limit in own.limits.items()) for each in times)
        found = outcome.classes[name].goodput
        priorities = [job.priority for job in question.workload.jobs]
        assert found.requests == sum(
            (priority if priority in slo.classes else None) == group for priority in priorities
        )
        assert (found.requests, found.good) == (len(mine) + failed, good)
        assert found.missed.get("failed", 0) == failed
        rank = max(1, ceil(question.asked * (len(mine) + failed)))
        for metric in own.limits:
            values = sorted(each[metric] for each in times)
            tail = outcome.tails[metric if group is None else f"{name}:{metric}"]
            assert tail == (values[rank - 1] if rank <= len(values) else None)
        total, good_in_all = total + found.requests, good_in_all + good
    if slo.classes:
        assert (outcome.goodput.requests, outcome.goodput.good) == (total, good_in_all)
    else:
        assert outcome.goodput.requests == question.workload.num_samples


def test_a_plan_needs_each_class_to_meet_its_share():
    # eight at once, of 10 s each: two rounds are soon enough for all but the last two
    slo = parse_slos(["e2e=20", "priority=1:e2e=10"])
    question = question_of_classes([(0, 1, 10)] * 8, [0] * 6 + [1] * 2, slo, asked=0.75)
    found = find_plan(question, deployment_of(8), "batch")
    assert (found.is_met, found.value) == (True, 8), "6 of 8 meet theirs with 4 slots, but 0 of 2"
    assert found.binding_classes == ["priority=1"]
    assert found.next_outcome.goodput.missed == {"priority=1:e2e": 1}
    assert found.next_outcome.good_share == 0.5
    first = deployment_of(4, policy="priority")
    urgent = question_of_classes(
        [(0, 1, 10)] * 8, [1] * 6 + [0] * 2, parse_slos(["priority=0:e2e=10"])
    )
    assert measure(urgent, first).good_share == 1.0
    assert find_plan(urgent, first, "batch").value == 2


def refuse_the_first_class(request, replicas):
    return None if request.priority == 1 else 0


def test_what_is_refused_has_missed_what_its_class_was_promised():
    slo = parse_slos(["e2e=1000", "priority=1:e2e=1000"])
    question = question_of_classes([(0, 1, 3)] * 6, [0, 1] * 3, slo)
    name = f"{__name__}:refuse_the_first_class"
    outcome = measure(question, Deployment(replicas=2, router=name))
    goodputs = {name: each.goodput for name, each in outcome.classes.items()}
    assert {name: (each.good, each.requests) for name, each in goodputs.items()} == {
        "others": (3, 3),
        "priority=1": (0, 3),
    }
    assert goodputs["priority=1"].missed == {"failed": 3}
    assert outcome.goodput.missed == {"priority=1:failed": 3}


def test_what_states_no_priorities():
    for text in ("priority=", "priority=1", "priority=0:1:0:2", "priority=0:0", "priority=a:1"):
        with pytest.raises(BatchdecodeError, match=r"expected PRIORITY:SHARE"):
            parse_streamed(f"synthetic:rate=5,duration=6,prompt=8,output=8,{text}")
