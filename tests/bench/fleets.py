"""Benchmark of simulated fleets against the bare loop."""

import statistics
import time

import bare
import workload
from workload import Row

from batcher.garbage import look_seldom
from batcher.planning.deployments import Deployment
from batcher.planning.measure import Question, measure
from batcher.planning.workload import parse_streamed
from batcher.settings import SchedulingSettings

NUM_TURNS = 3
TEXT = "synthetic:rate=5000,duration={seconds},prompt=128,output=32"
NUM_REPLICAS = 20
MANY_REPLICAS = 170
NUM_REQUESTS = 3_000_000  # of the whole of which a hundredth is measured


def fleets(_):
    """Measure what is simulated of fleets for each CPU-second."""
    look_seldom()  # as the command does
    for router in ("round-robin", "least-loaded"):
        ratio, rate = _against_bare(lambda router=router: _fleet_seconds(router))
        name = f"fleet of {NUM_REPLICAS} behind {router}: {rate:,.0f} requests of 32 tokens"
        yield Row(f"{name} a CPU-second; tokens/s against the bare loop", f"{ratio:.2f}x", "")
    parts = [_fleet_seconds("round-robin", MANY_REPLICAS, 6) for _ in range(NUM_TURNS)]
    each = statistics.median(seconds / num_requests for num_requests, seconds in parts)
    name = f"fleet of {MANY_REPLICAS} behind round-robin, a hundredth of {NUM_REQUESTS:,} requests"
    whole = each * NUM_REQUESTS
    yield Row(f"{name}: {each * 1e6:.0f} µs each", f"{whole:.0f} s for all", "<= 300 s")


def _against_bare(seconds_of):
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


def _fleet_seconds(router, num_replicas=NUM_REPLICAS, seconds=10):
    """Return how many requests a fleet served in so long, and how long that took to simulate."""
    scheduling = SchedulingSettings(kv_blocks=26673, prefix_cache=False, max_batch_tokens=8192)
    deployment = Deployment(
        batch=256,
        replicas=num_replicas,
        router=router,
        profile="h100_llama3.1-8b_tp1",
        scheduling=scheduling,
    )
    question = Question(parse_streamed(TEXT.format(seconds=seconds)))
    began = time.process_time()
    served = measure(question, deployment).served
    return served, time.process_time() - began
