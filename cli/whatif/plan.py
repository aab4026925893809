"""`batchdecode plan`, from its options to what is enough, what binds, and the headroom left."""

from collections.abc import Callable, Iterator
from operator import itemgetter
from typing import get_args

from msgspec.structs import replace

from batcher.errors import BatchdecodeError
from batcher.fleet.fleet_file import FleetFile
from batcher.metrics.slo import OTHERS, Goodput, parse_slos
from batcher.whatif.deployments import AXES, Deployment, Value, grid_of
from batcher.whatif.drafting import Gain
from batcher.whatif.limits import Limit
from batcher.whatif.measuring import Outcome, Question, good_share
from batcher.whatif.planning import OnTried, Plan, find_plan
from batcher.whatif.relief import Relief
from batcher.whatif.search import Searched
from batcher.whatif.spread import GroupUse

from ..commands.plan import PlanOptions
from ..printing import print_json, print_text
from ..screen.cells import counted, duration, fill, listed, number, printable, whole_percent
from .columns import good_percent
from .plots.plot import check_plot, show_plot
from .plots.points import charts_of_plan
from .progress import seldom
from .reading import (
    check_classes,
    check_given,
    num_cores,
    priced,
    read_workload,
    say_of_engines,
)
from .tables import BINDS, cost_text, memory_of, spread_text

MET, NOT_MET = 0, 1
SEARCHED: dict[str, Searched] = {name.replace("_", "-"): name for name in get_args(Searched)}


def plan_requests(options: PlanOptions) -> int:
    """Carry out `batchdecode plan`; return its exit status.

    Raises:
        BatchdecodeError: the input or an option is not right.
        WriteError, BrokenPipeError: the output takes no more.
    """
    slo, searched = parse_slos(options.slo), SEARCHED[options.search]
    base, tried = _base_of(options, searched)
    if not options.goodput > 0:
        raise BatchdecodeError("--goodput 0 is met by anything: give more")
    prices = priced(options.prices, [tried])
    check_plot(options.plot, force=options.force, is_for_programs=options.json)
    workload = read_workload(options)
    check_classes(slo, workload)
    if not options.quiet:
        say_of_engines([tried], options.slo)
    question = Question(workload, slo, options.goodput, prices)
    on_tried, on_relief = _progress(searched, quiet=options.quiet)
    num_jobs = options.jobs or num_cores()
    plan = find_plan(
        question,
        base,
        searched,
        on_tried,
        on_relief,
        (lambda _: None) if options.json else (lambda found: print_text(f"{headline(found)}\n")),
        num_jobs=num_jobs,
    )
    if options.json:
        print_json(plan)
    else:
        print_text("".join(f"{line}\n" for line in details(plan)))
    if options.plot is not None:
        show_plot(options.plot, charts_of_plan(plan), options.color)
    return MET if plan.is_met else NOT_MET


def _progress(searched: Searched, *, quiet: bool) -> tuple[OnTried, Callable[[int], object]]:
    """Return what shows which value is tried after how many, and how many changes of them."""
    if quiet:
        return lambda _done, _value: None, lambda _: None

    def trying(num_tried: int, value: Value) -> str:
        return f"trying {_named(searched, value)}, {counted(num_tried, 'value')} tried before"

    relief = "looking for what would help: "
    return seldom(trying), seldom(lambda done: f"{relief}{counted(done, 'simulation')} so far")


def _base_of(options: PlanOptions, searched: Searched) -> tuple[Deployment, Deployment]:
    """Return the deployment that all values are tried in, and the same with the least of them.

    Raises:
        BatchdecodeError: an option lists several values, is what is searched, or has no effect.
    """
    axes = dict(options.axes)
    if searched in options.preset:
        axes.pop(searched, None)  # what it was set for are other commands, too
    values = {}
    for name, text in axes.items():
        axis = AXES[name]
        if name == searched:
            found = f"--search {name.replace('_', '-')}"
            raise BatchdecodeError(f"{axis.option} is what {found} finds: leave it out")
        values[name] = axis.values(text)
        if len(values[name]) > 1:
            raise BatchdecodeError(f"{axis.option} {text}: a plan takes one value, compare several")
    (base,) = grid_of(values, Deployment())
    tried = AXES[searched].set(base, 1) if searched in AXES and base.fleet is None else base
    if base.fleet is not None:
        _check_search_of(base.fleet, options.search)
    is_fleet = searched == "replicas" and base.fleet is None
    check_given(axes.keys() - options.preset, [replace(tried, replicas=2) if is_fleet else tried])
    return base, tried


def _check_search_of(fleet: FleetFile, search: str) -> None:
    """Make sure that it can be searched for in a fleet from a file.

    Raises:
        BatchdecodeError: it cannot.
    """
    if search not in ("rate", "replicas"):
        raise BatchdecodeError(
            f"--search {search}: of a fleet from a file the fewest replicas or the largest rate "
            "can be searched: --search replicas or --search rate"
        )
    if search == "replicas" and fleet.management is not None and fleet.management.autoscale:
        raise BatchdecodeError(f"--search replicas: how many {fleet} has is said by its autoscale")


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
    named = _named(plan.searched, plan.value)
    reached = good_percent(good_share(plan.outcome))
    requests = 0 if plan.outcome.goodput is None else plan.outcome.goodput.requests
    asked = f"{plan.asked * 100:g}%" + " of each class" * bool(plan.outcome.classes)
    if plan.is_met:
        best = "largest" if plan.searched == "rate" else "smallest"
        of_all = f"{listed(_reached(plan.outcome), 'and')} do, {asked} is asked"
        return f"{named} is the {best} that meets the SLO: {of_all}"
    low, high = sorted((plan.trials[0].value, plan.trials[-1].value))
    tried = f"no {_name(plan)} from {_short(plan, low)} to {_short(plan, high)}"
    of_all = f"for {asked} of {counted(requests, 'request')}"
    return f"{tried} meets the SLO {of_all}; the nearest is {named}, with {reached}"


