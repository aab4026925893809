"""`batchdecode compare` and `batchdecode plan`: from options to tables, plots and a plan."""

import os
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, get_args

from msgspec.structs import replace

from batcher.engine import Engine
from batcher.errors import FIT_ERROR_CODES, BatchdecodeError
from batcher.garbage import look_seldom
from batcher.metrics.slo import Slo, class_name, parse_slos
from batcher.models.base import Model
from batcher.planning.compare import DEFAULT_GROWTH, compare
from batcher.planning.deployments import AXES, Deployment, Value, check_given, engines_of, grid_of
from batcher.planning.measure import Question, price_of, read_prices
from batcher.planning.plan import Plan, Searched, Trial, find_plan
from batcher.planning.workload import PREFIX as STREAMED
from batcher.planning.workload import AnyWorkload, has_exact_length, parse_streamed, workload_of
from batcher.request import Request

from .models import capabilities_of, load
from .run.files import print_json, print_text
from .run.input import open_input, read_requests
from .run.problems import progress_of, say, say_of_memory, say_of_slo, seldom
from .screen.terminal import columns_of, counted, unfinished_percent
from .signals import Interrupted, StopSignals, die_of_closed_pipe, user_code_prints_to_stderr
from .views.plan_columns import column_of, good_percent
from .views.plan_tables import best_first, csv_of, details, headline, json_of, named, table_of
from .views.plots import charts_of_cells, charts_of_plan, check_plot, show_plot

if TYPE_CHECKING:
    from .commands.plan import CompareOptions, PlanOptions

SEARCHED: dict[str, Searched] = {name.replace("_", "-"): name for name in get_args(Searched)}
LARGE_BATCH = 256  # to decode requests whose output lengths are unknown
_WITHOUT_OUTPUT = {*FIT_ERROR_CODES, "session-failed"}


def until_stopped(command: Callable[[], int]) -> int:
    """Return the exit status of `command`, or that of the signal that interrupted it."""
    look_seldom()
    with user_code_prints_to_stderr(), StopSignals() as stop:
        try:
            with stop.waiting():
                return command()
        except (Interrupted, KeyboardInterrupt):
            return stop.exit_status
        except BrokenPipeError:
            die_of_closed_pipe()


def compare_requests(options: "CompareOptions") -> int:
    slo = parse_slos(options.slo or [])
    values = {name: AXES[name].values(text) for name, text in options.axes.items()}
    if None not in values.get("draft_tokens", [None]):
        values["draft_tokens"] = [None, *values["draft_tokens"]]  # for comparison
    grid = grid_of(values, Deployment())
    check_given(options.axes.keys() - options.preset, grid)
    column = None if options.sort is None else column_of(options.sort)
    question = ask(options, slo, 1.0, grid)
    num_jobs = options.jobs or num_cores()
    with progress_of(len(grid), min(num_jobs, len(grid)), quiet=options.quiet) as on_done:
        cells = compare(
            question,
            grid,
            growth=DEFAULT_GROWTH if options.knee is None else options.knee,
            num_jobs=num_jobs,
            on_done=on_done,
        )
    if column is not None:
        cells = best_first(cells, column)
    if options.json or options.csv:
        print_text(json_of(cells) if options.json else csv_of(cells))
    else:
        width = columns_of(1)
        print_text(table_of(cells, width, options.sort or ""))
    if options.plot is not None:
        show_plot(options.plot, charts_of_cells(question, cells))
    outcomes = [cell.outcome for cell in cells if cell.outcome is not None]
    return 0 if any(outcome.served or not outcome.failed for outcome in outcomes) else 1


