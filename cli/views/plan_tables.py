"""A comparison as a table, CSV or JSON, and the lines of a plan."""

import csv
import io
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import takewhile
from math import inf

import msgspec

from batcher.metrics.slo import OTHERS
from batcher.planning.compare import GridCell, settings_of, varied
from batcher.planning.deployments import (
    AXES,
    Axis,
    Deployment,
    FleetFile,
    Value,
    engines_of,
    show_value,
)
from batcher.planning.measure import Cost, FleetUse, Outcome
from batcher.planning.plan import Plan, Relief, Searched

from ..screen.terminal import (
    aligned,
    cell_width,
    counted,
    cut_middle,
    cut_path,
    fill,
    listed,
    number,
    printable,
    whole_percent,
    wrapped,
)
from .plan_columns import COLUMNS, Column, class_columns, good_percent, time_text

TABLE = [name for name in COLUMNS if name not in {"requests", "queue-p50", "queue-p99"}]
LEAST_WANTED = (  # columns to leave out of narrow tables, in this order
    *("hits", "slots", "budget", "e2e-p50", "tpot-p50", "kv", "ttft-p50", "preemptions"),
    *("e2e-p99", "energy", "lost", "price", "mean-replicas"),
)
SHORT_SETTINGS = (32, 28, 24, 20, 16, 12)  # widths of settings in tables that are still too wide
ONLY_IF_NOT_0 = {"preemptions", "lost", "refused", "failed"}
BINDS = {
    "slots": "slots",
    "kv": "KV",
    "tokens": "token budget",
    "static": "static batch",
    "threshold": "prefill threshold",
    "compute": "compute",
    "arrivals": "arrivals",
}
WAITS = {
    "tokens": "waiting for the token budget",
    "static": "waiting for the static batch",
    "compute": "computing",
}
_REASONS = {
    "queue_full": "found the queue full",
    "max_wait": "waited longer than max_wait",
    "deadline": "waited until their deadline",
    "retries": "were lost too often",
    "router": "were refused by the router",
    "no_replica": "arrived while no replica served",
}
WIDTH, TITLE_WIDTH = 80, 11
MAX_SHOWN = 5  # contradictions, or reliefs


def best_first(cells: list[GridCell], column: Column) -> list[GridCell]:
    """Return `cells` with the best of a column first, unknown ones last."""

    def key(cell: GridCell) -> float:
        value = column.value_of(cell)
        return inf if value is None else -column.best * value

    return sorted(cells, key=key)


def is_in_steps(deployments: Iterable[Deployment]) -> bool:
    return all(each.profile == Deployment().profile for each in engines_of(deployments))


def table_of(cells: Sequence[GridCell], width: int | None = None, wanted: str = "") -> str:
    """Return a table with a row for each cell, and notes below it.

    width: of the terminal, None for any; columns that do not fit are left out, except `wanted`.
    """
    differing = varied(cell.deployment for cell in cells)
    has_files = any(cell.deployment.fleet is not None for cell in cells)
    names = differing or ["fleet" if has_files else "batch"]
    axes = [AXES[name] for name in AXES if name in names]
    has_steps = is_in_steps(cell.deployment for cell in cells)
    known = {name: COLUMNS[name].in_steps() if has_steps else COLUMNS[name] for name in TABLE}
    columns = [
        column
        for name in TABLE
        for column in (known[name], *(class_columns(cells) if name == "goodput" else ()))
        if _has_news(column, cells)
    ]
    lines = _rows(cells, axes, columns)
    spare = [name for name in LEAST_WANTED if name != wanted]
    without: list[str] = []
    while spare and width is not None and max(map(cell_width, lines)) > width:
        name = spare.pop(0)
        if known[name] in columns:
            columns.remove(known[name])
            without.append(name)
            lines = _rows(cells, axes, columns)
    named = [AXES[name] for name in AXES if name in differing]
    lines = _fitting(lines, width, lambda cut: _rows(cells, axes, columns, cut))
    lines += _fitting(_group_rows(cells, named), width, lambda cut: _group_rows(cells, named, cut))
    notes = list(dict.fromkeys(note for cell in cells for note in _notes(cell)))
    notes += refusals_of(cells, named)
    notes += dict.fromkeys(_where_drafts_gain(cells, axes))
    costs = [cell.outcome.cost for cell in cells if cell.outcome and cell.outcome.cost]
    notes += [sources_text(costs)] * bool(costs)
    if without:
        notes.insert(0, f"hidden: {listed(without, 'and')}; a pipe, --csv and --json show all")
    if width is not None:
        notes = [line for note in notes for line in wrapped(note, width)]
    return "".join(f"{line}\n" for line in [*lines, *notes])


