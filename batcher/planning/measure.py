"""The outcome of a deployment: one simulation, its numbers, its costs, and what binds.

Rule: the same workload and deployment have the same outcome in any process.  The time from the
first arrival to the end is divided among the limits that requests waited for, and the largest share
binds; docs/guide/compare.md has the definition.
"""

from collections.abc import Iterable, Mapping
from contextlib import suppress
from fractions import Fraction
from math import ceil, inf
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
from msgspec import Struct

from batcher.errors import BatchdecodeError
from batcher.metrics.slo import OTHERS, Goodput, Slo, class_name
from batcher.metrics.times import MICROSECONDS, Distribution, Latencies
from batcher.planning.deployments import (
    AXES,
    OF_ENGINE,
    Deployment,
    EngineGroup,
    groups_of,
    transfer_of,
)
from batcher.planning.fleet import Fleet
from batcher.planning.management import PAID, ReplicaState, timeline_of
from batcher.planning.routers import ROUTERS, router_of
from batcher.planning.simulator import FleetResult, Preempted, ReplicaSettings, Role, simulate
from batcher.planning.workers import OnPart
from batcher.planning.workload import AnyWorkload, Turns, Workload
from batcher.scheduling.scheduler import check_settings
from batcher.timing import catalog
from batcher.timing.catalog import FILE_SUFFIXES, CatalogError
from batcher.timing.profiles import Setup, setup_of, step_time_of
from batcher.timing.step_time import TICKS_PER_SECOND, StepTime

Constraint = Literal["slots", "kv", "tokens", "static", "compute", "arrivals"]

WORTH_DOUBLING = 0.1  # a doubled step that gains less is not worth more capacity
NUM_DIGITS = 6
CHECKED_AT_ONCE = 1024  # ended requests, between checks of whether too many have missed the SLO

# What the simulator reports kept the head of the queue out -> the limit.
_LACKS: dict[str, Constraint] = {
    "slots": "slots",
    "kv": "kv",
    "preemption": "kv",
    "tokens": "tokens",
    "batch": "static",
}
_ENLARGE_STEPS = ("slots", "kv", "tokens")


class Price(Struct, frozen=True, kw_only=True):
    """The price and the power of one GPU; idle_watts: between steps, busy_watts if None."""

    dollars_per_hour: catalog.Amount
    busy_watts: catalog.Positive | None = None
    idle_watts: catalog.Positive | None = None
    source: catalog.Text = "not stated"


def read_prices(path: str) -> dict[str, Price]:
    """Return the prices of a YAML file by GPU, or raise a CatalogError."""
    prices = {}
    for name, values in catalog.read_mapping(path).items():
        place = f"{path}: {name}"
        price = prices[name] = catalog.as_record(values, Price, place)
        if price.idle_watts is not None and price.idle_watts > (price.busy_watts or 0):
            raise CatalogError(f"{place}: idle_watts: expected at most busy_watts")
    return prices


def price_of(profile: str, prices: Mapping[str, Price]) -> tuple[Setup, Price]:
    """Return the GPUs of a profile, and the price of one of them."""
    setup = setup_of(profile)
    name = setup.hardware
    if name is None:
        raise BatchdecodeError(
            f"--prices: the GPU of {profile} is unknown: use a --profile with `hardware: NAME` in "
            "its file, or roofline:MODEL:GPU"
        )
    if name.endswith(FILE_SUFFIXES):
        name = Path(name).stem
    return setup, catalog.find(name, dict(prices), "GPU of --prices")


class Cost(Struct, frozen=True, kw_only=True):
    """The cost of serving a workload, from the first arrival to the end of the last step.

    gpus: of all replicas; with autoscaling on average, rounded up.  dollars_per_million_tokens,
    kwh_per_million_tokens: of output tokens; energy is None if the prices have no watts.
    """

    gpus: int
    gpu_hours: float
    dollars_per_hour: float
    dollars_per_million_tokens: float | None
    kwh_per_million_tokens: float | None
    price_sources: list[str]


