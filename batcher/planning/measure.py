"""What a deployment makes of a workload: one simulation, the numbers asked of it, and what binds.

Rule: the same workload and deployment give the same outcome, in whatever process.  The time from
the first arrival to the end is shared out among what was lacking, and the largest share binds;
docs/compare.md has the definition.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from fractions import Fraction
from math import ceil, inf
from typing import Any, Literal, get_args

import numpy as np
from msgspec import Struct

from batcher.errors import BatchdecodeError
from batcher.metrics.arrays import ServedTimes, goodput_of, latencies_of
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
from batcher.planning.disaggregated import DisaggregatedFleet
from batcher.planning.fleet import (
    PAID,
    Fleet,
    FleetResult,
    Life,
    ReplicaResult,
    ReplicaSettings,
    ReplicasResult,
    ReplicaState,
    Role,
    result_of_engine,
    timeline_of,
)
from batcher.planning.fleet_file import Management
from batcher.planning.managed_fleet import ManagedFleet
from batcher.planning.prices import Cost, Price, cost_of
from batcher.planning.routers import ROUTERS, router_of
from batcher.planning.simulated_sequence import Turns
from batcher.planning.simulator import OnEnded, Preempted, SimulationTotals, simulate
from batcher.planning.streamed import AnyWorkload, StreamedTurns
from batcher.planning.workers import OnPart
from batcher.planning.workload import Workload
from batcher.scheduling.scheduler import check_settings
from batcher.timing.profiles import step_time_of
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


class Question(Struct, frozen=True):
    """What is to be served, what is promised, and for which share of the requests.

    prices: of GPUs, by their names; None: it is not asked what it costs.
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

    Raises:
        BatchdecodeError: its settings make no sense.
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

    own, management = replicas[0], _management_of(deployment)
    if management is None and len(replicas) == 1 and isinstance(workload, Workload):
        slots, scheduling, step_time = own.num_slots, own.scheduling, own.step_time
        result = simulate(workload, slots, scheduling, step_time, on_ended, own.drafts)
        return result_of_engine(result, own)
    for_trial = _replicas_of_trial(deployment, replicas)
    if for_trial is not None and workload.shares_nothing:
        with suppress(Preempted):
            return _fleet_of(workload, deployment, for_trial, on_ended).run()
    return _fleet_of(workload, deployment, replicas, on_ended).run()


def _replicas_of_trial(
    deployment: Deployment, replicas: Sequence[ReplicaSettings]
) -> list[ReplicaSettings] | None:
    """Return them for a trial; None if that would not do, or gain nothing.

    A router of one's own is asked by no fleet that may be given up: it may count.
    """
    is_plain = _management_of(deployment) is None and transfer_of(deployment) is None
    if not is_plain or deployment.router not in ROUTERS:
        return None
    for_trial = [settings.of_trial for settings in replicas]
    found = [settings for settings in for_trial if settings is not None]
    return found if len(found) == len(replicas) else None


def _fleet_of(
    workload: AnyWorkload,
    deployment: Deployment,
    replicas: Sequence[ReplicaSettings],
    on_ended: OnEnded,
) -> Fleet:
    """Return a fleet that has done nothing yet."""
    router = router_of(deployment.router)
    turns = Turns(workload) if isinstance(workload, Workload) else StreamedTurns(workload)
    interval, transfer = deployment.report_interval, transfer_of(deployment)
    management = _management_of(deployment)
    if transfer is not None:
        return DisaggregatedFleet(
            turns,
            replicas,
            router,
            interval,
            on_ended,
            decode_router=router_of(deployment.router),
            transfer=transfer,
        )
    if management is None:
        return Fleet(turns, replicas, router, interval, on_ended)
    return ManagedFleet(turns, replicas, router, management, interval, on_ended)


def _management_of(deployment: Deployment) -> Management | None:
    return None if deployment.fleet is None else deployment.fleet.management


class ClassOutcome(Struct, frozen=True, kw_only=True):
    """What the requests of a class came to, all of which are promised the same."""

    latencies: Latencies
    goodput: Goodput


class Attainment(Struct, frozen=True, kw_only=True):
    """How an SLO was kept.

    goodput: of all classes together.  classes: of each, by its name; {} if the SLO has none.
    tails: for each limit, what the asked share of samples does not exceed; None if fewer were
    served.
    """

    goodput: Goodput
    classes: dict[str, ClassOutcome]
    tails: dict[str, float | None]