def _fitting(lines: list[str], width: int | None, draw: Callable[[int], list[str]]) -> list[str]:
    """Return lines of a table, redrawn with shorter settings while it is too wide."""
    for cut in SHORT_SETTINGS:
        if width is None or max(map(cell_width, lines), default=0) <= width:
            break
        lines = draw(cut)
    return lines


def _rows(
    cells: Sequence[GridCell],
    axes: Sequence[Axis],
    columns: Sequence[Column],
    cut: int | None = None,
) -> list[str]:
    before = [None, *(column.group for column in columns)]
    groups = [
        "" if column.group == last else column.group
        for column, last in zip(columns, before, strict=False)
    ]
    rows = [
        [*("" for _ in axes), *groups, "", ""],
        [*(axis.title for axis in axes), *(column.title for column in columns), "time", ""],
    ]
    for cell in cells:
        numbers = [column.text_of(cell) for column in columns]
        binding, knee = "-", "knee" if cell.is_knee else ""
        if cell.outcome is not None:
            bound = cell.outcome.binding
            binding = f"{BINDS[bound.constraint]} {whole_percent(bound.share)}"
        rows.append([*_settings(cell, axes, cut), *numbers, binding, knee])
    return aligned(rows, range(len(axes) + len(columns)))


def _group_rows(
    cells: Sequence[GridCell], axes: Sequence[Axis], cut: int | None = None
) -> list[str]:
    """Return the table of the groups of fleets, [] without groups."""
    uses = [(cell, use) for cell in cells for use in (cell.outcome and cell.outcome.groups) or ()]
    has_gone = any(use.replicas != use.most_replicas for _, use in uses)
    counted_as = ["at once", "started"] if has_gone else ["replicas"]
    head = [*(axis.title for axis in axes), "group", *counted_as]
    head += ["outputs", "busy", "slots", "KV"]
    rows = []
    for cell, use in uses:
        kv_used = "-" if use.kv_used is None else whole_percent(use.kv_used)
        shares = [whole_percent(use.busy), whole_percent(use.slots_used), kv_used]
        counts = [f"{use.most_replicas:,}", f"{use.replicas:,}"][: len(counted_as)]
        group = [printable(use.name), *counts, f"{use.served:,}"]
        rows.append([*_settings(cell, axes, cut), *group, *shares])
    return ["", *aligned([head, *rows], range(len(head)))] if rows else []


def _settings(cell: GridCell, axes: Sequence[Axis], cut: int | None) -> list[str]:
    values = [printable(show_value(axis, axis.value_of(cell.deployment))) for axis in axes]
    if cut is None:
        return values
    return [
        cut_path(value, cut, "~") if axis is AXES["fleet"] else cut_middle(value, cut, "~")
        for axis, value in zip(axes, values, strict=True)
    ]


def csv_of(cells: Sequence[GridCell]) -> str:
    """Return a row for each cell with all settings and numbers, exactly as in JSON."""
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    columns = [*COLUMNS.values(), *class_columns(cells)]
    names = [column.name.replace("-", "_") for column in columns]
    writer.writerow([*AXES, *names, "binding", "binding_share", "is_knee", "problem"])
    for cell in cells:
        settings = [show_value(axis, axis.value_of(cell.deployment)) for axis in AXES.values()]
        numbers = [column.value_of(cell) for column in columns]
        binding = None if cell.outcome is None else cell.outcome.binding
        found = ("", "") if binding is None else (binding.constraint, binding.share)
        writer.writerow([*settings, *numbers, *found, str(cell.is_knee).lower(), cell.problem])
    return file.getvalue()


