"""What `batchdecode plan` tells: a headline, and below it what binds, what would help and so on."""

from collections.abc import Iterator
from operator import itemgetter

from batcher.metrics.slo import OTHERS, Goodput
from batcher.planning.deployments import Deployment, Value
from batcher.planning.drafting import Gain
from batcher.planning.limits import Limit
from batcher.planning.measure import Outcome, good_share
from batcher.planning.plan import Plan
from batcher.planning.relief import Relief
from batcher.planning.search import Searched
from batcher.planning.spread import GroupUse

from ..screen.terminal import counted, fill, listed, number, printable, whole_percent
from .changes_text import failures_text, refusals_text
from .columns import good_percent, time_text
from .tables import BINDS, WAITS, cost_text, is_in_steps

WIDTH, TITLE_WIDTH = 80, 11
_LIMITS: dict[Limit, str] = {
    "slots": "slots",
    "kv": "blocks",
    "tokens": "tokens",
    "threshold": "prompt tokens",
    "static": "batches",
}
_BINDS = {**BINDS, "threshold": "prefill threshold"}
MAX_SHOWN = 5  # of what contradicts the assumption


def details(plan: Plan) -> list[str]:
    """Return the lines that tell of a plan, below its headline."""
    lines = []
    told = list(_details(plan))
    width = max(TITLE_WIDTH, *(len(title) + 1 for title, _ in told))
    for title, parts in told:
        texts = fill([f"{part}," for part in parts[:-1]] + parts[-1:], " ", WIDTH - width - 2)
        heads = [title, *("" for _ in texts[1:])]
        lines += [f"  {head:<{width}}{text}" for head, text in zip(heads, texts, strict=True)]
    return lines


def headline(plan: Plan) -> str:
    """Return what was found, which is known before it is what would help."""
    best_value = named(plan.searched, plan.value)
    reached = good_percent(good_share(plan.outcome))
    num_outputs = 0 if plan.outcome.goodput is None else plan.outcome.goodput.requests
    asked = f"{plan.asked * 100:g}%" + " of each class" * bool(plan.outcome.classes)
    if plan.is_met:
        best = "largest" if plan.searched == "rate" else "smallest"
        of_all = f"{listed(_reached(plan.outcome), 'and')} do, {asked} is asked"
        return f"{best_value} is the {best} that meets the SLO: {of_all}"
    low, high = sorted((plan.trials[0].value, plan.trials[-1].value))
    tried = f"no {_name(plan)} from {_short(plan, low)} to {_short(plan, high)}"
    of_all = f"for {asked} of {counted(num_outputs, 'output')}"
    return f"{tried} meets the SLO {of_all}; the nearest is {best_value}, with {reached}"


def _details(plan: Plan) -> Iterator[tuple[str, list[str]]]:
    """Yield titles, each with the parts of its text, which have commas between them."""
    if plan.searched == "rate" and plan.file_rate is not None:
        rate = number(plan.file_rate * plan.value)
        unit = "step" if is_in_steps([plan.deployment]) else "s"
        yield "rate", [f"{rate} requests/{unit}", f"{number(plan.file_rate)} at 1x"]
    yield from _headrooms(plan)
    if plan.outcome.failed:
        yield "failed", [f"{counted(plan.outcome.failed, 'output')} can never run: too few blocks"]
    yield from _changes(plan)
    if plan.is_met:
        yield "next", _next(plan)
    told = {
        "class": _binding_classes(plan),
        "binds": _binding(plan),
        "helps": _helps(plan),
        "no help": _useless(plan),
    }
    yield from filter(itemgetter(1), told.items())
    if plan.gain is not None:
        yield "drafts", _drafts(plan.deployment, plan.gain)
    for use in plan.outcome.groups or ():
        yield "group", _group(use)
    if plan.outcome.cost is not None:
        yield "cost", cost_text(plan.outcome.cost)
    shares = sorted(plan.outcome.binding.shares.items(), key=lambda item: -item[1])
    first, *others = [f"{whole_percent(share)} {WAITS[name]}" for name, share in shares]
    yield "time", [f"at {named(plan.searched, plan.value)}: {first}", *others]
    if plan.contradictions:
        yield "but", _contradictions(plan)
    yield "tried", [_short(plan, value) for value in sorted(trial.value for trial in plan.trials)]