def plan_requests(options: "PlanOptions") -> int:
    slo, searched = parse_slos(options.slo), SEARCHED[options.search]
    base, tried = _base_of(options, searched)
    if not options.goodput > 0:
        raise BatchdecodeError("--goodput must be above 0")
    question = ask(options, slo, options.goodput, [tried])
    trials: list[Trial] = []
    found: Plan | None = None

    def show_headline(plan: Plan) -> None:
        nonlocal found
        found = plan
        if not options.json:
            print_text(f"{headline(plan)}\n")

    def show_details(plan: Plan) -> None:
        print_text("".join(f"{line}\n" for line in details(plan)))

    num_jobs = options.jobs or num_cores()
    progress = plan_progress(searched, quiet=options.quiet)
    try:
        plan = find_plan(
            question,
            base,
            searched,
            *progress,
            show_headline,
            trials.append,
            num_jobs=num_jobs,
            has_all_trials=options.json or options.plot is not None,
        )
    except KeyboardInterrupt:
        if found is not None and not options.json:
            show_details(found)
        if not options.quiet:
            stopped = "stopped before the search for reliefs ended\n"
            say(found_so_far(searched, options.goodput, trials) if found is None else stopped)
        raise
    if options.json:
        print_json(plan)
    else:
        show_details(plan)
    if options.plot is not None:
        show_plot(options.plot, charts_of_plan(plan))
    return 0 if plan.is_met else 1


def _base_of(options: "PlanOptions", searched: Searched) -> tuple[Deployment, Deployment]:
    """Return the deployment that a plan varies, and the same with the least value."""
    axes = dict(options.axes)
    if searched in options.preset:
        axes.pop(searched, None)  # the environment sets it for other commands
    values = {}
    for name, text in axes.items():
        axis = AXES[name]
        if name == searched:
            found = f"--search {options.search}"
            raise BatchdecodeError(f"remove {axis.option}: {found} finds it")
        values[name] = axis.values(text)
        if len(values[name]) > 1:
            raise BatchdecodeError(
                f"{axis.option} {text}: plan takes one value, compare takes several"
            )
    (base,) = grid_of(values, Deployment())
    tried = known_to_work = base
    if base.fleet is None:
        if searched in AXES:
            tried = known_to_work = AXES[searched].set(base, 1)
        if searched == "replicas":
            known_to_work = replace(tried, replicas=2)
    elif searched not in ("rate", "replicas"):
        raise BatchdecodeError(
            f"--search {options.search} does not work with --fleet: use --search replicas or "
            "--search rate"
        )
    elif searched == "replicas" and base.fleet.management and base.fleet.management.autoscale:
        raise BatchdecodeError(
            f"--search replicas does not work with the autoscale section of {base.fleet}"
        )
    check_given(axes.keys() - options.preset, [known_to_work])
    return base, tried


def plan_progress(
    searched: Searched, *, quiet: bool
) -> tuple[Callable[[int, Value, float], object], Callable[[float], object]]:
    """Return functions that show the value being tried, and the number of reliefs tried."""
    if quiet:
        return lambda _done, _value, _share: None, lambda _: None

    def trying(num_tried: int, value: Value, share: float) -> str:
        tried = counted(num_tried, "value")
        return f"tried {tried} and {unfinished_percent(share)} of {named(searched, value)}"

    def helping(done: float) -> str:
        count = counted(int(done), "simulation")
        share = f" and {unfinished_percent(done % 1)} of the next" if done % 1 else ""
        return f"looking for reliefs: {count}{share} so far"

    return seldom(trying), seldom(helping)


def found_so_far(searched: Searched, asked: float, trials: list[Trial]) -> str:
    """Return a line about an interrupted search: the values tried, and the best one."""
    if not trials:
        return "stopped before any value was tried\n"
    trials = sorted(trials, key=lambda trial: trial.value)
    shares = ["too few" if each.share is None else good_percent(each.share) for each in trials]
    tried = ", ".join(
        f"{named(searched, trial.value)} ({share})"
        for trial, share in zip(trials, shares, strict=True)
    )
    enough = [trial.value for trial in trials if (trial.share or 0.0) >= asked]
    best = "none meets the SLO so far"
    if enough:
        value, kind = (max(enough), "largest") if searched == "rate" else (min(enough), "smallest")
        best = f"{named(searched, value)} is the {kind} that meets the SLO so far"
    count = counted(len(trials), "value")
    return f"stopped after {count}: {best}; tried {tried}; target {asked * 100:g}%\n"