def json_of(cells: Sequence[GridCell]) -> str:
    return "".join(
        msgspec.json.encode(
            {
                "settings": settings_of(cell.deployment),
                "problem": cell.problem,
                "is_knee": cell.is_knee,
                "speedup": cell.speedup,
                "outcome": cell.outcome,
            }
        ).decode()
        + "\n"
        for cell in cells
    )


def _has_news(column: Column, cells: Sequence[GridCell]) -> bool:
    values = [column.value_of(cell) for cell in cells]
    if column.name in ONLY_IF_NOT_0:
        return any(values)
    return any(value is not None for value in values)


def _notes(cell: GridCell) -> Iterator[str]:
    if cell.problem is not None:
        yield f"invalid: {cell.problem}"
    outcome, scheduling = cell.outcome, cell.deployment.scheduling
    if outcome is not None and outcome.failed:
        total = outcome.served + outcome.failed
        blocks = counted(scheduling.kv_blocks or 0, "block")
        blocks += f" of {counted(scheduling.block_size, 'token')}"
        if cell.deployment.fleet is not None:
            blocks = "the blocks of their replica"
        failed = f"failed: {outcome.failed:,} of {counted(total, 'output')}"
        yield f"{failed} can never run, as they do not fit into {blocks}"


def cost_text(cost: Cost) -> list[str]:
    parts = [f"{counted(cost.gpus, 'GPU')} for ${number(cost.dollars_per_hour)} an hour"]
    if cost.dollars_per_million_tokens is not None:
        parts.append(f"${number(cost.dollars_per_million_tokens)} a million output tokens")
    if cost.kwh_per_million_tokens is not None:
        parts.append(f"{number(cost.kwh_per_million_tokens)} kWh a million")
    return [*parts, sources_text([cost])]


def sources_text(costs: Sequence[Cost]) -> str:
    sources = dict.fromkeys(source for cost in costs for source in cost.price_sources)
    return f"source of the prices: {', '.join(map(printable, sources))}"


def _where_drafts_gain(cells: Sequence[GridCell], axes: Sequence[Axis]) -> Iterator[str]:
    """Yield for each family of batches from which batch on no draft gains anything."""
    batch = AXES["batch"]
    families: dict[Deployment, list[tuple[int, float]]] = {}
    for cell in cells:
        if cell.speedup is not None:
            family = families.setdefault(batch.set(cell.deployment, 1), [])
            family.append((cell.deployment.batch, cell.speedup))
    for deployment, gains in families.items():
        useless = list(takewhile(lambda gain: gain[1] <= 1, sorted(gains, reverse=True)))
        verdict = "worth it at the largest batch as well"
        if useless:
            least = useless[-1][0]
            verdict = "never worth it" if least == min(gains)[0] else f"off from batch {least:,} on"
        yield f"{_described(deployment, [axis for axis in axes if axis is not batch])}: {verdict}"


def _described(deployment: Deployment, axes: Sequence[Axis]) -> str:
    values = (f"{axis.title} {show_value(axis, axis.value_of(deployment))}" for axis in axes)
    return printable(", ".join(values))


def _failures(use: FleetUse, fleet: FleetFile | None) -> list[str]:
    management = None if fleet is None else fleet.management
    if management is None or management.failures is None:
        return []
    if not use.failures:
        return ["none during the run"]
    return [f"{counted(use.failures, 'replica')} failed", f"{counted(use.lost, 'request')} lost"]


def _refusals(use: FleetUse) -> list[str]:
    refusals = use.refusals
    return [f"{refusals[name]:,} {words}" for name, words in _REASONS.items() if name in refusals]


def refusals_of(cells: Sequence[GridCell], axes: Sequence[Axis]) -> Iterator[str]:
    """Yield why requests were refused in each cell; axes: on which the cells differ."""
    for cell in cells:
        use = None if cell.outcome is None else cell.outcome.fleet
        if use is not None and use.refusals:
            name = f"{_described(cell.deployment, axes)}: " * bool(axes)
            yield f"{name}refused: {', '.join(_refusals(use))}"


