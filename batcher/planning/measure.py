"""What a deployment makes of a workload: one simulation, the numbers asked of it, and what binds.

Rule: the same workload and deployment give the same outcome, in whatever process.  The time from
the first arrival to the end is shared out among what was lacking, and the largest share binds;
docs/compare.md has the definition.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from fractions import Fraction
from math import ceil, inf
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from batcher.errors import BatchdecodeError
from batcher.metrics.slo import OTHERS, Goodput, Slo, class_name
from batcher.metrics.times import MICROSECONDS, Distribution, Latencies
from batcher.planning.deployments import (
    AXES,
    MAX_BATCH,
    OF_ENGINE,
    Deployment,
    EngineGroup,
    Value,
    groups_of,
    transfer_of,
)
from batcher.planning.disaggregated import DisaggregatedFleet
from batcher.planning.fleet import (
    PAID,
    Fleet,
    FleetResult,
    ReplicasResult,
    ReplicaState,
    goodput_of,
    latencies_of,
    result_of_engine,
    timeline_of,
)
from batcher.planning.managed_fleet import ManagedFleet
from batcher.planning.routers import ROUTERS, router_of
from batcher.planning.simulated_sequence import Turns
from batcher.planning.simulator import Preempted, ReplicaSettings, Role, SimulationTotals, simulate
from batcher.planning.streamed import AnyWorkload, StreamedTurns
from batcher.planning.workers import OnPart
from batcher.planning.workload import Workload
from batcher.scheduling.scheduler import check_settings
from batcher.speculation.settings import expected_speedup, simple_return
from batcher.timing import catalog
from batcher.timing.catalog import FILE_SUFFIXES, CatalogError
from batcher.timing.profiles import Setup, setup_of, step_time_of
from batcher.timing.step_time import TICKS_PER_SECOND

Constraint = Literal["slots", "kv", "tokens", "static", "compute", "arrivals"]

StepTicks = Callable[[int, int, int, int], int]
"""Tells how long a step takes, see StepTime.ticks."""

WORTH_DOUBLING = 0.1  # a doubled step that gains less is as good as none
NUM_DIGITS = 6

# What the simulator says kept the first of the queue out -> what there was too little of.
_LACKS: dict[str, Constraint] = {
    "slots": "slots",
    "kv": "kv",
    "preemption": "kv",
    "tokens": "tokens",
    "batch": "static",
}
_IS_ROOM = ("slots", "kv", "tokens")  # with more of them, steps would be larger


# What a deployment costs: the dollars and the watts of its GPUs, at prices from a user's file.
#
# Rule: no price is known here; they change, and differ from one contract to the next.

SECONDS_PER_HOUR = 3600
MILLION = 1e6
JOULES_PER_KWH = 3.6e6


class Price(Struct, frozen=True, kw_only=True):
    """The price and the power of one GPU.

    busy_watts: while a step is computed.  idle_watts: in between; None: as when it is busy.
    """

    dollars_per_hour: catalog.Amount
    busy_watts: catalog.OptionalPositive = None
    idle_watts: catalog.OptionalPositive = None
    source: catalog.Text = "not stated"


class Cost(Struct, frozen=True, kw_only=True):
    """The cost of serving a workload.

    gpus: of all replicas, paid from the first arrival to the end of the last step; where replicas
    come and go those that are there, on average and rounded up.  dollars_per_million_tokens,
    kwh_per_million_tokens: of output tokens; None if there were none.  The energy, of GPUs alone,
    is None if the prices have no watts.  price_sources: as their file states them.
    """

    gpus: int
    gpu_hours: float
    dollars_per_hour: float
    dollars_per_million_tokens: float | None
    kwh_per_million_tokens: float | None
    price_sources: list[str]


def read_prices(path: str) -> dict[str, Price]:
    """Return the prices of a YAML file by the names of GPUs; raise a CatalogError."""
    prices = {}
    for name, values in catalog.read_mapping(path).items():
        place = f"{path}: {name}"
        price = prices[name] = catalog.as_record(values, Price, place)
        if price.idle_watts is not None and price.idle_watts > (price.busy_watts or 0):
            raise CatalogError(f"{place}: idle_watts: expected at most busy_watts")
    return prices


def price_of(profile: str, prices: Mapping[str, Price]) -> tuple[Setup, Price]:
    """Return the GPUs of the step time called `profile`, and the price of one of them."""
    setup = setup_of(profile)
    name = setup.gpu
    if name is None:
        raise BatchdecodeError(
            f"--prices: nothing says which GPU {profile} runs on: give a --profile with "
            "`hardware: NAME` in its file, or roofline:MODEL:GPU"
        )
    if name.endswith(FILE_SUFFIXES):
        name = Path(name).stem
    return setup, catalog.find(name, dict(prices), "GPU of --prices")


def cost_of(
    parts: Iterable[tuple[str, ReplicasResult]],
    prices: Mapping[str, Price],
    makespan: float,
    num_tokens: int,
) -> Cost:
    """Return the cost of a run of `makespan` seconds with so many output tokens.

    parts: a step time and the replicas that have it.  All GPUs of a replica are busy in a step.
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
        busy = part.busy_ticks / TICKS_PER_SECOND * setup.num_gpus
        idle = max(seconds - busy, 0.0)
        idle_watts = price.busy_watts if price.idle_watts is None else price.idle_watts
        joules += price.busy_watts * busy + idle_watts * idle
    return Cost(
        gpus=num_gpus,
        gpu_hours=round(gpu_seconds / SECONDS_PER_HOUR, NUM_DIGITS),
        dollars_per_hour=round(per_hour, NUM_DIGITS),
        dollars_per_million_tokens=_per_million(per_hour * makespan / SECONDS_PER_HOUR, num_tokens),
        kwh_per_million_tokens=_per_million(
            joules / JOULES_PER_KWH if has_watts else None, num_tokens
        ),
        price_sources=list(sources),
    )