def read_workload(options: "CompareOptions | PlanOptions") -> AnyWorkload:
    """Return the workload of the requests, or the synthetic one of INPUT.

    Requests with unknown output lengths are decoded.
    """
    if options.input is not None and options.input.startswith(STREAMED):
        return parse_streamed(options.input)
    model = load(options, is_shown=not options.quiet)
    with open_input(options.input, nullcontext) as source:
        engine = Engine(model, LARGE_BATCH, grammar_timeout=options.grammar_timeout)
        what_now = "nothing was simulated."
        capabilities = capabilities_of(engine, options)
        requests = read_requests(source, capabilities, options.color, what_now)
        if not requests:
            raise BatchdecodeError(f"{source.name} has no requests")
    num_empty = sum(request.max_tokens == 0 for request in requests)
    if num_empty and not options.quiet:
        of_all = f"{counted(num_empty, 'request')} of {len(requests):,}"
        say(f"skipped: {of_all} with max_tokens 0\n")
    num_unknown = sum(not has_exact_length(request) for request in requests)
    if not num_unknown:
        return workload_of(requests, model)
    if not options.quiet:
        say(
            f"{counted(num_unknown, 'request')} of {len(requests):,} may end before max_tokens: "
            "decoding all requests once to find out\n"
        )
    return workload_of(requests, model, decoded_outputs(requests, model))


def decoded_outputs(
    requests: Sequence[Request], model: Model
) -> dict[tuple[int, int], Sequence[int]]:
    """Return the tokens of each sample, by place of the request and index of the sample.

    A request that does not fit into the context, and later turns of its session, have none.
    """
    engine = Engine(model, LARGE_BATCH)
    places: dict[str, int] = {}
    for place, request in enumerate(requests):
        # Without delays, and with a result for each sample.
        samples = {"n": request.best_of or request.n, "best_of": None}
        at_once = replace(request, arrival_time=0.0, think_time=0.0, deadline=None, **samples)
        places[engine.enqueue(at_once, input_index=place)] = place
    outputs: dict[tuple[int, int], Sequence[int]] = {}
    while engine.has_work:
        for result in engine.step().results:
            if result.error is not None and result.error.code not in _WITHOUT_OUTPUT:
                raise BatchdecodeError(
                    f"request {result.id!r}: the length of its output is unknown, as decoding it "
                    f"failed: {result.error.message}"
                )
            outputs[places[result.id], result.index] = result.token_ids
    return outputs


def ask(
    options: "CompareOptions | PlanOptions",
    slo: Slo | None,
    asked: float,
    grid: Sequence[Deployment],
) -> Question:
    """Return the question for the deployments of `grid`, after checks of prices and requests."""
    engines, prices = engines_of(grid), None
    if options.prices is not None:
        prices = read_prices(options.prices)
        for profile in dict.fromkeys(engine.profile for engine in engines):
            price_of(profile, prices)
    check_plot(options.plot, force=options.force)
    workload = read_workload(options)
    for priority in () if slo is None else slo.classes:
        if priority not in workload.priorities:
            name, known = class_name(priority), ", ".join(map(str, sorted(workload.priorities)))
            raise BatchdecodeError(f"--slo {name}: no request has this priority (found: {known})")
    if not options.quiet:
        say_of_memory((each.profile, each.scheduling) for each in engines)
        if options.slo and any(each.profile == Deployment().profile for each in engines):
            say("each step takes 1 second: set --profile for real durations\n")
        elif options.slo:
            say_of_slo(options.slo)
    return Question(workload, slo, asked, prices)


def num_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