def headline(plan: Plan) -> str:
    """Return the first line of a plan, which does not depend on reliefs."""
    best_value = named(plan.searched, plan.value)
    asked = f"{plan.asked * 100:g}%" + " of each class" * bool(plan.outcome.classes)
    if plan.is_met:
        best = "largest" if plan.searched == "rate" else "smallest"
        of_all = f"{listed(_reached(plan.outcome), 'and')} do (target: {asked})"
        return f"{best_value} is the {best} that meets the SLO: {of_all}"
    low, high = sorted((plan.trials[0].value, plan.trials[-1].value))
    searched, short = plan.searched.replace("_", "-"), partial(_short, plan.searched)
    num_outputs = 0 if plan.outcome.goodput is None else plan.outcome.goodput.requests
    nearest = f"the nearest is {best_value}, with {good_percent(plan.outcome.good_share)}"
    if not plan.outcome.good_share and not plan.outcome.classes:
        nearest = f"no tried value meets it for any output, and {best_value} comes closest"
    return (
        f"no {searched} from {short(low)} to {short(high)} meets the SLO for {asked} of "
        f"{counted(num_outputs, 'output')}; {nearest}"
    )


def details(plan: Plan) -> list[str]:
    rows = list(_details(plan))
    width = max(TITLE_WIDTH, *(len(title) + 1 for title, _ in rows))
    lines = []
    for title, parts in rows:
        texts = fill([f"{part}," for part in parts[:-1]] + parts[-1:], " ", WIDTH - width - 2)
        heads = [title, *("" for _ in texts[1:])]
        lines += [f"  {head:<{width}}{text}" for head, text in zip(heads, texts, strict=True)]
    return lines


def _details(plan: Plan) -> Iterator[tuple[str, list[str]]]:
    """Yield titles, each with the parts of its text, to be joined by commas."""
    outcome, short = plan.outcome, partial(_short, plan.searched)
    if plan.searched == "rate" and plan.file_rate is not None:
        rate = number(plan.file_rate * plan.value)
        unit = "step" if is_in_steps([plan.deployment]) else "s"
        yield "rate", [f"{rate} requests/{unit}", f"{number(plan.file_rate)} at 1x"]
    classes: dict[str, list[str]] = {}
    for name, limit in plan.limits.items():
        of_class, _, metric = name.rpartition(":")
        headroom = _headroom(plan, metric, outcome.tails[name], limit)
        if of_class:
            classes.setdefault(of_class, []).append(f"{metric} {headroom}")
        else:
            yield metric, [headroom]
    yield from classes.items()
    if outcome.failed:
        yield "failed", [f"{counted(outcome.failed, 'output')} can never run: too few blocks"]
    if outcome.fleet is not None:
        if failures := _failures(outcome.fleet, plan.deployment.fleet):
            yield "failures", failures
        if refusals := _refusals(outcome.fleet):
            yield "refused", refusals
    if plan.is_met and plan.next_outcome is None:
        yield "next", ["nothing further was tried"]
    elif plan.is_met and plan.next_outcome is not None:
        goodput = plan.next_outcome.goodput
        missed = {} if goodput is None else goodput.missed
        share = good_percent(plan.next_outcome.good_share)
        reached = f"{named(plan.searched, plan.next_value)} reaches {share}"
        yield "next", [reached, *(f"{count:,} miss {name}" for name, count in missed.items())]
    yield from _relief(plan)
    for use in outcome.groups or ():
        name = f"{printable(use.name)} ({counted(use.most_replicas, 'replica')})"
        parts = [f"{name} busy {whole_percent(use.busy)}", f"slots {whole_percent(use.slots_used)}"]
        parts += [] if use.kv_used is None else [f"KV {whole_percent(use.kv_used)}"]
        yield "group", [*parts, counted(use.served, "output")]
    if outcome.cost is not None:
        yield "cost", cost_text(outcome.cost)
    shares = sorted(outcome.binding.shares.items(), key=lambda item: -item[1])
    first, *others = [
        f"{whole_percent(share)} {WAITS.get(name, f'waiting for {BINDS[name]}')}"
        for name, share in shares
    ]
    yield "time", [f"at {named(plan.searched, plan.value)}: {first}", *others]
    if failing := [
        f"{short(trial.value)} ({good_percent(trial.share or 0.0)})"
        for trial in plan.contradictions
    ]:
        if len(failing) > MAX_SHOWN:
            failing = [*failing[:MAX_SHOWN], f"{len(failing) - MAX_SHOWN} more"]
        kind = "lower" if plan.searched == "rate" else "larger"
        yield "but", [f"not all {kind} ones meet it: {failing[0]}", *failing[1:]]
    yield "tried", [short(value) for value in sorted(trial.value for trial in plan.trials)]


