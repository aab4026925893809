"""How a run has ended: what is said of its results, and of an input not read to its end."""

import os
import re
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from batcher.events import RunEvent

from ..models import is_real
from ..options import STDOUT
from ..screen.terminal import columns_of, counted, encoding_of, printable_lines, wants_color
from .out_file import OutFile
from .problems import InvalidInput, ProblemReport, say
from .recorder import ResultWriter
from .resume import ResultsFile, Resumption
from .run_options import RunOptions

if TYPE_CHECKING:
    from batcher.decoding.constraints import ConstraintTimes
    from batcher.metrics.summary import RunSummary
    from batcher.page.page import PageTimeline

    from ..screen.summary import BytesPerToken
    from .loop import Loop
    from .workers import InputLines

_RESUME = re.compile(r"(?<= )--resume(?= |$)")


def settle_files(files: Mapping[str, OutFile], results: ResultsFile) -> None:
    """Make sure that all that a run has written is on the disk, the results last.

    Raises:
        WriteError: some of it is not, or a file is gone.
        Interrupted: a signal came.
    """
    for file in files.values():
        file.settle()
    results.settle()


def tell_ending(
    options: RunOptions,
    results: ResultWriter | None,
    file: ResultsFile,
    resumption: Resumption,
    remark: str,
    what_now: str,
) -> None:
    """Say why the run ends, where its results are if there are any, and how to go on.

    results: None if the run has not begun.
    """
    file.save()
    where = file.whereabouts()
    if results is not None and (results.num_written or results.num_token_events):
        went = counted(results.num_written, "result")
        if options.stream:
            went += f" and {counted(results.num_token_events, 'token event')}"
        remark += f"; {went} went to {where}"
    say(printable_lines(f"{remark}\n"))
    if resumption.is_possible and file.is_in_place:
        if file.has_foreign_lines:
            what_now = _RESUME.sub("--resume=repair", what_now, count=1)
        say(printable_lines(f"{what_now}\n"))


def tell_summary(
    options: RunOptions,
    summary: "RunSummary",
    run: RunEvent,
    name: str,
    timelines: "Sequence[PageTimeline] | None",
    files: Mapping[str, OutFile],
    results: str | None,
    *,
    elapsed: float,
    is_complete: bool,
    num_unread: int = 0,
    kv_bytes: "BytesPerToken | None" = None,
    constraint_times: "ConstraintTimes | None" = None,
    remark: str = "",
) -> dict[str, Exception]:
    """Write the numbers of a run, and say them; return why one could not be written, by its option.

    run: how its trace begins.  name: of its input.  timelines: of its workers, for a report.
    results: what messages call the file of results.  remark: a line that follows the summary.
    """
    if is_real(options.model):
        from batcher.metrics.summary import with_wall_clock  # noqa: PLC0415 - few runs need it

        summary = with_wall_clock(summary, elapsed)
    failures: dict[str, Exception] = {}
    if options.summary_json is not None or options.report is not None:
        from .report import write_numbers  # noqa: PLC0415 - few runs have one

        failures = write_numbers(options, files, summary, timelines, run, name)
    if options.quiet:
        return failures
    from ..screen.summary import NOT_TOLD, RunFiles, render_summary  # noqa: PLC0415 - as above

    has_numbers = options.summary_json != STDOUT and "--summary-json" not in failures
    text = render_summary(
        summary,
        RunFiles(
            results,
            options.trace,
            None if "--report" in failures else options.report,
            options.summary_json if has_numbers else None,
            options.timeseries,
            options.metrics_file,
        ),
        is_complete=is_complete,
        num_unread=num_unread,
        elapsed=elapsed,
        encoding=encoding_of(sys.stderr.encoding, os.environ),
        has_color=wants_color(options.color, 2, os.environ),
        is_timed=bool(run.step_time),
        columns=columns_of(2, os.environ),
        kv_bytes=kv_bytes or NOT_TOLD,
    )
    say(text + printable_lines(remark))
    if options.stats:
        from ..screen.summary import render_stats  # noqa: PLC0415 - few runs tell so much

        say(render_stats(summary, constraint_times, is_timed=bool(run.step_time)))
    return failures


def refuse_rest(report: ProblemReport, read: "Loop | InputLines") -> None:
    """Report what has ended the reading before the end of the input, if anything has.

    Raises:
        InvalidInput: a bad line has.
        InputError: the pipe has, which was damaged or cut off there.
    """
    if read.broken is not None:
        raise read.broken
    if read.has_refused:
        what_now = "reading stopped there. --keep-going to skip such lines."
        raise InvalidInput(report, read.num_read, what_now)