def _changes(plan: Plan) -> Iterator[tuple[str, list[str]]]:
    """Yield what failed and what was refused, of a fleet that is managed."""
    use = plan.outcome.fleet
    if use is not None:
        told = {
            "failures": failures_text(use, plan.deployment.fleet),
            "refused": refusals_text(use),
        }
        yield from filter(itemgetter(1), told.items())


def _group(use: GroupUse) -> list[str]:
    """Return what the replicas of a group did."""
    name = f"{printable(use.name)} ({counted(use.most_replicas, 'replica')})"
    parts = [f"{name} busy {whole_percent(use.busy)}", f"slots {whole_percent(use.slots_used)}"]
    if use.kv_used is not None:
        parts.append(f"KV {whole_percent(use.kv_used)}")
    return [*parts, f"{counted(use.served, 'output')}"]


def _headrooms(plan: Plan) -> Iterator[tuple[str, list[str]]]:
    """Yield a limit of all, or a class, and how far the asked share of requests stays below it."""
    classes: dict[str, list[str]] = {}
    for name, limit in plan.limits.items():
        of_class, _, metric = name.rpartition(":")
        headroom = _headroom(plan, metric, plan.outcome.tails[name], limit)
        if of_class:
            classes.setdefault(of_class, []).append(f"{metric} {headroom}")
        else:
            yield metric, [headroom]
    yield from classes.items()


def _headroom(plan: Plan, metric: str, tail: float | None, limit: float) -> str:
    percentile = f"p{plan.asked * 100:g}"
    if tail is None:
        return f"{percentile} never: too few requests come to their end"
    in_steps = is_in_steps([plan.deployment])
    of_limit = " of ".join(time_text(metric, time, in_steps=in_steps) for time in (tail, limit))
    of_limit = f"{percentile} {of_limit}"
    if tail > limit:
        return f"{of_limit}, {number(tail / limit)} times too long"
    return f"{of_limit}, headroom {whole_percent(1 - tail / limit)}"


def _next(plan: Plan) -> list[str]:
    """Return how far the value after the one that was found is from being enough."""
    outcome = plan.next_outcome
    if outcome is None:
        return ["nothing further was tried"]
    missed = {} if outcome.goodput is None else outcome.goodput.missed
    share = good_percent(good_share(outcome))
    reached = f"{_name(plan)} {_short(plan, plan.next_value)} reaches {share}"
    return [reached, *(f"{count:,} miss {name}" for name, count in missed.items())]


def _reached(outcome: Outcome) -> list[str]:
    """Return which share of the requests, of each class, meet their SLO."""
    if outcome.goodput is not None and not outcome.classes:
        return [_share_of("", outcome.goodput)]
    return [_share_of(name, each.goodput) for name, each in outcome.classes.items()]


def _share_of(name: str, goodput: Goodput) -> str:
    """Return which share of a class meets its SLO; without a name it is all requests."""
    whom = counted(goodput.requests, "output") + f" of {name}" * bool(name)
    if name == OTHERS:
        whom = f"{goodput.requests:,} {OTHERS}"
    return f"{good_percent(goodput.share)} of {whom}"


def _binding_classes(plan: Plan) -> list[str]:
    """Return which classes miss their SLO, if any does, and what all came to there."""
    if not plan.binding_classes:
        return []
    verb = "misses" if len(plan.binding_classes) == 1 else "miss"
    outcome = plan.next_outcome or plan.outcome
    return [f"{listed(plan.binding_classes, 'and')} {verb} at {_place(plan)}", *_reached(outcome)]


def _binding(plan: Plan) -> list[str]:
    """Return what binds and where, and what says so if it is no single change."""
    if not plan.binding:
        return []
    binds = f"{' and '.join(_BINDS[limit] for limit in plan.binding)} at {_place(plan)}"
    if plan.removal is not None:
        limits = " and ".join(_LIMITS[limit] for limit in plan.removal.constraints)
        share = good_percent(plan.removal.share)
        return [f"{binds}: {share} without a limit of {limits}"]
    if plan.binding == ["compute"]:
        helps = any(each.share > _share_there(plan) for each in plan.reliefs)
        return [f"{binds}: {'what helps is not enough' if helps else 'no change of a limit helps'}"]
    return [binds]