class _Class(Struct, frozen=True):
    """What a class was promised, and what of it was served; place: how its limits are told."""

    name: str
    place: str
    limits: dict[str, float]
    times: ServedTimes
    num_failed: int


def kept(slo: Slo, result: FleetResult, asked: float) -> Attainment:
    """Return how `slo` was kept; `asked`: for which share of the requests of a class it is."""
    makespan = result.times.makespan
    tails: dict[str, float | None] = {}
    classes: dict[str, ClassOutcome] = {}
    missed: dict[str, int] = {}
    requests = good = 0
    for each in _classes(slo, result):
        goodput = goodput_of(each.limits, each.times, each.num_failed, makespan)
        if slo.classes:
            classes[each.name] = ClassOutcome(latencies=latencies_of(each.times), goodput=goodput)
        for metric, tail in _tails(each, asked):
            tails[each.place + metric] = tail
        for reason, count in goodput.missed.items():
            missed[each.place + reason] = count
        requests += goodput.requests
        good += goodput.good
    whole = Goodput.of(slo.all_limits, requests, good, makespan, missed)
    return Attainment(goodput=whole, classes=classes, tails=tails)


def _classes(slo: Slo, result: FleetResult) -> Iterator[_Class]:
    """Yield the classes of an SLO: the others, if they are promised anything, and each of its own.

    Without any it is all requests.
    """
    if not slo.classes:
        yield _Class("", "", slo.limits, result.times, result.num_failed)
        return
    failed = result.failed
    if slo.limits:
        is_other = ~np.isin(result.priorities, list(slo.classes))
        num_failed = sum(count for priority, count in failed.items() if priority not in slo.classes)
        yield _Class(OTHERS, "", slo.limits, result.times.where(is_other), num_failed)
    for priority, own in slo.classes.items():
        name = class_name(priority)
        times = result.times.where(result.priorities == priority)
        yield _Class(name, f"{name}:", own.limits, times, failed[priority])


def _tails(each: _Class, asked: float) -> Iterator[tuple[str, float | None]]:
    """Yield for each limit the least time that the asked share of samples does not exceed."""
    num_served = len(each.times.arrival)
    rank = max(1, ceil(Fraction(str(asked)) * (num_served + each.num_failed)))
    for metric in each.limits:
        values = np.sort(each.times.values(metric))
        yield metric, int(values[rank - 1]) / MICROSECONDS if rank <= num_served else None


