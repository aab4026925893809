"""The limits of a deployment, each of which can be widened, narrowed, or put out of the way."""

from collections.abc import Collection
from typing import Literal

from batcher.simulation.workload import Workload
from batcher.whatif.deployments import AXES, MAX_BATCH, MAX_COUNT, Deployment, Value

Limit = Literal["slots", "kv", "tokens", "threshold", "static"]

SETTINGS: dict[Limit, str] = {
    "slots": "batch",
    "kv": "kv_blocks",
    "tokens": "max_batch_tokens",
    "threshold": "long_prefill_threshold",
    "static": "batching",
}
FIRST_BUDGET = 2048  # tokens of a step: what is tried where there is no limit of them


def value_at(deployment: Deployment, limit: Limit) -> Value:
    """Return what the setting of `limit` is."""
    return AXES[SETTINGS[limit]].value_of(deployment)


def limits_of(deployment: Deployment) -> list[Limit]:
    """Return what limits `deployment`, in the order of SETTINGS."""
    return [limit for limit in SETTINGS if value_at(deployment, limit) not in (None, "continuous")]


def wider(deployment: Deployment, limit: Limit) -> Deployment | None:
    """Return `deployment` with twice of what `limit` limits, None if it does not.

    Static batching is continuous then, and a token budget at least one token for each slot.
    """
    if limit not in limits_of(deployment):
        return None
    if limit == "static":
        return AXES["batching"].set(deployment, "continuous")
    most = MAX_BATCH if limit == "slots" else MAX_COUNT
    value = min(2 * value_at(deployment, limit), most)
    return _with_a_token_for_each(AXES[SETTINGS[limit]].set(deployment, value))


def narrower(deployment: Deployment, limit: Limit) -> Deployment | None:
    """Return `deployment` with half of what `limit` limits, None if there is no such thing.

    Where steps have no token budget, they are given one.
    """
    value = value_at(deployment, limit)
    if limit == "tokens" and value is None:
        value = 2 * max(FIRST_BUDGET, deployment.batch)
    if limit == "static" or value is None or value == 1:
        return None
    return AXES[SETTINGS[limit]].set(deployment, value // 2)


def without(deployment: Deployment, limits: Collection[Limit], workload: Workload) -> Deployment:
    """Return `deployment` with as much of what `limits` limit as `workload` can ever use."""
    bounds: dict[Limit, int] = {
        "slots": min(len(workload.jobs), MAX_BATCH),
        "kv": num_blocks(workload, deployment.scheduling.block_size),
        "tokens": num_tokens(workload),
    }
    for limit in limits:
        setting = AXES[SETTINGS[limit]]
        if limit in bounds:
            most = max(value_at(deployment, limit), bounds[limit])
            deployment = setting.set(deployment, most)
        else:
            free = "continuous" if limit == "static" else None
            deployment = setting.set(deployment, free)
    return _with_a_token_for_each(deployment)


def _with_a_token_for_each(deployment: Deployment) -> Deployment:
    """Return `deployment` with a token budget, if it has one, of at least one for each slot."""
    budget = deployment.scheduling.max_batch_tokens
    if budget is None or budget >= deployment.batch:
        return deployment
    return AXES["max_batch_tokens"].set(deployment, deployment.batch)


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