def _helps(plan: Plan) -> list[str]:
    """Return how far each change reaches that does, best first; else what it is good for."""
    reaching = [(relief.reached, relief) for relief in plan.reliefs if relief.reached is not None]
    if reaching:
        reaching.sort(key=lambda found: found[0], reverse=plan.searched == "rate")
        return [
            f"{_name(plan)} {_short(plan, value)} ({value / plan.value - 1:+.0%}) "
            f"with {_setting(relief)}"
            for value, relief in reaching
        ]
    if plan.is_met and plan.searched not in ("rate", "replicas"):
        return []
    better = [relief for relief in plan.reliefs if relief.share > _share_there(plan)]
    better.sort(key=lambda relief: -relief.share)
    helps = [
        f"{good_percent(relief.share)} with {_setting(relief)}" for relief in better[:MAX_SHOWN]
    ]
    return [f"at {_place(plan)} {helps[0]}", *helps[1:]] if helps else []


def _useless(plan: Plan) -> list[str]:
    """Return the limits of which no change lets more requests meet the SLO, with what was tried."""
    useless: dict[str, list[str]] = {}
    helping = {
        _option(relief)
        for relief in plan.reliefs
        if relief.reached is not None or relief.share > _share_there(plan)
    }
    for relief in plan.reliefs:
        if _option(relief) not in helping:
            useless.setdefault(_option(relief), []).append(_value(relief))
    return [f"{option} {' or '.join(values)}" for option, values in useless.items()]


def _place(plan: Plan) -> str:
    """Return the value that it is asked of what would help there."""
    return f"{_name(plan)} {_short(plan, plan.next_value if plan.is_met else plan.value)}"


def _share_there(plan: Plan) -> float:
    """Return the share of the requests that meet the SLO there."""
    return good_share(plan.next_outcome or plan.outcome)


def _setting(relief: Relief) -> str:
    return f"{_option(relief)} {_value(relief)}"


def _option(relief: Relief) -> str:
    return relief.setting.replace("_", "-")


def _value(relief: Relief) -> str:
    values = relief.value if isinstance(relief.value, list) else [relief.value]
    return "/".join(f"{value:,}" if isinstance(value, int) else str(value) for value in values)


def _drafts(deployment: Deployment, gain: Gain) -> list[str]:
    """Return what drafts gain, what theory expects of them, and where they are to be left out."""
    speeds = f"{number(gain.tokens_per_s)} tokens/s with {deployment.draft_tokens}"
    parts = [
        f"{speeds} and {number(gain.without)} without: {gain.speedup:.3g}x",
        f"{gain.expected:.3g}x expected where verifying is free",
        f"return {gain.simple:.3g}",
    ]
    if gain.off_from is None:
        return [*parts, "worth it at all larger batches tried"]
    at_once = gain.off_from == deployment.batch
    return [*parts, "leave them out" if at_once else f"off from batch {gain.off_from:,} on"]


def _contradictions(plan: Plan) -> list[str]:
    """Return what was tried that should be enough, and is not."""
    failing = plan.contradictions
    shown = [f"{_short(plan, trial.value)} ({good_percent(trial.share)})" for trial in failing]
    if len(shown) > MAX_SHOWN:
        shown = [*shown[:MAX_SHOWN], f"{len(shown) - MAX_SHOWN} more"]
    kind = "lower" if plan.searched == "rate" else "larger"
    return [f"not all {kind} ones meet it: {shown[0]}", *shown[1:]]


def _name(plan: Plan) -> str:
    return plan.searched.replace("_", "-")


def named(searched: Searched, value: Value) -> str:
    """Return a value of what is searched, with its name."""
    return f"{searched.replace('_', '-')} {_short_of(searched, value)}"


def _short(plan: Plan, value: Value) -> str:
    return _short_of(plan.searched, value)


def _short_of(searched: Searched, value: Value) -> str:
    return f"{value:.3g}x" if searched == "rate" else f"{value:,}"