class GroupUse(Struct, frozen=True, kw_only=True):
    """What the replicas of a group did.

    replicas: all there ever were.  most_replicas: at once.  role, settings: of each.
    served, failed: samples; a prompt that goes on elsewhere counts as served.  busy: for which
    share of the time in which they were there they took steps.  slots_used, kv_used: shares over
    their steps, None without such a limit.
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

    failures: of replicas.  lost: how often a sample was lost with one.  replica_seconds: in which
    replicas were paid for, all but those that are down.  mean_replicas: that were, most_replicas:
    at once.  serving: for which share of these seconds they served.
    refusals: how many samples were refused for which reason, of those for which any was.
    timeline: a time, and how many serve and are paid for from then on.
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
        replica_seconds=round(seconds, NUM_DIGITS),
        mean_replicas=round(seconds / makespan, NUM_DIGITS) if makespan else 0.0,
        most_replicas=max(num_paid for _, _, num_paid in timeline),
        serving=round(serving / seconds, NUM_DIGITS) if seconds else 0.0,
        refusals={reason: count for reason, count in sorted(history.refusals.items()) if count},
        timeline=[(round(time, NUM_DIGITS), serve, paid) for time, serve, paid in timeline],
    )


def parts_of(result: FleetResult, groups: Sequence[EngineGroup]) -> list[ReplicasResult]:
    """Return what the replicas of each group did."""
    return [
        ReplicasResult([each for each in result.replicas if each.group == group.name])
        for group in groups
    ]


def uses_of(result: FleetResult, groups: Sequence[EngineGroup]) -> list[GroupUse]:
    """Return what the replicas of each group did."""
    most = _most_at_once(result, groups)
    return [
        GroupUse(
            name=group.name,
            replicas=len(part.replicas),
            role=group.role,
            settings={name: AXES[name].value_of(group.engine) for name in OF_ENGINE},
            served=sum(replica.num_served for replica in part.replicas),
            failed=sum(replica.failed.total() for replica in part.replicas),
            steps=part.totals.num_steps,
            busy=round(_share(part.busy_ticks, part.paid_seconds(result.makespan)), NUM_DIGITS),
            slots_used=round(part.slot_utilisation, NUM_DIGITS),
            kv_used=None if (used := part.kv_utilisation) is None else round(used, NUM_DIGITS),
            preemptions=part.totals.num_preemptions,
            most_replicas=most.get(group.name, len(part.replicas)),
        )
        for group, part in zip(groups, parts_of(result, groups), strict=True)
    ]


def _most_at_once(result: FleetResult, groups: Sequence[EngineGroup]) -> dict[str, int]:
    """Return how many replicas of each group there were at once, at most; {} if all always were."""
    if result.history is None:
        return {}
    lives: dict[str, list[Life]] = {group.name: [] for group in groups}
    for life, replica in zip(result.history.lives, result.replicas, strict=True):
        lives[replica.group].append(life)
    end = (result.first_arrival or 0.0) + result.makespan
    return {
        name: max((paid for _, _, paid in timeline_of(of_group, end)), default=0)
        for name, of_group in lives.items()
    }


def _share(ticks: int, seconds: float) -> float:
    return ticks / TICKS_PER_SECOND / seconds if seconds else 0.0


class Binding(Struct, frozen=True):
    """What binds, and how time is shared out.

    shares: of the time from the first arrival to the end, 1 together; of those above 0.
    doubling: by how much the tokens per second of the mean step would grow if it were twice as
    large, from 0 (its time doubles, too) to 1 (it takes no longer); the mean over the time in which
    steps were taken, if they are not the same for all replicas.
    """

    constraint: Constraint
    share: float
    shares: dict[Constraint, float]
    doubling: float


def binding_of(result: FleetResult, parts: Sequence[tuple[ReplicasResult, StepTicks]]) -> Binding:
    """Return what bound a simulated run; of a fleet, what did mostly.

    The time that is shared out is, for each replica, all from the first arrival to the end of all
    in which it was there.
    parts: of the replicas, those with the same step time together, and what tells that.
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
    drain = sum(map(_drain_of, replicas))
    total = round(result.paid_seconds(result.makespan) * TICKS_PER_SECOND)
    total = max(total, num_waiting_ticks + drain)
    ticks["compute"] += drain
    ticks["arrivals"] = total - num_waiting_ticks - drain
    shares = {name: round(part / total, NUM_DIGITS) for name, part in ticks.items() if part}
    constraint: Constraint = max(ticks, key=lambda name: ticks[name]) if total else "arrivals"
    return Binding(constraint, shares.get(constraint, 0.0), shares, round(doubling, NUM_DIGITS))


def _drain_of(replica: ReplicaResult) -> int:
    """Return how long a replica took after its last first admission, as far as nobody waited."""
    if replica.last_admission_ticks is None:
        return 0
    drain = replica.end_ticks - replica.last_admission_ticks
    return min(drain, replica.totals.binding_ticks["arrivals"])


def gain_of_doubling(result: ReplicasResult, ticks_of: StepTicks) -> float:
    """Return by how much a step twice as large as the mean one gives more tokens per second."""
    totals = result.totals
    num_steps = totals.num_steps
    if not num_steps:
        return 0.0
    num_rows = max(1, round(totals.slot_steps / num_steps))
    num_tokens = max(num_rows, round(totals.computed_tokens / num_steps))
    kv_read = round((result.kv_read - totals.unread_tokens) / num_steps)
    prefill_work = round((result.prefill_work + totals.draft_work) / num_steps)
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
    """What became of drafts.

    acceptance: the share of those verified that were accepted.  tokens_per_step: of a row, in the
    steps in which it had some.  making: the share of the time of all steps in which they were made.
    """

    verified: int
    accepted: int
    acceptance: float
    tokens_per_step: float
    making: float


