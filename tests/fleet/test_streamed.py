"""Synthetic workloads drawn as they arrive: those `workload` writes, in any number of parts."""

from itertools import takewhile

import pytest
from examples import mostly_heavy

from batcher.errors import BatchdecodeError
from batcher.metrics.slo import Slo
from batcher.models.simulated import SimulatedModel
from batcher.planning.deployments import Deployment
from batcher.planning.measure import Question, measure
from batcher.planning.streamed import parse_streamed
from batcher.planning.synthetic import (
    LENGTHS,
    Arrivals,
    SyntheticWorkload,
    constant,
    gamma,
    open_entries,
    parse_distribution,
    poisson,
)
from batcher.planning.workload import workload_of
from batcher.request import PromptSegment, Request
from batcher.settings import SchedulingSettings

LENGTH_TEXTS = ("lognormal:100:0.6", "uniform:1:30")
TEXT = "synthetic:rate=50,duration=6,prompt=lognormal:100:0.6,output=uniform:1:30,seed=3"
SLO = Slo({"ttft": 0.05})


def written(arrivals: Arrivals, priorities=None):
    """The workload of TEXT as `batchdecode workload` writes it, but for how requests arrive."""
    prompts, outputs = (parse_distribution(text, "", LENGTHS) for text in LENGTH_TEXTS)
    synthetic = SyntheticWorkload(
        prompt_lengths=prompts, output_lengths=outputs, priorities=priorities or {}, seed=3
    )
    requests = [
        Request(
            id=entry.id,
            arrival_time=entry.arrival_time,
            prompt=[PromptSegment(length=one.length, seed=one.seed) for one in entry.prompt],
            max_tokens=entry.max_tokens,
            ignore_eos=True,
            priority=entry.priority,
        )
        for entry in takewhile(lambda one: one.arrival_time < 6, open_entries(synthetic, arrivals))
    ]
    return workload_of(requests, SimulatedModel())


def deployment(replicas, kv_blocks):
    scheduling = SchedulingSettings(kv_blocks=kv_blocks, max_batch_tokens=512)
    return Deployment(
        batch=8, profile="h100_llama3.1-8b_tp1", replicas=replicas, scheduling=scheduling
    )


@pytest.mark.parametrize("replicas", mostly_heavy([1, 3], 3))
@pytest.mark.parametrize(
    ("more", "arrivals", "kv_blocks"),
    [
        ("", poisson(50), 12),  # some prompts never fit
        (",burstiness=0.4", gamma(50, 0.4), 200),
        (",burstiness=constant", constant(50), 200),
        (",priority=-1:2:5:1", poisson(50), 200),
    ],
)
def test_it_is_the_workload_that_is_written(replicas, more, arrivals, kv_blocks):
    streamed = Question(parse_streamed(TEXT + more), SLO)
    file = Question(written(arrivals, streamed.workload.shares), SLO)
    engines = deployment(replicas, kv_blocks)
    outcome = measure(streamed, engines)
    assert outcome == measure(file, engines)
    assert (outcome.failed > 0) == (kv_blocks == 12)
    assert streamed.workload.priorities == file.workload.priorities


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("synthetic:rate=5,duration=6,prompt=8", "output is missing"),
        (
            "synthetic:rate=5,rate=6,duration=6,prompt=8,output=8",
            "'rate=6': rate is there twice; expected",
        ),
        ("synthetic:prompts=5", "there is no prompts .did you mean prompt.*; expected"),
        ("synthetic:rate", "'rate': this is no NAME=VALUE; expected"),
        ("synthetic:rate=0,duration=6,prompt=8,output=8", "above 0"),
        ("synthetic:rate=1e6,duration=1e9,prompt=8,output=8", "more than"),
        ("synthetic:rate=5,duration=6,prompt=x,output=8", "unknown distribution 'x'"),
        ("synthetic:rate=5,duration=6,prompt=8,output=8,seed=-1", "a whole number"),
    ],
)
def test_a_text_that_names_none_is_told_what_does(text, message):
    with pytest.raises(BatchdecodeError, match=message):
        parse_streamed(text)