def _per_million(amount: float | None, num_tokens: int) -> float | None:
    if amount is None or not num_tokens:
        return None
    return round(amount * MILLION / num_tokens, NUM_DIGITS)


# What is asked of a deployment, and what it comes to.


class Question(Struct, frozen=True):
    """What is to be served, the promise, and for which share of the requests.

    prices: of GPUs, by name; None: costs are not asked.
    """

    workload: AnyWorkload
    slo: Slo | None = None
    asked: float = 1.0
    prices: dict[str, Price] | None = None


def run(
    workload: AnyWorkload, deployment: Deployment, on_part: OnPart = lambda _: None
) -> FleetResult:
    """Return what the replicas of a deployment do; one alone needs no router.

    on_part: called with the share of the samples that have ended, again and again.
    """
    workload = workload.at_rate(deployment.rate)
    replicas: list[ReplicaSettings] = []
    for group in groups_of(deployment):
        engine = group.engine
        settings = ReplicaSettings(
            num_slots=engine.batch,
            scheduling=engine.scheduling,
            step_time=step_time_of(engine.profile),
            drafts=engine.drafts,
            group=group.name,
            role=group.role,
        )
        replicas += [settings] * group.count
    num_samples = max(workload.num_samples, 1)

    def on_ended(num_ended: int) -> None:
        on_part(min(num_ended / num_samples, 1.0))

    def make_turns() -> Turns:
        return Turns(workload) if isinstance(workload, Workload) else StreamedTurns(workload)

    fleet = deployment.fleet
    management = None if fleet is None else fleet.management
    if management is None and len(replicas) == 1 and isinstance(workload, Workload):
        own = replicas[0]
        result = simulate(
            workload, own.num_slots, own.scheduling, own.step_time, on_ended, own.drafts
        )
        return result_of_engine(result, own)
    transfer, interval = transfer_of(deployment), deployment.report_interval
    is_plain = management is None and transfer is None
    # A router of one's own is asked by no fleet that may be given up: it may count.
    if is_plain and deployment.router in ROUTERS and workload.shares_nothing:
        trial = [found for each in replicas if (found := each.of_trial) is not None]
        if len(trial) == len(replicas):
            with suppress(Preempted):
                router = router_of(deployment.router)
                return Fleet(make_turns(), trial, router, interval, on_ended).run()
    turns, router = make_turns(), router_of(deployment.router)
    if transfer is not None:
        to_decode = router_of(deployment.router)
        return DisaggregatedFleet(
            turns, replicas, router, interval, on_ended, decode_router=to_decode, transfer=transfer
        ).run()
    if management is None:
        return Fleet(turns, replicas, router, interval, on_ended).run()
    return ManagedFleet(turns, replicas, router, management, interval, on_ended).run()


class ClassOutcome(Struct, frozen=True, kw_only=True):
    """The results of a class of requests with the same promise."""

    latencies: Latencies
    goodput: Goodput


