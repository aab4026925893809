"""The limits of a deployment, each of which can be widened, narrowed, or put out of the way.

Rule: of a fleet of several groups, that is done to all of them at once.
"""

from collections.abc import Callable, Collection
from typing import Literal

from msgspec.structs import replace

from batcher.planning.deployments import AXES, MAX_BATCH, MAX_COUNT, OF_ENGINE, Deployment, Value
from batcher.planning.fleets import engines_of, groups_of
from batcher.planning.streamed import AnyWorkload

Limit = Literal["slots", "kv", "tokens", "threshold", "static"]
Change = Callable[[Deployment], Deployment | None]
"""Returns one engine with another limit; None if there is no such thing."""

SETTING_OF: dict[Limit, str] = {
    "slots": "batch",
    "kv": "kv_blocks",
    "tokens": "max_batch_tokens",
    "threshold": "long_prefill_threshold",
    "static": "batching",
}
FIRST_BUDGET = 2048  # tokens of a step: what is tried where there is no limit of them


def value_at(deployment: Deployment, limit: Limit) -> Value:
    """Return what the setting of `limit` is; a list of what it is in each group if they differ."""
    axis = AXES[SETTING_OF[limit]]
    values = [axis.value_of(engine) for engine in engines_of([deployment])]
    return values if any(value != values[0] for value in values) else values[0]


def limits_of(deployment: Deployment) -> list[Limit]:
    """Return what limits `deployment`, or a group of it, in the order of SETTING_OF."""
    engines = engines_of([deployment])
    return [limit for limit in SETTING_OF if any(_limits(limit, engine) for engine in engines)]


def _limits(limit: Limit, engine: Deployment) -> bool:
    return value_at(engine, limit) not in (None, "continuous")


def _in_each(deployment: Deployment, change: Change) -> Deployment | None:
    """Return `deployment` with each group changed of which `change` makes something, or None."""
    fleet = deployment.fleet
    if fleet is None:
        return change(deployment)
    groups = list(fleet.groups)
    for place, group in enumerate(groups_of(deployment)):
        changed = change(group.engine)
        if changed is not None:
            settings = {name: AXES[name].value_of(changed) for name in OF_ENGINE}
            news = {
                name: value
                for name, value in settings.items()
                if value != AXES[name].value_of(group.engine)
            }
            groups[place] = replace(groups[place], settings=groups[place].settings | news)
    if tuple(groups) == fleet.groups:
        return None
    return replace(deployment, fleet=replace(fleet, groups=tuple(groups)))


def wider(deployment: Deployment, limit: Limit) -> Deployment | None:
    """Return `deployment` with twice of what `limit` limits, None if it does not.

    Static batching is continuous then, and a token budget at least one token for each slot.
    """

    def change(engine: Deployment) -> Deployment | None:
        if not _limits(limit, engine):
            return None
        if limit == "static":
            return AXES["batching"].set(engine, "continuous")
        most = MAX_BATCH if limit == "slots" else MAX_COUNT
        value = min(2 * value_at(engine, limit), most)
        return _with_a_token_for_each(AXES[SETTING_OF[limit]].set(engine, value))

    return _in_each(deployment, change)


def narrower(deployment: Deployment, limit: Limit) -> Deployment | None:
    """Return `deployment` with half of what `limit` limits, None if there is no such thing.

    Where steps have no token budget, they are given one.
    """

    def change(engine: Deployment) -> Deployment | None:
        value = value_at(engine, limit)
        if limit == "tokens" and value is None:
            value = 2 * max(FIRST_BUDGET, engine.batch)
        if limit == "static" or value is None or value == 1:
            return None
        return AXES[SETTING_OF[limit]].set(engine, value // 2)

    return _in_each(deployment, change)


def without(deployment: Deployment, limits: Collection[Limit], workload: AnyWorkload) -> Deployment:
    """Return `deployment` with as much of what `limits` limit as `workload` can ever use."""

    def change(engine: Deployment) -> Deployment:
        bounds: dict[Limit, int] = {
            "slots": min(workload.num_samples, MAX_BATCH),
            "kv": workload.num_blocks(engine.scheduling.block_size),
            "tokens": workload.num_tokens,
        }
        for limit in filter(lambda limit: _limits(limit, engine), limits):
            setting = AXES[SETTING_OF[limit]]
            if limit in bounds:
                most = max(value_at(engine, limit), bounds[limit])
                engine = setting.set(engine, most)
            else:
                free = "continuous" if limit == "static" else None
                engine = setting.set(engine, free)
        return _with_a_token_for_each(engine)

    return _in_each(deployment, change) or deployment


def _with_a_token_for_each(deployment: Deployment) -> Deployment:
    """Return `deployment` with a token budget, if it has one, of at least one for each slot."""
    budget = deployment.scheduling.max_batch_tokens
    if budget is None or budget >= deployment.batch:
        return deployment
    return AXES["max_batch_tokens"].set(deployment, deployment.batch)
