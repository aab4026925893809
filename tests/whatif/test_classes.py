"""SLOs of classes of requests, by priority: beside a count by hand, and in plans."""

from math import ceil

import pytest
from hypothesis import given
from hypothesis import strategies as st
from served import MODEL, deployment_of, requests_of

from batcher.errors import BatchdecodeError
from batcher.metrics.slo import Slo, parse_slos
from batcher.planning.deployments import Deployment
from batcher.planning.measure import Question, measure, run
from batcher.planning.plan import find_plan
from batcher.planning.streamed import parse_streamed
from batcher.planning.workload import workload_of
from batcher.request import Request


def question_of(rows, priorities, slo, asked=1.0):
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
    return question_of(rows, priorities, Slo(general, classes), draw(st.sampled_from([0.5, 1.0])))


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
    question = question_of([(0, 1, 10)] * 8, [0] * 6 + [1] * 2, slo, asked=0.75)
    found = find_plan(question, deployment_of(8), "batch")
    assert (found.is_met, found.value) == (True, 8), "6 of 8 meet theirs with 4 slots, but 0 of 2"
    assert found.binding_classes == ["priority=1"]
    assert found.next_outcome.goodput.missed == {"priority=1:e2e": 1}
    assert found.next_outcome.good_share == 0.5
    first = deployment_of(4, policy="priority")
    urgent = question_of([(0, 1, 10)] * 8, [1] * 6 + [0] * 2, parse_slos(["priority=0:e2e=10"]))
    assert measure(urgent, first).good_share == 1.0
    assert find_plan(urgent, first, "batch").value == 2


def refuse_the_first_class(request, replicas):
    return None if request.priority == 1 else 0


def test_what_is_refused_has_missed_what_its_class_was_promised():
    slo = parse_slos(["e2e=1000", "priority=1:e2e=1000"])
    question = question_of([(0, 1, 3)] * 6, [0, 1] * 3, slo)
    name = f"{__name__}:refuse_the_first_class"
    outcome = measure(question, Deployment(replicas=2, router=name))
    goodputs = {name: each.goodput for name, each in outcome.classes.items()}
    assert {name: (each.good, each.requests) for name, each in goodputs.items()} == {
        "others": (3, 3),
        "priority=1": (0, 3),
    }
    assert goodputs["priority=1"].missed == {"failed": 3}
    assert outcome.goodput.missed == {"priority=1:failed": 3}


@pytest.mark.parametrize(
    "text", ["priority=", "priority=1", "priority=0:1:0:2", "priority=0:0", "priority=a:1"]
)
def test_what_states_no_priorities(text):
    with pytest.raises(BatchdecodeError, match=r"expected PRIORITY:SHARE"):
        parse_streamed(f"synthetic:rate=5,duration=6,prompt=8,output=8,{text}")
