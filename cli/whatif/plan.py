"""`batchdecode plan`, from its options to what is enough, what binds, and the headroom left."""

from collections.abc import Callable
from typing import get_args

from msgspec.structs import replace

from batcher.errors import BatchdecodeError
from batcher.metrics.slo import parse_slos
from batcher.planning.deployments import AXES, Deployment, Value, grid_of
from batcher.planning.fleet_file import FleetFile
from batcher.planning.measure import Question
from batcher.planning.plan import OnTried, Plan, find_plan
from batcher.planning.search import Searched

from ..commands.plan import PlanOptions
from ..printing import print_json, print_text
from ..run.problems import say
from ..screen.terminal import counted, unfinished_percent
from .plan_text import details, headline, named
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
from .so_far import SoFar

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
    check_plot(options.plot, force=options.force)
    workload = read_workload(options)
    check_classes(slo, workload)
    if not options.quiet:
        say_of_engines([tried], options.slo)
    question = Question(workload, slo, options.goodput, prices)
    on_tried, on_relief = _progress(searched, quiet=options.quiet)
    num_jobs = options.jobs or num_cores()
    so_far = SoFar(searched, options.goodput, lambda value: named(searched, value))

    def tell_headline(found: Plan) -> None:
        if not options.json:
            print_text(f"{headline(found)}\n")
        so_far.found = found

    try:
        plan = find_plan(
            question,
            base,
            searched,
            on_tried,
            on_relief,
            tell_headline,
            so_far.add,
            num_jobs=num_jobs,
        )
    except KeyboardInterrupt:
        _tell_so_far(so_far, options)
        raise
    if options.json:
        print_json(plan)
    else:
        print_text("".join(f"{line}\n" for line in details(plan)))
    if options.plot is not None:
        show_plot(options.plot, charts_of_plan(plan))
    return MET if plan.is_met else NOT_MET


def _tell_so_far(so_far: SoFar, options: PlanOptions) -> None:
    """Tell what is known of a plan that is stopped."""
    found = so_far.found
    if found is None:
        remark = so_far.tell()
    else:
        remark = "stopped before it was known what would help\n"
        if not options.json:
            print_text("".join(f"{line}\n" for line in details(found)))
    if not options.quiet:
        say(remark)


def _progress(searched: Searched, *, quiet: bool) -> tuple[OnTried, Callable[[float], object]]:
    """Return what shows which value is tried after how many, and how many changes of them."""
    if quiet:
        return lambda _done, _value, _share: None, lambda _: None

    def trying(num_tried: int, value: Value, share: float) -> str:
        tried = counted(num_tried, "value")
        return f"tried {tried} and {unfinished_percent(share)} of {named(searched, value)}"

    def helping(done: float) -> str:
        count = counted(int(done), "simulation")
        share = f" and {unfinished_percent(done % 1)} of the next" if done % 1 else ""
        return f"looking for what would help: {count}{share} so far"

    return seldom(trying), seldom(helping)


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
