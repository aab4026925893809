"""What a run that has finished leaves to be done when it is resumed: nothing, so no model is asked.

Rule: only what has been looked at counts, each request of the input and each of its results.
"""

from typing import TYPE_CHECKING

from batcher.formats.requests import BadLine, RequestParser

from ..commands.run import RunOptions
from ..screen.cells import counted, printable_lines
from .intake import OpenInput, Waiting
from .problems import say
from .reading import RequestReader

if TYPE_CHECKING:
    from .earlier_results import EarlierResults
    from .resume import ResultsFile, Resumption


def conclude_finished(
    file: "ResultsFile",
    resumption: "Resumption",
    requests: OpenInput,
    parser: RequestParser,
    options: RunOptions,
    waiting: Waiting,
) -> int | None:
    """Say that nothing is to be done, if that is so; return the exit status, None if it is not.

    waiting: entered while all results are looked at.

    Raises:
        Interrupted: a signal came.
        InputError: the input cannot be read.
        OutputError, WriteError: the record of the run cannot be written.
    """
    more = options.trace, options.summary_json, options.report, options.timeseries, options.otel
    if options.is_exposed or options.stats or any(output is not None for output in more):
        return None  # decoding again alone tells that
    if resumption.earlier is None or not resumption.has_finished:
        return None
    with waiting():
        found = _count(resumption.earlier, requests, parser)
    if found is None:
        return None
    num_requests, num_failed = found
    resumption.begin()
    file.settle()
    resumption.finish()
    if not options.quiet:
        told = f"nothing to do: {file.name} has all results of {counted(num_requests, 'request')}"
        if num_failed:
            told += f"; {num_failed:,} failed (see --retry-failed)"
        say(printable_lines(f"{told}\n"))
    return 1 if num_failed else 0


def _count(
    earlier: "EarlierResults", requests: OpenInput, parser: RequestParser
) -> tuple[int, int] | None:
    """Return how many requests there are, and how many failed; None if one lacks a result."""
    num_failed = 0
    reader = RequestReader(requests.lines(), parser)
    while (line := reader.read()) is not None:
        if isinstance(line, BadLine):
            if not earlier.has_rejected(line.id, reader.lines.number):
                return None
            num_failed += 1
            continue
        results = earlier.results_of(line.request)
        if len(results) < line.request.n:
            return None
        num_failed += any(result.error is not None for result in results.values())
    return reader.num_read, num_failed