def kept(
    slo: Slo, result: FleetResult, asked: float
) -> tuple[Goodput, dict[str, ClassOutcome], dict[str, float | None]]:
    """Return the goodput of all, that of each class (none without classes), and the tails.

    asked: the share of the requests of a class for which `slo` is; no more of them exceed a tail,
    None if fewer were served.

    A request is of one class at most: that of its priority, or of the others, if these are promised
    anything.  A request without an end of its own has missed all that was promised.
    """
    makespan, failed = result.times.makespan, result.failed
    parts = [(OTHERS, "", slo.limits, result.times, result.num_failed)]
    if slo.classes:
        is_other = ~np.isin(result.priorities, list(slo.classes))
        num_failed = sum(count for priority, count in failed.items() if priority not in slo.classes)
        parts = [(OTHERS, "", slo.limits, result.times.where(is_other), num_failed)]
        parts = parts if slo.limits else []
        for priority, own in slo.classes.items():
            name, times = class_name(priority), result.times.where(result.priorities == priority)
            parts.append((name, f"{name}:", own.limits, times, failed[priority]))
    tails: dict[str, float | None] = {}
    classes: dict[str, ClassOutcome] = {}
    missed: dict[str, int] = {}
    requests = good = 0
    for name, place, limits, times, num_failed in parts:
        goodput = goodput_of(limits, times, num_failed, makespan)
        if slo.classes:
            classes[name] = ClassOutcome(latencies=latencies_of(times), goodput=goodput)
        num_served = len(times.arrival)
        rank = max(1, ceil(Fraction(str(asked)) * (num_served + num_failed)))
        for metric in limits:
            values = np.sort(times.values(metric))
            is_served = rank <= num_served
            tails[place + metric] = int(values[rank - 1]) / MICROSECONDS if is_served else None
        for reason, count in goodput.missed.items():
            missed[place + reason] = count
        requests += goodput.requests
        good += goodput.good
    whole = Goodput.of(slo.all_limits, requests, good, makespan, missed)
    return whole, classes, tails


