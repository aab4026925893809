"""`batchdecode compare`, from its options to its table."""

import os

from batcher.metrics.slo import parse_slos
from batcher.planning.compare import DEFAULT_GROWTH, GridCell, compare
from batcher.planning.deployments import AXES, Deployment, grid_of
from batcher.planning.drafting import beside_none
from batcher.planning.measure import Question

from ..commands.compare import CompareOptions
from ..printing import print_text
from ..screen.terminal import terminal_size
from .columns import column_of
from .plots.plot import check_plot, show_plot
from .plots.points import charts_of_cells
from .progress import progress_of
from .reading import (
    check_classes,
    check_given,
    num_cores,
    priced,
    read_workload,
    say_of_engines,
)
from .tables import best_first, csv_of, json_of, table_of

SERVED, NOTHING_SERVED = 0, 1


def compare_requests(options: CompareOptions) -> int:
    """Carry out `batchdecode compare`; return its exit status.

    Raises:
        BatchdecodeError: the input or an option is not right.
        WriteError, BrokenPipeError: the output takes no more.
    """
    slo = parse_slos(options.slo or [])
    values = {name: AXES[name].values(text) for name, text in options.axes.items()}
    if "draft_tokens" in values:
        values["draft_tokens"] = beside_none(values["draft_tokens"])
    grid = grid_of(values, Deployment())
    check_given(options.axes.keys() - options.preset, grid)
    prices = priced(options.prices, grid)
    column = None if options.sort is None else column_of(options.sort)
    check_plot(options.plot, force=options.force)
    workload = read_workload(options)
    check_classes(slo, workload)
    if not options.quiet:
        say_of_engines(grid, options.slo or [])
    num_jobs = options.jobs or num_cores()
    with progress_of(len(grid), min(num_jobs, len(grid)), quiet=options.quiet) as on_done:
        question = Question(workload, slo, prices=prices)
        cells: list[GridCell] = compare(
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
        width = terminal_size(1, os.environ).columns if os.isatty(1) else None
        print_text(table_of(cells, width, options.sort or ""))
    if options.plot is not None:
        show_plot(options.plot, charts_of_cells(question, cells))
    outcomes = [cell.outcome for cell in cells if cell.outcome is not None]
    has_served = any(outcome.served or not outcome.failed for outcome in outcomes)
    return SERVED if has_served else NOTHING_SERVED  # if there is no request, all are served