def _relief(plan: Plan) -> Iterator[tuple[str, list[str]]]:
    """Yield what binds where the search ended, and the reliefs there, best first."""
    value = plan.next_value if plan.is_met else plan.value
    if value is None:  # all values tried are enough
        return
    place, short = named(plan.searched, value), partial(_short, plan.searched)
    there = plan.next_outcome or plan.outcome
    if plan.binding_classes:
        verb = "misses" if len(plan.binding_classes) == 1 else "miss"
        missing = f"{listed(plan.binding_classes, 'and')} {verb} at {place}"
        yield "class", [missing, *_reached(there)]
    better = [relief for relief in plan.reliefs if relief.share > there.good_share]
    reaching = [(relief.reached, relief) for relief in plan.reliefs if relief.reached is not None]
    if plan.binding:
        binds = f"{' and '.join(BINDS[limit] for limit in plan.binding)} at {place}"
        if plan.binding == ["compute"]:
            binds += ": no change helps enough" if better else ": no change of a limit helps"
        yield "binds", [binds]
    if reaching:
        reaching.sort(key=lambda found: found[0], reverse=plan.searched == "rate")
        yield (
            "helps",
            [
                f"{named(plan.searched, value)} ({abs(value / plan.value - 1):.0%} "
                f"{'less' if value < plan.value else 'more'} than {short(plan.value)}) "
                f"with {_option(relief)} {_value(relief)}"
                for value, relief in reaching
            ],
        )
    elif better and (not plan.is_met or plan.searched in ("rate", "replicas")):
        best = sorted(better, key=lambda relief: -relief.share)[:MAX_SHOWN]
        first, *others = [
            f"{good_percent(relief.share)} with {_option(relief)} {_value(relief)}"
            for relief in best
        ]
        yield "helps", [f"at {place} {first}", *others]
    helping = {_option(relief) for relief in [*better, *(relief for _, relief in reaching)]}
    useless: dict[str, list[str]] = {}
    for relief in plan.reliefs:
        if _option(relief) not in helping:
            useless.setdefault(_option(relief), []).append(_value(relief))
    if useless:
        yield "no help", [f"{option} {' or '.join(values)}" for option, values in useless.items()]


def _headroom(plan: Plan, metric: str, tail: float | None, limit: float) -> str:
    percentile = f"p{plan.asked * 100:g}"
    if tail is None:
        return f"{percentile} never: too few requests finish"
    in_steps = is_in_steps([plan.deployment])
    of_limit = " of ".join(time_text(metric, time, in_steps=in_steps) for time in (tail, limit))
    if tail > limit:
        return f"{percentile} {of_limit}, {number(tail / limit)} times too long"
    return f"{percentile} {of_limit}, headroom {whole_percent(1 - tail / limit)}"


def _reached(outcome: Outcome) -> list[str]:
    if not outcome.classes and outcome.goodput is not None:
        goodput = outcome.goodput
        return [f"{good_percent(goodput.share)} of {counted(goodput.requests, 'output')}"]
    reached = []
    for name, each in outcome.classes.items():
        outputs = f"{counted(each.goodput.requests, 'output')} of {name}"
        if name == OTHERS:
            outputs = f"{each.goodput.requests:,} {OTHERS}"
        reached.append(f"{good_percent(each.goodput.share)} of {outputs}")
    return reached


def _option(relief: Relief) -> str:
    return relief.setting.replace("_", "-")


def _value(relief: Relief) -> str:
    values = relief.value if isinstance(relief.value, list) else [relief.value]
    return "/".join(f"{value:,}" if isinstance(value, int) else str(value) for value in values)


def named(searched: Searched, value: Value) -> str:
    return f"{searched.replace('_', '-')} {_short(searched, value)}"


def _short(searched: Searched, value: Value) -> str:
    return f"{value:.3g}x" if searched == "rate" else f"{value:,}"