def cost_of(
    parts: Iterable[tuple[str, FleetResult]],
    prices: Mapping[str, Price],
    makespan: float,
    num_tokens: int,
) -> Cost:
    """Return the cost of a run of `makespan` seconds with `num_tokens` output tokens.

    parts: profiles with their replicas.  All GPUs of a replica are busy in a step.
    """
    num_gpus, gpu_seconds, per_hour, joules, has_watts = 0, 0.0, 0.0, 0.0, True
    sources = dict[str, None]()
    for profile, part in parts:
        setup, price = price_of(profile, prices)
        sources[price.source] = None
        seconds = part.paid_seconds(makespan) * setup.num_gpus
        num_own = seconds / makespan if makespan else setup.num_gpus * len(part.replicas)
        num_gpus += ceil(round(num_own, NUM_DIGITS))
        gpu_seconds += seconds
        per_hour += price.dollars_per_hour * num_own
        if price.busy_watts is None:
            has_watts = False
            continue
        busy = part.totals.busy_ticks / TICKS_PER_SECOND * setup.num_gpus
        idle = max(seconds - busy, 0.0)
        idle_watts = price.busy_watts if price.idle_watts is None else price.idle_watts
        joules += price.busy_watts * busy + idle_watts * idle
    million = num_tokens / 1e6
    dollars, kwh = per_hour * makespan / 3600, joules / 3.6e6
    return Cost(
        gpus=num_gpus,
        gpu_hours=_rounded(gpu_seconds / 3600),
        dollars_per_hour=_rounded(per_hour),
        dollars_per_million_tokens=_rounded(dollars / million) if million else None,
        kwh_per_million_tokens=_rounded(kwh / million) if million and has_watts else None,
        price_sources=list(sources),
    )


def _rounded(number: float) -> float:
    return round(number, NUM_DIGITS)


# -- one simulation --------------------------------------------------------------------------------


class Question(Struct, frozen=True):
    """A workload, an SLO with the share of requests that must meet it, and prices by GPU."""

    workload: AnyWorkload
    slo: Slo | None = None
    asked: float = 1.0
    prices: dict[str, Price] | None = None


def problem_of(deployment: Deployment) -> str | None:
    for group in groups_of(deployment):
        problem = None
        try:
            check_settings(group.engine.batch, group.engine.scheduling)
        except BatchdecodeError as error:
            problem = str(error)
        if group.role == "decode" and group.engine.scheduling.kv_blocks is None:
            problem = "--kv-blocks is needed with role: decode"
        if problem is not None:
            return f"group {group.name}: {problem}" if group.name else problem
    return None


class GivenUp(Exception):  # noqa: N818 - not an error
    """Too many requests have missed the SLO."""


def run(
    workload: AnyWorkload,
    deployment: Deployment,
    on_part: OnPart = lambda _: None,
    given_up_by: Question | None = None,
) -> FleetResult:
    """Return the result of simulating a deployment.

    on_part: called with the share of the samples that have ended.  given_up_by: raise GivenUp in a
    fleet as soon as too few requests can meet the SLO of this question, which has no classes.
    """
    workload = workload.at_rate(deployment.rate)
    replicas = [
        ReplicaSettings(
            num_slots=group.engine.batch,
            scheduling=group.engine.scheduling,
            step_time=step_time_of(group.engine.profile),
            drafts=group.engine.drafts,
            group=group.name,
            role=group.role,
        )
        for group in groups_of(deployment)
        for _ in range(group.count)
    ]
    num_samples, max_missed, limits = max(workload.num_samples, 1), inf, dict[str, float]()
    if given_up_by is not None and given_up_by.slo is not None:
        limits = given_up_by.slo.limits
        max_missed = (1 - given_up_by.asked) * max(workload.exact_num_samples, 1) + 1
    num_seen = num_missed = 0
    running: Fleet | None = None

    def on_ended(num_ended: int) -> None:
        nonlocal num_seen, num_missed
        on_part(min(num_ended / num_samples, 1.0))
        if num_ended - num_seen > CHECKED_AT_ONCE and running is not None and max_missed < inf:
            times = running.columns.since(num_seen)
            num_seen += len(times.arrival)
            num_missed += len(times.arrival) - times.goodput(limits, 0, 0.0).good
            if num_missed > max_missed:
                raise GivenUp

    management = None if deployment.fleet is None else deployment.fleet.management
    if management is None and len(replicas) == 1 and isinstance(workload, Workload):
        return simulate(workload, replicas[0], on_ended)
    transfer = transfer_of(deployment)

    def run_fleet(settings: list[ReplicaSettings]) -> FleetResult:
        nonlocal running, num_seen, num_missed
        num_seen = num_missed = 0
        running = Fleet(
            Turns(workload),
            settings,
            router_of(deployment.router),
            deployment.report_interval,
            on_ended,
            management=management,
            decode_router=None if transfer is None else router_of(deployment.router),
            transfer=transfer,
        )
        return running.run()

    trial = [each.of_trial for each in replicas if each.of_trial is not None]
    is_plain = management is None and transfer is None and workload.shares_nothing
    # A custom router may count its calls, so no trial calls it.
    if is_plain and len(trial) == len(replicas) and deployment.router in ROUTERS:
        with suppress(Preempted):
            return run_fleet(trial)
    return run_fleet(replicas)


