"""A deployment, one way to serve a workload: the axes along which it varies, and its limits.

Rule: whatever can be varied is an axis here; commands, tables and searches know only axes.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from difflib import get_close_matches
from itertools import product
from math import isfinite
from operator import attrgetter
from typing import Any, Literal

from msgspec import Struct
from msgspec.structs import replace

from batcher.errors import BatchdecodeError
from batcher.fleet.routers import DEFAULT_REPORT_INTERVAL, DEFAULT_ROUTER, router_of
from batcher.fleet.streamed import AnyWorkload
from batcher.request import MAX_DRAFT_TOKENS
from batcher.scheduling.policies import policy_of
from batcher.settings import DEFAULT_SCHEDULING, SETTINGS, SchedulingSettings, Setting
from batcher.simulation.drafts import AssumedDrafts
from batcher.timing.loading import step_time_of
from batcher.timing.model_shape import load_model_shape

MAX_COUNT = 2**40
MAX_BATCH = 2**20  # slots
MAX_DRAFT_COST = 1000  # steps
MAX_REPLICAS = 2**16
MAX_REPORT_INTERVAL = 1e6  # seconds
NO_LIMIT = "none"

Value = Any


class Deployment(Struct, frozen=True, kw_only=True):
    """A way to serve a workload.

    profile: the name of a step time.  rate: how many times as fast as in the file requests arrive.
    replicas: how many engines there are, each with all the rest.  router, report_interval: which
    of them a request is sent to, and how many seconds apart they report, see batcher.fleet.
    draft_tokens, draft_acceptance, draft_cost: see AssumedDrafts; None: there are no drafts.
    draft_model: the shape of the model that makes them, None if none does; see draft_memory.py.
    """

    batch: int = 8
    scheduling: SchedulingSettings = DEFAULT_SCHEDULING
    profile: str = "constant"
    rate: float = 1.0
    replicas: int = 1
    router: str = DEFAULT_ROUTER
    report_interval: float = DEFAULT_REPORT_INTERVAL
    draft_tokens: int | None = None
    draft_acceptance: float = 0.0
    draft_cost: float = 0.0
    draft_model: str | None = None

    @property
    def drafts(self) -> AssumedDrafts | None:
        """What is assumed of drafts, None if there are none."""
        if self.draft_tokens is None:
            return None
        return AssumedDrafts(
            num_tokens=self.draft_tokens, acceptance=self.draft_acceptance, cost=self.draft_cost
        )


class Axis(Struct, frozen=True):
    """What may differ between deployments: a field of Deployment or of its scheduling.

    read: makes a value of a text, or raises a ValueError that says what is expected.
    """

    name: str
    title: str
    read: Callable[[str], Value]

    @property
    def option(self) -> str:
        """Return the option that gives its values."""
        return f"--{self.name.replace('_', '-')}"

    def value_of(self, deployment: Deployment) -> Value:
        """Return the value that `deployment` has on it."""
        if self.name in Deployment.__struct_fields__:
            return getattr(deployment, self.name)
        return getattr(deployment.scheduling, self.name)

    def set(self, deployment: Deployment, value: Value) -> Deployment:
        """Return `deployment` with another value on it."""
        if self.name in Deployment.__struct_fields__:
            return replace(deployment, **{self.name: value})
        scheduling = replace(deployment.scheduling, **{self.name: value})
        return replace(deployment, scheduling=scheduling)

    def values(self, text: str) -> list[Value]:
        """Return the values that a text with commas lists, in its order.

        Raises:
            BatchdecodeError: one is not such a value, or is there twice.
        """
        found: list[Value] = []
        for part in text.split(","):
            try:
                value = self.read(part.strip())
            except ValueError as error:
                raise BatchdecodeError(f"{self.option} {part.strip() or text!r}: {error}") from None
            if value in found:
                raise BatchdecodeError(f"{self.option} {text}: {part.strip()} is there twice")
            found.append(value)
        return found


def _count(maximum: int = MAX_COUNT, *, has_none: bool = False) -> Callable[[str], int | None]:
    expected = f"expected a whole number from 1 to {maximum:,}"
    expected += f", or {NO_LIMIT}" if has_none else ""

    def read(text: str) -> int | None:
        if has_none and text == NO_LIMIT:
            return None
        if not (text.isascii() and text.isdecimal() and 1 <= int(text) <= maximum):
            raise ValueError(expected)
        return int(text)

    return read


def _number(is_allowed: Callable[[float], bool], expected: str) -> Callable[[str], float]:
    def read(text: str) -> float:
        try:
            number = float(text)
        except ValueError:
            raise ValueError(expected) from None
        if not (isfinite(number) and is_allowed(number)):
            raise ValueError(expected)
        return number

    return read


def _one_of(names: Mapping[str, Value]) -> Callable[[str], Value]:
    def read(text: str) -> Value:
        if text not in names:
            near = get_close_matches(text, names, n=1)
            hint = f"did you mean {near[0]}? " if near else ""
            raise ValueError(f"{hint}there is {', '.join(names)}")
        return names[text]

    return read


def _name_for(find: Callable[[str], object]) -> Callable[[str], str]:
    def read(text: str) -> str:
        find(text)  # or raise
        return text

    return read


def _draft_tokens(text: str) -> int | None:
    return None if text == "0" else _count(MAX_DRAFT_TOKENS, has_none=True)(text)


def _draft_model(text: str) -> str | None:
    return None if text == NO_LIMIT else _name_for(load_model_shape)(text)


def _reader(setting: Setting) -> Callable[[str], Value]:
    """Return what makes a value of a setting of a text."""
    if setting.choices is not None:
        none = {NO_LIMIT: None} if setting.takes_none else {}
        return _one_of({**none, **setting.choices})
    if setting.is_allowed is not None:
        return _number(setting.is_allowed, f"expected {setting.expected or setting.must_be}")
    return _name_for(policy_of) if setting.kind is str else _count(has_none=setting.is_optional)


_REPORT_INTERVAL = f"expected seconds, above 0 and up to {MAX_REPORT_INTERVAL:,.0f}"
_DRAFT_COST = f"expected a share of a step, from 0 to {MAX_DRAFT_COST:,}"

# In the order of their columns; the last one changes fastest from row to row.
AXES = {
    axis.name: axis
    for axis in (
        Axis("profile", "profile", _name_for(step_time_of)),
        *(
            Axis(setting.name, setting.title, _reader(setting))
            for setting in sorted(SETTINGS.values(), key=attrgetter("rank"))
        ),
        Axis("draft_model", "draft model", _draft_model),
        Axis(
            "draft_acceptance",
            "accept",
            _number(lambda share: 0 <= share <= 1, "expected a share from 0 to 1"),
        ),
        Axis(
            "draft_cost",
            "cost",
            _number(lambda share: 0 <= share <= MAX_DRAFT_COST, _DRAFT_COST),
        ),
        Axis("draft_tokens", "drafts", _draft_tokens),
        Axis(
            "report_interval",
            "reports s",
            _number(lambda seconds: 0 < seconds <= MAX_REPORT_INTERVAL, _REPORT_INTERVAL),
        ),
        Axis("router", "router", _name_for(router_of)),
        Axis("replicas", "replicas", _count(MAX_REPLICAS)),
        Axis("batch", "batch", _count(MAX_BATCH)),
    )
}


def show_value(axis: Axis, value: Value) -> str:
    """Return a value as a person gives it."""
    setting = SETTINGS.get(axis.name)
    if setting is not None:
        return setting.shown(value)
    return NO_LIMIT if value is None else str(value)


def check_router(given: Collection[str], alternatives: Iterable[Deployment]) -> None:
    """Make sure that what was given of a router has an effect in one of the `alternatives`.

    Raises:
        BatchdecodeError: it has not.
    """
    fleets = [deployment for deployment in alternatives if deployment.replicas > 1]
    if not fleets:
        for name in ("router", "report_interval"):
            if name in given:
                raise BatchdecodeError(
                    f"{AXES[name].option} has no effect without --replicas of at least 2"
                )
    if "report_interval" in given and not any(
        router_of(deployment.router).hears_reports for deployment in fleets
    ):
        raise BatchdecodeError(
            "--report-interval has no effect: the router goes by no reports of replicas"
        )


def grid_of(values: Mapping[str, Sequence[Value]], base: Deployment) -> list[Deployment]:
    """Return all combinations of the values of some AXES, by name; the rest is as in `base`.

    They are in the order of AXES, the last of them changing fastest.
    """
    axes = [axis for name, axis in AXES.items() if name in values]
    deployments = []
    for combination in product(*(values[axis.name] for axis in axes)):
        deployment = base
        for axis, value in zip(axes, combination, strict=True):
            deployment = axis.set(deployment, value)
        deployments.append(deployment)
    return deployments


# -- limits, each of which can be widened, narrowed, or put out of the way ------------------------

Limit = Literal["slots", "kv", "tokens", "threshold", "static"]

SETTING_OF: dict[Limit, str] = {
    "slots": "batch",
    "kv": "kv_blocks",
    "tokens": "max_batch_tokens",
    "threshold": "long_prefill_threshold",
    "static": "batching",
}
FIRST_BUDGET = 2048  # tokens of a step: what is tried where there is no limit of them


def value_at(deployment: Deployment, limit: Limit) -> Value:
    """Return what the setting of `limit` is."""
    return AXES[SETTING_OF[limit]].value_of(deployment)


def limits_of(deployment: Deployment) -> list[Limit]:
    """Return what limits `deployment`, in the order of SETTING_OF."""
    return [
        limit for limit in SETTING_OF if value_at(deployment, limit) not in (None, "continuous")
    ]


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
    return _with_a_token_for_each(AXES[SETTING_OF[limit]].set(deployment, value))


def narrower(deployment: Deployment, limit: Limit) -> Deployment | None:
    """Return `deployment` with half of what `limit` limits, None if there is no such thing.

    Where steps have no token budget, they are given one.
    """
    value = value_at(deployment, limit)
    if limit == "tokens" and value is None:
        value = 2 * max(FIRST_BUDGET, deployment.batch)
    if limit == "static" or value is None or value == 1:
        return None
    return AXES[SETTING_OF[limit]].set(deployment, value // 2)


def without(deployment: Deployment, limits: Collection[Limit], workload: AnyWorkload) -> Deployment:
    """Return `deployment` with as much of what `limits` limit as `workload` can ever use."""
    bounds: dict[Limit, int] = {
        "slots": min(workload.num_samples, MAX_BATCH),
        "kv": workload.num_blocks(deployment.scheduling.block_size),
        "tokens": workload.num_tokens,
    }
    for limit in limits:
        setting = AXES[SETTING_OF[limit]]
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
