"""Grids: their order, that processes change nothing, and what makes no sense."""

import pytest
from served import MODEL, deployment_of, outcome_of, question_of, requests_of

from batcher.errors import BatchdecodeError
from batcher.metrics.slo import parse_slo
from batcher.planning.compare import compare, settings_of, varied
from batcher.planning.deployments import AXES, Deployment, grid_of
from batcher.planning.measure import Question, measure
from batcher.planning.workload import has_exact_length, workload_of
from batcher.request import Request
from cli.planning import decoded_outputs

ROWS = [(i // 2, 1 + i % 5, 1 + i * 7 % 11) for i in range(30)]


def grid(**texts):
    return grid_of({name: AXES[name].values(text) for name, text in texts.items()}, Deployment())


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


def test_prefix_hits_are_of_all_prompt_tokens():
    # the second turn of the loop finds 2 of its 3 blocks: at least a token must be computed
    requests = [Request(prompt=[7] * 9, max_tokens=1, ignore_eos=True)] * 2
    question = Question(workload_of(requests, MODEL))
    outcome = measure(question, deployment_of(1, prefix_cache=True, block_size=4))
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
    with pytest.raises(BatchdecodeError, match="no combination of settings makes sense"):
        compare(question_of(*ROWS), grid(batch="8", max_batch_tokens="4"), growth=0.1)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("batch", "4,x", "--batch 'x': expected a whole number from 1 to 1,048,576"),
        ("batch", "4,4", "--batch 4,4: 4 is there twice"),
        ("policy", "fcfs,sfj", "unknown policy 'sfj'; did you mean sjf"),
        ("profile", "nothing", "unknown profile nothing; known: rtx4090_llama3.1-8b"),
        ("capacity", "evict", "there is watermark, on-demand, no-evict"),
        ("batching", "statik", "did you mean static? there is continuous, static"),
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
