"""How a run has ended: what is said of its results, and of an input not read to its end."""

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING

from ..commands.run import RunOptions
from ..screen.cells import counted, printable_lines
from .out_file import OutFile
from .problems import InvalidInput, ProblemReport, say
from .recorder import ResultWriter
from .resume import ResultsFile, Resumption

if TYPE_CHECKING:
    from .loop import Loop
    from .workers.lines import InputLines

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