class GroupUse(Struct, frozen=True, kw_only=True):
    """The work of the replicas of a group.

    replicas: all there ever were.  most_replicas: at once.  served, failed: samples; a prompt that
    continues elsewhere counts as served.  busy: the share of their time in which they took steps.
    slots_used, kv_used: shares over their steps, None without such a limit.
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
    """How the replicas of a managed fleet came and went.

    failures: of replicas.  lost: samples lost with one.  replica_seconds: in which replicas were
    paid for.  mean_replicas, most_replicas: paid for.  serving: the share of these seconds.
    refusals: samples by reason.  timeline: a time, and how many serve and are paid for from then
    on.
    """

    failures: int
    lost: int
    replica_seconds: float
    mean_replicas: float
    most_replicas: int
    serving: float
    refusals: dict[str, int]
    timeline: list[tuple[float, int, int]]


def fleet_use_of(result: FleetResult) -> FleetUse | None:
    """Return how the replicas came and went; None if they were there all the time."""
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


def uses_of(
    result: FleetResult, groups: Sequence[EngineGroup], parts: Sequence[ReplicasResult]
) -> list[GroupUse]:
    """Return the work of each group; parts: the results of its replicas, group by group."""
    uses, fleet = [], fleet_use_of(result)
    for group, part in zip(groups, parts, strict=True):
        paid = part.paid_seconds(result.makespan)
        uses.append(
            GroupUse(
                name=group.name,
                replicas=len(part.replicas),
                role=group.role,
                settings={name: AXES[name].value_of(group.engine) for name in OF_ENGINE},
                served=sum(replica.num_served for replica in part.replicas),
                failed=sum(replica.failed.total() for replica in part.replicas),
                steps=part.totals.num_steps,
                busy=_rounded(part.busy_ticks / TICKS_PER_SECOND / paid if paid else 0.0),
                slots_used=_rounded(part.share_used("num_slots", part.totals.slot_steps) or 0.0),
                kv_used=_rounded_if(part.share_used("num_blocks", part.totals.block_steps)),
                preemptions=part.totals.num_preemptions,
                # a fleet that is managed has one group
                most_replicas=len(part.replicas) if fleet is None else fleet.most_replicas,
            )
        )
    return uses


class Binding(Struct, frozen=True):
    """What binds, and how time is shared out.

    shares: of the time from the first arrival to the end, 1 together; of those above 0.  doubling:
    how much the tokens per second of the mean step would grow if it were twice as large, from 0
    (its time doubles, too) to 1 (it takes no longer); the mean over busy time if replicas differ.
    """

    constraint: Constraint
    share: float
    shares: dict[Constraint, float]
    doubling: float


def binding_of(result: FleetResult, parts: Sequence[tuple[ReplicasResult, StepTicks]]) -> Binding:
    """Return what bound a simulated run; of a fleet, what did mostly.

    The time shared out is, for each replica, all in which it was there.  parts: replicas with the
    same step time, and that.
    """
    replicas = result.replicas
    num_admitted = sum(replica.last_admission_ticks is not None for replica in replicas)
    if result.num_failed > result.refused.total() and not num_admitted:
        return Binding("kv", 1.0, {"kv": 1.0}, 0.0)  # there is no time to share out
    ticks = dict.fromkeys(get_args(Constraint), 0)
    doubling, num_busy = 0.0, result.busy_ticks
    for part, ticks_of in parts:
        gain = gain_of_doubling(part, ticks_of)
        doubling += gain * (part.busy_ticks / num_busy if num_busy else 0.0)
        for reason, lacking in _LACKS.items():
            is_useless = lacking in _IS_ROOM and gain < WORTH_DOUBLING
            named: Constraint = "compute" if is_useless else lacking
            ticks[named] += part.totals.binding_ticks[reason]
        ticks["kv"] += sum(replica.stalled_ticks for replica in part.replicas)
    num_waiting_ticks = sum(ticks.values())
    # After its last first admission a replica drains, as far as nobody waited.
    drain = sum(
        min(each.end_ticks - each.last_admission_ticks, each.totals.binding_ticks["arrivals"])
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


def gain_of_doubling(result: ReplicasResult, ticks_of: StepTicks) -> float:
    """Return how much more tokens per second a step twice as large as the mean one gives."""
    totals = result.totals
    num_steps = totals.num_steps
    if not num_steps:
        return 0.0
    num_rows = max(1, round(totals.slot_steps / num_steps))
    num_tokens = max(num_rows, round(totals.computed_tokens / num_steps))
    kv_read = sum(each.kv_read for each in result.replicas) - totals.unread_tokens
    prefill_work = sum(each.prefill_work for each in result.replicas) + totals.draft_work
    kv_read, prefill_work = round(kv_read / num_steps), round(prefill_work / num_steps)
    once = ticks_of(num_tokens, num_rows, kv_read, prefill_work)
    twice = ticks_of(2 * num_tokens, 2 * num_rows, 2 * kv_read, 2 * prefill_work)
    if totals.draft_ticks:  # a draft costs a share of a step that only decodes
        decoding = ticks_of(num_rows, num_rows, kv_read, 0)
        making = totals.draft_ticks / num_steps
        doubled = ticks_of(2 * num_rows, 2 * num_rows, 2 * kv_read, 0)
        making_twice = making * doubled / decoding
        return 2 * (once + making) / (twice + making_twice) - 1
    return 2 * once / twice - 1


class DraftUse(Struct, frozen=True):
    """The use of drafts.

    acceptance: of those verified.  tokens_per_step: of a row, in steps with drafts.  making: the
    share of the time of all steps in which they were made.
    """

    verified: int
    accepted: int
    acceptance: float
    tokens_per_step: float
    making: float


class Outcome(Struct, frozen=True, kw_only=True):
    """The results of a deployment; latencies and goodput as docs/metrics.md defines them.

    served, failed, refused: samples that ended, could never run, and were refused by the router.
    makespan: in seconds.  requests_per_s, tokens_per_s: served, and output tokens, over it.
    slots_used, kv_used, budget_used: shares over the steps, None without such a limit.
    prefix_hits: the share of prompt tokens found in blocks, None without a prefix cache.  classes,
    tails: see Attainment.  drafts: None without any.  fleet: None if it is not managed.  groups: of
    a fleet file, else None.  cost: None without prices.
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


