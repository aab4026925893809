"""Benchmark of simulated fleets against the bare loop."""

import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import bare
import workload
from report import Row

from batcher.fleet.streamed import parse_streamed
from batcher.settings import SchedulingSettings
from batcher.whatif.deployments import Deployment
from batcher.whatif.measuring import Question, measure

NUM_TURNS = 3
TEXT = "synthetic:rate=5000,duration=10,prompt=128,output=32"
NUM_REPLICAS = 20


def fleets(_: Path) -> Iterator[Row]:
    """Measure what is simulated of fleets for each CPU-second."""
    for router in ("round-robin", "least-loaded"):
        ratio, rate = _against_bare(lambda router=router: _fleet_seconds(router))
        name = f"fleet of {NUM_REPLICAS} behind {router}: {rate:,.0f} requests of 32 tokens"
        yield Row(f"{name} a CPU-second; tokens/s against the bare loop", f"{ratio:.2f}x", "")


def _against_bare(seconds_of: Callable[[], tuple[int, float]]) -> tuple[float, float]:
    """Return the median ratio of tokens a CPU-second to those of the bare loop, and requests/s."""
    ratios, rates = [], []
    rows = list(workload.rows(2000))
    for _ in range(NUM_TURNS):
        num_requests, seconds = seconds_of()
        began = time.process_time()
        num_tokens = sum(len(tokens) for tokens, _ in dict(bare.decode(rows, 64)).values())
        bare_rate = num_tokens / (time.process_time() - began)
        rates.append(num_requests / seconds)
        ratios.append(32 * rates[-1] / bare_rate)
    return statistics.median(ratios), statistics.median(rates)


def _fleet_seconds(router: str) -> tuple[int, float]:
    """Return how many requests a fleet served, and how long that took to simulate."""
    scheduling = SchedulingSettings(kv_blocks=26673, prefix_cache=False, max_batch_tokens=8192)
    deployment = Deployment(
        batch=256,
        replicas=NUM_REPLICAS,
        router=router,
        profile="h100_llama3.1-8b_tp1",
        scheduling=scheduling,
    )
    question = Question(parse_streamed(TEXT))
    began = time.process_time()
    served = measure(question, deployment).served
    return served, time.process_time() - began
