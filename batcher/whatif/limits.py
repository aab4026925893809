"""The limits of a deployment, each of which can be doubled, or put where nobody meets it."""

from collections.abc import Callable, Collection

from msgspec.structs import replace

from batcher.settings import SchedulingSettings
from batcher.simulation.workload import Workload
from batcher.whatif.binding import Constraint
from batcher.whatif.deployments import MAX_BATCH, Deployment

SETTINGS: dict[Constraint, str] = {
    "slots": "batch",
    "kv": "kv_blocks",
    "tokens": "max_batch_tokens",
    "static": "batching",
}


def limits_of(deployment: Deployment) -> list[Constraint]:
    """Return what limits `deployment`, in the order of SETTINGS."""
    scheduling = deployment.scheduling
    is_there = {
        "slots": True,
        "kv": scheduling.kv_blocks is not None,
        "tokens": scheduling.max_batch_tokens is not None,
        "static": scheduling.batching == "static",
    }
    return [limit for limit in SETTINGS if is_there[limit]]


def doubled(deployment: Deployment, limit: Constraint) -> Deployment:
    """Return `deployment` with twice of what `limit` limits; static batching is continuous then."""
    return _changed(deployment, {limit}, lambda value, _: 2 * value, {})


def without(
    deployment: Deployment, limits: Collection[Constraint], workload: Workload
) -> Deployment:
    """Return `deployment` with as much of what `limits` limit as `workload` can ever use."""
    bounds = {
        "slots": len(workload.jobs),
        "kv": num_blocks(workload, deployment.scheduling.block_size),
        "tokens": num_tokens(workload),
    }
    return _changed(deployment, limits, max, bounds)


def _changed(
    deployment: Deployment,
    limits: Collection[Constraint],
    grown: Callable[[int, int], int],
    bounds: dict[str, int],
) -> Deployment:
    """Return `deployment` with `grown` (value, bound) of each of `limits`."""
    scheduling: SchedulingSettings = deployment.scheduling
    batch, budget = deployment.batch, scheduling.max_batch_tokens
    if "slots" in limits:
        batch = min(grown(batch, bounds.get("slots", 0)), max(batch, MAX_BATCH))
    if "kv" in limits and scheduling.kv_blocks is not None:
        num = grown(scheduling.kv_blocks, bounds.get("kv", 0))
        scheduling = replace(scheduling, kv_blocks=num)
    if budget is not None:
        if "tokens" in limits:
            budget = grown(budget, bounds.get("tokens", 0))
        scheduling = replace(scheduling, max_batch_tokens=max(budget, batch))  # one for each slot
    if "static" in limits:
        scheduling = replace(scheduling, batching="continuous")
    return replace(deployment, batch=batch, scheduling=scheduling)


def num_tokens(workload: Workload) -> int:
    """Return how many tokens are computed of all there can be at once."""
    return sum(job.num_prompt_tokens + job.num_output_tokens for job in workload.jobs)


def num_blocks(workload: Workload, block_size: int) -> int:
    """Return how many blocks hold all there can be at once, each turn with all before it."""
    total = 0
    histories: dict[str, int] = {}
    for job in workload.jobs:
        num_held = job.num_prompt_tokens + job.max_tokens
        if job.session is not None:
            num_held += histories.get(job.session, 0)
            histories[job.session] = num_held
        total += -(-num_held // block_size)
    return total