def measure(
    question: Question, deployment: Deployment, on_part: OnPart = lambda _: None
) -> Outcome:
    """Return the outcome of `deployment` for the workload of `question`.

    on_part: called with the share of the samples that have ended, again and again.

    Raises:
        BatchdecodeError: its settings make no sense, or its GPUs have no price.
    """
    result = run(question.workload, deployment, on_part)
    totals, slo, times = result.totals, question.slo, result.times
    num_failed, num_served, makespan = result.num_failed, len(times.arrival), result.makespan
    num_tokens, prices = int(times.num_tokens.sum()), question.prices
    groups = groups_of(deployment)
    engines = [group.engine for group in groups]
    parts = [
        ReplicasResult([each for each in result.replicas if each.group == group.name])
        for group in groups
    ]
    has_cache = any(engine.scheduling.has_prefix_cache for engine in engines)
    hits = totals.found_tokens / (totals.asked_tokens or 1)
    goodput, classes, tails = None, dict[str, ClassOutcome](), dict[str, float | None]()
    if slo is not None:
        goodput, classes, tails = kept(slo, result, question.asked)
    ticks = [step_time_of(engine.profile).ticks for engine in engines]
    cost = None
    if prices is not None:
        profiles = [engine.profile for engine in engines]
        cost = cost_of(zip(profiles, parts, strict=True), prices, makespan, num_tokens)
    return Outcome(
        served=num_served,
        failed=num_failed - result.refused.total(),
        refused=result.refused.total(),
        steps=totals.num_steps,
        makespan=_rounded(makespan),
        requests_per_s=_rounded(num_served / makespan) if makespan else 0.0,
        tokens_per_s=_rounded(num_tokens / makespan) if makespan else 0.0,
        latencies=latencies_of(times),
        goodput=goodput,
        classes=classes,
        slots_used=_rounded(result.share_used("num_slots", totals.slot_steps) or 0.0),
        kv_used=_rounded_if(result.share_used("num_blocks", totals.block_steps)),
        budget_used=_rounded_if(result.share_used("max_batch_tokens", totals.computed_tokens)),
        preemptions=totals.num_preemptions,
        recomputed_tokens=totals.recomputed_tokens,
        prefix_hits=_rounded(hits) if has_cache else None,
        tails=tails,
        drafts=_draft_use(totals),
        binding=binding_of(result, [*zip(parts, ticks, strict=True)]),
        fleet=fleet_use_of(result),
        groups=None if deployment.fleet is None else uses_of(result, groups, parts),
        cost=cost,
    )


def _draft_use(totals: SimulationTotals) -> DraftUse | None:
    if not totals.num_drafts:
        return None
    num_ticks = sum(totals.binding_ticks.values())
    return DraftUse(
        verified=totals.num_drafts,
        accepted=totals.num_accepted,
        acceptance=_rounded(totals.num_accepted / totals.num_drafts),
        tokens_per_step=_rounded(1 + totals.num_accepted / totals.num_draft_rows),
        making=_rounded(totals.draft_ticks / num_ticks),
    )


def times_of(outcome: Outcome, name: str) -> Distribution | None:
    """Return the distribution of the times of a limit, named as in Slo.all_limits, or a metric."""
    of_class, _, metric = name.rpartition(":")
    latencies = outcome.latencies
    if outcome.classes:
        latencies = outcome.classes[of_class or OTHERS].latencies
    found: Distribution | None = getattr(latencies, metric)
    return found


def good_share(outcome: Outcome) -> float:
    """Return the exact share of the requests that met the SLO, the least of all classes."""
    parts = [each.goodput for each in outcome.classes.values()]
    if not parts and outcome.goodput is not None:
        parts = [outcome.goodput]
    return min((part.good / part.requests for part in parts if part.requests), default=0.0)


def score_of(question: Question, outcome: Outcome) -> tuple[float, float]:
    """Return the share of the requests that met the SLO, and how near the worst tail is to it."""
    limits = {} if question.slo is None else question.slo.all_limits
    excesses = [
        inf if (tail := outcome.tails[metric]) is None else tail / limit
        for metric, limit in limits.items()
    ]
    return good_share(outcome), -max(excesses, default=0.0)


def problem_of(deployment: Deployment) -> str | None:
    """Return why the settings of `deployment` make no sense, None if they do."""
    for group in groups_of(deployment):
        problem = None
        try:
            check_settings(group.engine.batch, group.engine.scheduling)
        except BatchdecodeError as error:
            problem = str(error)
        if group.role == "decode" and group.engine.scheduling.kv_blocks is None:
            problem = "--kv-blocks is needed where requests decode"
        if problem is not None:
            return f"group {group.name}: {problem}" if group.name else problem
    return None