# -- outcomes; docs/guide/compare.md explains their fields -----------------------------------------


class ClassOutcome(Struct, frozen=True, kw_only=True):
    """The numbers of a class of requests with the same SLO."""

    latencies: Latencies
    goodput: Goodput


class GroupUse(Struct, frozen=True, kw_only=True):
    """The numbers of a group of replicas.

    replicas: ever started; most_replicas: at once.  served: samples, including prompts that are
    decoded elsewhere.  busy: the share of time in steps.
    """

    name: str
    replicas: int
    role: Role
    settings: dict[str, Any]
    served: int
    failed: int
    steps: int
    busy: float
    slots_used: float
    kv_used: float | None
    preemptions: int
    most_replicas: int


class FleetUse(Struct, frozen=True, kw_only=True):
    """The numbers of a managed fleet; docs/guide/fleets.md explains the fields."""

    failures: int
    lost: int
    replica_seconds: float
    mean_replicas: float
    most_replicas: int
    serving: float
    refusals: dict[str, int]
    timeline: list[tuple[float, int, int]]


class Binding(Struct, frozen=True):
    """The binding constraint, and the shares of time of all constraints.

    doubling: the gain in tokens per second of a mean step twice as large, from 0 (it takes twice as
    long) to 1 (it takes no longer).
    """

    constraint: Constraint
    share: float
    shares: dict[Constraint, float]
    doubling: float


class DraftUse(Struct, frozen=True):
    """The use of drafts; making: the share of the time of all steps spent on drafting."""

    verified: int
    accepted: int
    acceptance: float
    tokens_per_step: float
    making: float


class Outcome(Struct, frozen=True, kw_only=True):
    """The numbers of a deployment.

    served, failed, refused: samples that ended, could never run, and were refused by the router.
    slots_used, kv_used, budget_used: shares over the steps, None without a limit.  tails: by limit
    of the SLO, the percentile that must meet it, None if too few were served.
    """

    served: int
    failed: int
    refused: int
    steps: int
    makespan: float
    requests_per_s: float
    tokens_per_s: float
    latencies: Latencies
    goodput: Goodput | None
    classes: dict[str, ClassOutcome]
    slots_used: float
    kv_used: float | None
    budget_used: float | None
    preemptions: int
    recomputed_tokens: int
    prefix_hits: float | None
    tails: dict[str, float | None]
    drafts: DraftUse | None
    binding: Binding
    fleet: FleetUse | None
    groups: list[GroupUse] | None
    cost: Cost | None

    def times(self, name: str) -> Distribution | None:
        """Return the times of a metric, or of a limit named as in Slo.all_limits."""
        of_class, _, metric = name.rpartition(":")
        latencies = self.classes[of_class or OTHERS].latencies if self.classes else self.latencies
        found: Distribution | None = getattr(latencies, metric)
        return found

    @property
    def good_share(self) -> float:
        """The exact share of the requests that met the SLO, the least of all classes."""
        parts = [each.goodput for each in self.classes.values()]
        if not parts and self.goodput is not None:
            parts = [self.goodput]
        return min((part.good / part.requests for part in parts if part.requests), default=0.0)

    def score(self, limits: Mapping[str, float]) -> tuple[float, float]:
        """Return the good share, and the negative excess of the worst tail over its limit."""
        tails = [(self.tails[metric], limit) for metric, limit in limits.items()]
        excesses = [inf if tail is None else tail / limit for tail, limit in tails]
        return self.good_share, -max(excesses, default=0.0)


def measure(
    question: Question, deployment: Deployment, on_part: OnPart = lambda _: None
) -> Outcome:
    """Return the outcome of `deployment`, or raise a BatchdecodeError for invalid settings."""
    return outcome_of(question, deployment, run(question.workload, deployment, on_part))


