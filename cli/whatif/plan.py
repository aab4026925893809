"""`batchdecode plan`, from its options to what it tells."""

from collections.abc import Callable

import msgspec

from batcher.errors import BatchdecodeError
from batcher.scheduling.checks import check_effects
from batcher.whatif.deployments import AXES, Deployment, grid_of
from batcher.whatif.measuring import Question
from batcher.whatif.planning import find_plan

from ..screen.cells import counted
from .options import PlanOptions, RequestOptions
from .plan_text import describe
from .progress import Lines, Silence
from .reading import read_workload, say_of_memory, write_text

MET, NOT_MET = 0, 1


def plan_requests(source: RequestOptions, options: PlanOptions) -> int:
    """Carry out `batchdecode plan`; return its exit status.

    Raises:
        BatchdecodeError: the input or an option is not right.
        WriteError, BrokenPipeError: the output takes no more.
    """
    base, tried = _base_of(options)
    if not options.goodput > 0:
        raise BatchdecodeError("--goodput 0 is met by anything: give more")
    workload = read_workload(source, quiet=options.quiet)
    if not options.quiet:
        say_of_memory([tried])
    question = Question(workload, options.slo, options.goodput)
    on_tried, on_relief = _progress(quiet=options.quiet)
    plan = find_plan(question, base, options.search, on_tried, on_relief)
    if options.as_json:
        write_text(msgspec.json.format(msgspec.json.encode(plan)).decode() + "\n")
    else:
        write_text("".join(f"{line}\n" for line in describe(plan)))
    return MET if plan.is_met else NOT_MET


def _progress(*, quiet: bool) -> tuple[Callable[[int], object], Callable[[int], object]]:
    """Return what shows how many values were tried, and how many changes of them."""
    if quiet:
        return Silence().show, Silence().show
    tried = Lines(lambda done: f"{counted(int(done), 'value')} tried")
    relief = Lines(
        lambda done: f"looking for what would help: {counted(int(done), 'simulation')} so far"
    )
    return tried.show, relief.show


def _base_of(options: PlanOptions) -> tuple[Deployment, Deployment]:
    """Return the deployment that all values are tried in, and the same with the least of them.

    Raises:
        BatchdecodeError: an option lists several values, is what is searched, or has no effect.
    """
    values = {}
    for name, text in options.axes.items():
        axis = AXES[name]
        if name == options.search:
            found = f"--search {name.replace('_', '-')}"
            raise BatchdecodeError(f"{axis.option} is what {found} finds: leave it out")
        values[name] = axis.values(text)
        if len(values[name]) > 1:
            raise BatchdecodeError(f"{axis.option} {text}: a plan takes one value, compare several")
    (base,) = grid_of(values, Deployment())
    tried = AXES[options.search].set(base, 1) if options.search in AXES else base
    check_effects(options.axes, [tried.scheduling])
    return base, tried