def _rounded(number: float) -> float:
    return round(number, NUM_DIGITS)


def _rounded_if(share: float | None) -> float | None:
    return None if share is None else round(share, NUM_DIGITS)


# What drafts gain: against the same without any, and from which batch on they do not any more.
#
# Rule: a gain is measured, by two simulations that differ in the drafts alone; what theory expects
# (Leviathan et al., "Fast Inference from Transformers via Speculative Decoding", 2023) stands
# beside it, and knows neither what verifying costs nor that requests wait.

_NEEDED_BY = ("draft_acceptance", "draft_cost")


class Gain(Struct, frozen=True, kw_only=True):
    """The gain of drafts in a deployment.

    tokens_per_s, without: measured with and without drafts; speedup: their quotient.  expected,
    simple: by the formulas (1-a^(k+1))/((1-a)(1+ck)) and ka/(1+c).  off_from: the least batch
    tried, each twice the one before, from which on drafts gain nothing; None if all gain.
    """

    tokens_per_s: float
    without: float
    speedup: float
    expected: float
    simple: float
    off_from: int | None


def without_drafts(deployment: Deployment) -> Deployment:
    return replace(deployment, draft_tokens=None, draft_acceptance=0.0, draft_cost=0.0)


def beside_none(values: Sequence[Value]) -> list[Value]:
    """Return numbers of draft tokens with none before them, for comparison."""
    return [*values] if None in values else [None, *values]


def check_drafts(given: Collection[str], alternatives: Iterable[Deployment]) -> None:
    """Raise a BatchdecodeError if an option of drafts has no effect or is missing."""
    has_drafts = any(each.draft_tokens is not None for each in alternatives)
    for name in _NEEDED_BY:
        if name in given and not has_drafts:
            option = AXES[name].option
            raise BatchdecodeError(f"{option} has no effect without --draft-tokens of at least 1")
    if has_drafts and "draft_acceptance" not in given:
        raise BatchdecodeError(
            "--draft-tokens needs --draft-acceptance, the share of drafts that are accepted"
        )


def speedups(cells: Sequence[tuple[Deployment, Outcome | None]]) -> list[float | None]:
    """Return the speedup of each cell over the same without drafts, None where unknown."""
    base: dict[Deployment, float] = {}
    for deployment, outcome in cells:
        if deployment.draft_tokens is None and outcome is not None:
            base[without_drafts(deployment)] = outcome.tokens_per_s
    found: list[float | None] = []
    for deployment, outcome in cells:
        without = base.get(without_drafts(deployment), 0.0)
        is_known = deployment.draft_tokens is not None and without > 0
        found.append(outcome.tokens_per_s / without if is_known and outcome is not None else None)
    return found


def off_from(gains: Iterable[tuple[int, float]]) -> int | None:
    """Return the least batch from which on no speedup is above 1; gains: (batch, speedup)."""
    least = None
    for batch, speedup in sorted(gains, reverse=True):
        if speedup > 1:
            break
        least = batch
    return least


def gain_of(
    deployment: Deployment, most_slots: int, tokens_per_s: Callable[[Deployment], float]
) -> Gain | None:
    """Return the gain of drafts in `deployment`, None without drafts or tokens, or for fleet files.

    most_slots: how many are of any use.  tokens_per_s: measures a deployment.
    """
    drafts = deployment.drafts
    if drafts is None or deployment.fleet is not None:
        return None

    def measured(batch: int) -> tuple[float, float]:
        sized = AXES["batch"].set(deployment, batch)
        return tokens_per_s(sized), tokens_per_s(without_drafts(sized))

    own = measured(deployment.batch)
    if not own[1]:
        return None
    gains = [(deployment.batch, own[0] / own[1])]
    batch, budget = deployment.batch, deployment.scheduling.max_batch_tokens
    most = min(most_slots, MAX_BATCH, MAX_BATCH if budget is None else budget)
    while gains[-1][1] > 1 and batch < most:
        batch = min(2 * batch, most)
        with_drafts, without = measured(batch)
        gains.append((batch, with_drafts / without if without else 1.0))
    terms = (drafts.acceptance, drafts.num_tokens, drafts.cost)
    return Gain(
        tokens_per_s=own[0],
        without=own[1],
        speedup=own[0] / own[1],
        expected=expected_speedup(*terms),
        simple=simple_return(*terms),
        off_from=off_from(gains),
    )
