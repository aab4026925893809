"""`batchdecode compare`, from its options to its table."""

import os
from collections.abc import Mapping
from dataclasses import dataclass

from batcher.metrics.slo import Slo
from batcher.scheduling.checks import check_effects
from batcher.whatif.comparing import DEFAULT_GROWTH, GridCell, compare
from batcher.whatif.deployments import AXES, Deployment, grid_of
from batcher.whatif.measuring import Question

from .progress import progress_of
from .reading import RequestOptions, read_workload, say_of_memory, write_text
from .tables import best_first, column_of, csv_of, json_of, table_of


@dataclass(frozen=True, slots=True, kw_only=True)
class CompareOptions:
    """The options of `batchdecode compare`; docs/what-if.md says what each one means.

    axes: name of an axis -> its values as a text with commas.  form: table, json or csv.
    """

    axes: Mapping[str, str]
    slo: Slo | None = None
    knee: float | None = None
    sort: str | None = None
    form: str = "table"
    jobs: int | None = None
    quiet: bool = False


SERVED, NOTHING_SERVED = 0, 1
FORMS = {"table": table_of, "csv": csv_of, "json": json_of}


def compare_requests(source: RequestOptions, options: CompareOptions) -> int:
    """Carry out `batchdecode compare`; return its exit status.

    Raises:
        BatchdecodeError: the input or an option is not right.
        WriteError, BrokenPipeError: the output takes no more.
    """
    grid = grid_of(
        {name: AXES[name].values(text) for name, text in options.axes.items()}, Deployment()
    )
    check_effects(options.axes, [deployment.scheduling for deployment in grid])
    column = None if options.sort is None else column_of(options.sort)
    workload = read_workload(source, quiet=options.quiet)
    if not options.quiet:
        say_of_memory(grid)
    num_jobs = min(options.jobs or _num_cores(), len(grid))
    with progress_of(len(grid), num_jobs, quiet=options.quiet) as progress:
        cells: list[GridCell] = compare(
            Question(workload, options.slo),
            grid,
            growth=DEFAULT_GROWTH if options.knee is None else options.knee,
            num_jobs=num_jobs,
            on_done=progress.show,
        )
    if column is not None:
        cells = best_first(cells, column)
    write_text(FORMS[options.form](cells))
    return SERVED if any(map(_has_served, cells)) else NOTHING_SERVED


def _has_served(cell: GridCell) -> bool:
    """Return whether some request can run; of no request all can."""
    outcome = cell.outcome
    return outcome is not None and (outcome.served > 0 or not outcome.failed)


def _num_cores() -> int:
    """Return how many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
