"""Benchmark of the simulation: rates on a real trace, a real run replayed.

The recorded data are not part of the project: BATCHDECODE_DATA names the folder they are in.
"""

import os
import time
from pathlib import Path

import bare
import workload
from msgspec import convert, to_builtins
from workload import Row

from batcher import Request, SimulatedModel
from batcher.planning.replay import replay
from batcher.planning.simulator import ReplicaSettings, simulate
from batcher.planning.workload import workload_of
from batcher.planning.workload_traces import TraceEntryChecks, trace_entries
from batcher.settings import SchedulingSettings
from batcher.timing.profiles import step_time_of
from batcher.trace.logs import read_request_log

PROFILE, KV_BLOCKS, BUDGET, NUM_SLOTS = "rtx4090_llama3.1-8b", 2588, 2048, 256
LIMITED = SchedulingSettings(kv_blocks=KV_BLOCKS, prefix_cache=False, max_batch_tokens=BUDGET)
CACHED = SchedulingSettings(kv_blocks=KV_BLOCKS, max_batch_tokens=BUDGET)
UNLIMITED = SchedulingSettings(max_batch_tokens=BUDGET)
AZURE = "AzureLLMInferenceTrace_conv.csv"
LOG = "vllm_rtx4090_llama3.1-8b_requests.jsonl"
TARGETS = {
    "ttft mean": "3 %",
    "tpot mean": "3 %",
    "e2e mean": "3 %",
    "ttft p99": "5 %",
    "makespan": "2 %",
}


def simulation(folder):
    """Measure the simulation on recorded data."""
    data = os.environ.get("BATCHDECODE_DATA")
    if data is None:
        yield Row("simulation: set BATCHDECODE_DATA to the folder of the traces", "not run", "")
        return
    yield from rates(
        workload_of_trace(trace_entries("azure", numbered(data, AZURE), TraceEntryChecks(AZURE)))
    )
    yield from replay_errors(data)


def workload_of_trace(entries):
    requests = [convert(to_builtins(entry), Request) for entry in entries]
    return workload_of(requests, SimulatedModel())


def numbered(data, name):
    return list(enumerate(Path(data, name).read_bytes().splitlines(), 1))


def rates(trace):
    """Measure output tokens per CPU-second over a whole trace."""
    kv, cache = f"{KV_BLOCKS:,} KV blocks", "prefix cache"
    for how, settings, target in (
        (kv, LIMITED, ""),
        (f"{kv}, {cache}", CACHED, ""),
        ("no KV limit", UNLIMITED, ">= 20M"),
    ):
        rate = best_rate(trace, settings)
        name = f"Azure trace, {PROFILE}, {BUDGET:,} tokens a step, {how}"
        yield Row(
            f"{name}: output tokens per CPU-second (bare loop: {bare_rate() / 1e6:.2f}M)",
            f"{rate / 1e6:.2f}M",
            target,
        )


def best_rate(trace, settings):
    """Return the output tokens per CPU-second of the fastest of three runs."""
    engine = ReplicaSettings(
        num_slots=NUM_SLOTS, scheduling=settings, step_time=step_time_of(PROFILE)
    )
    least = float("inf")
    for _ in range(3):
        began = time.process_time()
        simulate(trace, engine)
        least = min(least, time.process_time() - began)
    return trace.num_output_tokens / least


def bare_rate():
    rows = list(workload.rows(2000))
    began = time.process_time()
    num_tokens = sum(len(tokens) for tokens, _ in dict(bare.decode(rows, NUM_SLOTS)).values())
    return num_tokens / (time.process_time() - began)


def replay_errors(data):
    """Measure how far off the simulation of a real run is."""
    log = read_request_log(numbered(data, LOG), LOG)
    engine = ReplicaSettings(
        num_slots=NUM_SLOTS, scheduling=CACHED, step_time=step_time_of(PROFILE)
    )
    for one in replay(log, engine).comparisons:
        if one.name in TARGETS and one.error is not None:
            name = f"replay of a real run of {len(log)} requests: {one.name}"
            yield Row(name, f"{one.error:+.1%}", f"within {TARGETS[one.name]}")