class Outcome(Struct, frozen=True, kw_only=True):
    """What a deployment comes to; latencies and goodput as docs/metrics.md defines them.

    served, failed, refused: samples that came to their end, that could never run, and that the
    router refused.
    makespan: in seconds.  requests_per_s, tokens_per_s: served, and output tokens, over it.
    slots_used, kv_used, budget_used: shares over the steps, None without such a limit.
    prefix_hits: the share of prompt tokens found in blocks, None without a prefix cache.
    classes: of an SLO that has some, each by its name.
    tails: for each limit of the SLO, what the asked share of the samples that it is of does not
    exceed; None if fewer were served.
    drafts: None if none were verified.  fleet: None if it is not managed.  groups: of the replicas
    that a file states, None without one.  cost: None without prices.
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
    """Return what `deployment` makes of the workload of `question`.

    on_part: called with the share of the samples that have ended, again and again.

    Raises:
        BatchdecodeError: its settings make no sense.
    """
    return outcome_of(question, deployment, run(question.workload, deployment, on_part))


def outcome_of(question: Question, deployment: Deployment, result: FleetResult) -> Outcome:
    """Return the numbers that are asked of what `deployment` came to.

    Raises:
        BatchdecodeError: its GPUs have no price.
    """
    totals, slo, times = result.totals, question.slo, result.times
    num_failed, num_served, makespan = result.num_failed, len(times.arrival), result.makespan
    num_tokens, prices = int(times.num_tokens.sum()), question.prices
    groups = groups_of(deployment)
    profiles, parts = [group.engine.profile for group in groups], parts_of(result, groups)
    engines = [group.engine for group in groups]
    has_cache = any(engine.scheduling.has_prefix_cache for engine in engines)
    promise = None if slo is None else kept(slo, result, question.asked)
    return Outcome(
        served=num_served,
        failed=num_failed - result.refused.total(),
        refused=result.refused.total(),
        steps=totals.num_steps,
        makespan=round(makespan, NUM_DIGITS),
        requests_per_s=round(num_served / makespan, NUM_DIGITS) if makespan else 0.0,
        tokens_per_s=round(num_tokens / makespan, NUM_DIGITS) if makespan else 0.0,
        latencies=latencies_of(times),
        goodput=None if promise is None else promise.goodput,
        classes={} if promise is None else promise.classes,
        slots_used=round(result.slot_utilisation, NUM_DIGITS),
        kv_used=_rounded(result.kv_utilisation),
        budget_used=_rounded(result.budget_utilisation),
        preemptions=totals.num_preemptions,
        recomputed_tokens=totals.recomputed_tokens,
        prefix_hits=_rounded(result.hit_rate) if has_cache else None,
        tails={} if promise is None else promise.tails,
        drafts=_draft_use(totals),
        binding=binding_of(
            result,
            [
                (part, step_time_of(each.profile).ticks)
                for part, each in zip(parts, engines, strict=True)
            ],
        ),
        fleet=fleet_use_of(result),
        groups=None if deployment.fleet is None else uses_of(result, groups),
        cost=None
        if prices is None
        else cost_of(zip(profiles, parts, strict=True), prices, makespan, num_tokens),
    )


def _draft_use(totals: SimulationTotals) -> DraftUse | None:
    if not totals.num_drafts:
        return None
    num_ticks = sum(totals.binding_ticks.values())
    return DraftUse(
        verified=totals.num_drafts,
        accepted=totals.num_accepted,
        acceptance=round(totals.num_accepted / totals.num_drafts, NUM_DIGITS),
        tokens_per_step=round(1 + totals.num_accepted / totals.num_draft_rows, NUM_DIGITS),
        making=round(totals.draft_ticks / num_ticks, NUM_DIGITS),
    )


def times_of(outcome: Outcome, name: str) -> Distribution | None:
    """Return how the times of a limit of the SLO are distributed over the requests that it is of.

    name: as Slo.all_limits has it, or a metric.
    """
    of_class, _, metric = name.rpartition(":")
    latencies = outcome.latencies
    if outcome.classes:
        latencies = outcome.classes[of_class or OTHERS].latencies
    found: Distribution | None = getattr(latencies, metric)
    return found


def good_share(outcome: Outcome) -> float:
    """Return the share of the requests that met the SLO, as it is, not as it is shown.

    Of several classes it is that of the class with the least.
    """
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
        problem = _problem_of(group.engine)
        if group.role == "decode" and group.engine.scheduling.kv_blocks is None:
            problem = "--kv-blocks is needed where requests decode"
        if problem is not None:
            return f"group {group.name}: {problem}" if group.name else problem
    return None


def _problem_of(engine: Deployment) -> str | None:
    try:
        check_settings(engine.batch, engine.scheduling)
    except BatchdecodeError as error:
        return str(error)
    return None


def _rounded(share: float | None) -> float | None:
    return None if share is None else round(share, NUM_DIGITS)