def outcome_of(question: Question, deployment: Deployment, result: FleetResult) -> Outcome:
    totals, times, slo, prices = result.totals, result.times, question.slo, question.prices
    makespan, num_served, num_refused = result.makespan, len(times.arrival), result.refused.total()
    num_tokens = int(times.num_tokens.sum())
    groups = groups_of(deployment)
    parts = [(group, result.part(group.name)) for group in groups]
    cost = None
    if prices is not None:
        priced = [(group.engine.profile, part) for group, part in parts]
        cost = cost_of(priced, prices, makespan, num_tokens)
    drafts = None
    if totals.num_drafts:
        drafts = DraftUse(
            verified=totals.num_drafts,
            accepted=totals.num_accepted,
            acceptance=_rounded(totals.num_accepted / totals.num_drafts),
            tokens_per_step=_rounded(1 + totals.num_accepted / totals.num_draft_rows),
            making=_rounded(totals.draft_ticks / totals.busy_ticks),
        )
    has_cache = any(group.engine.scheduling.has_prefix_cache for group in groups)
    hits = totals.found_tokens / (totals.asked_tokens or 1)
    goodput, classes, tails = _kept(slo, result, question.asked)
    use = _fleet_use(result)
    budget = result.share_used(lambda own: own.scheduling.max_batch_tokens, totals.computed_tokens)
    return Outcome(
        served=num_served,
        failed=result.failed.total() - num_refused,
        refused=num_refused,
        steps=totals.num_steps,
        makespan=_rounded(makespan),
        requests_per_s=_rounded(num_served / makespan) if makespan else 0.0,
        tokens_per_s=_rounded(num_tokens / makespan) if makespan else 0.0,
        latencies=times.latencies(),
        goodput=goodput,
        classes=classes,
        budget_used=None if budget is None else _rounded(budget),
        **_shares(result),
        preemptions=totals.num_preemptions,
        recomputed_tokens=totals.recomputed_tokens,
        prefix_hits=_rounded(hits) if has_cache else None,
        tails=tails,
        drafts=drafts,
        binding=_binding(result, parts),
        fleet=use,
        groups=None
        if deployment.fleet is None
        else [
            GroupUse(
                name=group.name,
                replicas=len(part.replicas),
                role=group.role,
                settings={name: AXES[name].value_of(group.engine) for name in OF_ENGINE},
                served=part.totals.num_served,
                failed=part.totals.failed.total(),
                steps=part.totals.num_steps,
                busy=_rounded(part.totals.busy_ticks / TICKS_PER_SECOND / paid if paid else 0.0),
                **_shares(part),
                preemptions=part.totals.num_preemptions,
                # a managed fleet has one group
                most_replicas=len(part.replicas) if use is None else use.most_replicas,
            )
            for group, part in parts
            for paid in [part.paid_seconds(makespan)]
        ],
        cost=cost,
    )


def _shares(part: FleetResult) -> dict[str, Any]:
    slots = part.share_used(lambda own: own.num_slots, part.totals.slot_steps)
    blocks = part.share_used(lambda own: own.scheduling.kv_blocks, part.totals.block_steps)
    kv_used = None if blocks is None else _rounded(blocks)
    return {"slots_used": _rounded(slots or 0.0), "kv_used": kv_used}


def _kept(
    slo: Slo | None, result: FleetResult, asked: float
) -> tuple[Goodput | None, dict[str, ClassOutcome], dict[str, float | None]]:
    """Return the goodput of all requests, the outcome of each class, and the tails.

    A request is in the class of its priority, or in that of the others if they have an SLO.  A
    refused or failed request misses its SLO.
    """
    if slo is None:
        return None, {}, {}
    makespan, failed, all_times = result.times.makespan, result.failed, result.times
    is_other = ~np.isin(all_times.priority, list(slo.classes))
    num_failed = sum(count for priority, count in failed.items() if priority not in slo.classes)
    others = OTHERS, "", slo.limits, all_times.where(is_other), num_failed
    parts = [others] if slo.limits else []
    for priority, own in slo.classes.items():
        name, times = class_name(priority), all_times.where(all_times.priority == priority)
        parts.append((name, f"{name}:", own.limits, times, failed[priority]))
    tails: dict[str, float | None] = {}
    classes: dict[str, ClassOutcome] = {}
    missed: dict[str, int] = {}
    requests = good = 0
    for name, place, limits, times, num_failed in parts:
        goodput = times.goodput(limits, num_failed, makespan)
        if slo.classes:
            classes[name] = ClassOutcome(latencies=times.latencies(), goodput=goodput)
        num_served = len(times.arrival)
        rank = max(1, ceil(Fraction(str(asked)) * (num_served + num_failed)))
        for metric in limits:
            values = np.sort(times.values(metric))
            is_served = rank <= num_served
            tails[place + metric] = int(values[rank - 1]) / MICROSECONDS if is_served else None
        missed |= {place + reason: count for reason, count in goodput.missed.items()}
        requests += goodput.requests
        good += goodput.good
    return Goodput.of(slo.all_limits, requests, good, makespan, missed), classes, tails