def _details(plan: Plan) -> Iterator[tuple[str, list[str]]]:
    """Yield titles, each with the parts of its text, which have commas between them."""
    if plan.searched == "rate" and plan.file_rate is not None:
        rate = number(plan.file_rate * plan.value)
        yield "rate", [f"{rate} requests/s", f"{number(plan.file_rate)} in the file"]
    yield from _headrooms(plan)
    if plan.outcome.failed:
        yield "failed", [f"{counted(plan.outcome.failed, 'request')} can never run: too few blocks"]
    if plan.is_met:
        yield "next", _next(plan)
    told = {
        "class": _binding_classes(plan),
        "binding": _binding(plan),
        "helps": _helps(plan),
        "no help": _useless(plan),
    }
    yield from filter(itemgetter(1), told.items())
    if plan.gain is not None:
        yield "drafts", _drafts(plan.deployment, plan.gain)
    if plan.outcome.replicas is not None:
        yield "busy", spread_text(plan.outcome.replicas)
    for use in plan.outcome.groups or ():
        yield "group", _group(use)
    if plan.outcome.cost is not None:
        yield "cost", cost_text(plan.outcome.cost)
    shares = sorted(plan.outcome.binding.shares.items(), key=lambda item: -item[1])
    yield "time", [f"{BINDS[name]} {whole_percent(share)}" for name, share in shares]
    if plan.contradictions:
        yield "but", _contradictions(plan)
    yield "tried", [_short(plan, value) for value in sorted(trial.value for trial in plan.trials)]


def _group(use: GroupUse) -> list[str]:
    """Return what the replicas of a group did."""
    name = f"{printable(use.name)} ({counted(use.most_replicas, 'replica')})"
    parts = [f"{name} busy {whole_percent(use.busy)}", f"slots {whole_percent(use.slots_used)}"]
    if use.kv_used is not None:
        parts.append(f"KV {whole_percent(use.kv_used)}")
    return [*parts, f"{counted(use.served, 'request')}"]


def _headrooms(plan: Plan) -> Iterator[tuple[str, list[str]]]:
    """Yield a limit of all, or a class, and how far the asked share of requests stays below it."""
    classes: dict[str, list[str]] = {}
    for name, limit in plan.limits.items():
        of_class, _, metric = name.rpartition(":")
        headroom = _headroom(plan, plan.outcome.tails[name], limit)
        if of_class:
            classes.setdefault(of_class, []).append(f"{metric} {headroom}")
        else:
            yield metric, [headroom]
    yield from classes.items()


def _headroom(plan: Plan, tail: float | None, limit: float) -> str:
    percentile = f"p{plan.asked * 100:g}"
    if tail is None:
        return f"{percentile} never: too few requests come to their end"
    of_limit = f"{percentile} {duration(tail)} of {duration(limit)}"
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
    whom = counted(goodput.requests, "request") + f" of {name}" * bool(name)
    if name == OTHERS:
        whom = f"{goodput.requests:,} {OTHERS}"
    return f"{good_percent(goodput.share)} of {whom}"


def _binding_classes(plan: Plan) -> list[str]:
    """Return which classes bind, if any does, and what all came to there."""
    if not plan.binding_classes:
        return []
    verb = "binds" if len(plan.binding_classes) == 1 else "bind"
    outcome = plan.next_outcome or plan.outcome
    return [f"{listed(plan.binding_classes, 'and')} {verb} at {_place(plan)}", *_reached(outcome)]


def _binding(plan: Plan) -> list[str]:
    """Return what binds, and what says so if it is no single change."""
    names = " and ".join(_BINDS[limit] for limit in plan.binding)
    if plan.removal is not None:
        limits = " and ".join(_LIMITS[limit] for limit in plan.removal.constraints)
        share = good_percent(plan.removal.share)
        return [f"{names}: {share} at {_place(plan)} without a limit of {limits}"]
    if plan.binding == ["compute"]:
        return [f"{names}: no change of a limit helps"]
    return [names] if names else []


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
    if plan.is_met and plan.searched != "rate":
        return []
    better = [relief for relief in plan.reliefs if relief.share > _share_there(plan)]
    better.sort(key=lambda relief: -relief.share)
    helps = [
        f"{good_percent(relief.share)} with {_setting(relief)}" for relief in better[:MAX_SHOWN]
    ]
    return [f"at {_place(plan)} {helps[0]}", *helps[1:]] if helps else []


def _useless(plan: Plan) -> list[str]:
    """Return the changes that let no more requests meet the SLO."""
    useless: dict[str, list[str]] = {}
    for relief in plan.reliefs:
        if relief.reached is None and relief.share <= _share_there(plan):
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
    if gain.memory is not None:
        parts.append(memory_of(deployment, gain.memory))
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


def _named(searched: Searched, value: Value) -> str:
    return f"{searched.replace('_', '-')} {_short_of(searched, value)}"


def _short(plan: Plan, value: Value) -> str:
    return _short_of(plan.searched, value)


def _short_of(searched: Searched, value: Value) -> str:
    return f"{value:.3g}x" if searched == "rate" else f"{value:,}"