def _fleet_use(result: FleetResult) -> FleetUse | None:
    history, begin, makespan = result.history, result.first_arrival or 0.0, result.makespan
    if history is None:
        return None
    end = begin + makespan
    seconds = sum(life.seconds(PAID, begin, end) for life in history.lives)
    serving = sum(life.seconds([ReplicaState.SERVING], begin, end) for life in history.lives)
    timeline = timeline_of(history.lives, end)
    return FleetUse(
        failures=history.num_failures,
        lost=history.num_lost,
        replica_seconds=_rounded(seconds),
        mean_replicas=_rounded(seconds / makespan) if makespan else 0.0,
        most_replicas=max(num_paid for _, _, num_paid in timeline),
        serving=_rounded(serving / seconds) if seconds else 0.0,
        refusals={reason: count for reason, count in sorted(history.refusals.items()) if count},
        timeline=[(_rounded(time), serve, paid) for time, serve, paid in timeline],
    )


def _binding(result: FleetResult, parts: list[tuple[EngineGroup, FleetResult]]) -> Binding:
    """Return what bound a run; the time divided is that of all replicas, which are in `parts`."""
    replicas = result.replicas
    num_admitted = sum(replica.last_admission_ticks is not None for replica in replicas)
    if result.failed.total() > result.refused.total() and not num_admitted:
        return Binding("kv", 1.0, {"kv": 1.0}, 0.0)  # there is no time to divide
    ticks = dict.fromkeys(get_args(Constraint), 0)
    doubling, num_busy = 0.0, result.totals.busy_ticks
    for group, part in parts:
        gain = _gain_of_doubling(part, step_time_of(group.engine.profile))
        doubling += gain * (part.totals.busy_ticks / num_busy if num_busy else 0.0)
        for reason, lacking in _LACKS.items():
            is_useless = lacking in _ENLARGE_STEPS and gain < WORTH_DOUBLING
            named: Constraint = "compute" if is_useless else lacking
            ticks[named] += part.totals.binding_ticks[reason]
        ticks["kv"] += part.totals.stalled_ticks
    num_waiting_ticks = sum(ticks.values())
    # After its last first admission a replica drains, while no request waits.
    drain = sum(
        min(each.end_ticks - each.last_admission_ticks, each.binding_ticks["arrivals"])
        for each in replicas
        if each.last_admission_ticks is not None
    )
    total = round(result.paid_seconds(result.makespan) * TICKS_PER_SECOND)
    total = max(total, num_waiting_ticks + drain)
    ticks["compute"] += drain
    ticks["arrivals"] = total - num_waiting_ticks - drain
    shares = {name: _rounded(part / total) for name, part in ticks.items() if part}
    constraint: Constraint = max(ticks, key=lambda name: ticks[name]) if total else "arrivals"
    return Binding(constraint, shares.get(constraint, 0.0), shares, _rounded(doubling))


def _gain_of_doubling(result: FleetResult, step_time: StepTime) -> float:
    """Return the gain in tokens per second of a step twice as large as the mean one."""
    totals, ticks_of = result.totals, step_time.ticks
    num_steps = totals.num_steps
    if not num_steps:
        return 0.0
    num_rows = max(1, round(totals.slot_steps / num_steps))
    num_tokens = max(num_rows, round(totals.computed_tokens / num_steps))
    kv_read = round((totals.kv_read - totals.unread_tokens) / num_steps)
    prefill_work = round((totals.prefill_work + totals.draft_work) / num_steps)
    once = ticks_of(num_tokens, num_rows, kv_read, prefill_work)
    twice = ticks_of(2 * num_tokens, 2 * num_rows, 2 * kv_read, 2 * prefill_work)
    if totals.draft_ticks:  # a draft costs a share of a step that only decodes
        decoding = ticks_of(num_rows, num_rows, kv_read, 0)
        making = totals.draft_ticks / num_steps
        doubled = ticks_of(2 * num_rows, 2 * num_rows, 2 * kv_read, 0)
        making_twice = making * doubled / decoding
        return 2 * (once + making) / (twice + making_twice) - 1
    return 2 * once / twice - 1
