"""The file of results, while a run has it: one of this machine, or one at a URL."""

from contextlib import AbstractContextManager
from typing import Protocol

from ..commands.run import RunOptions
from .intake import Waiting
from .out_file import OutFile
from .output import Sink
from .urls import is_url


class ResultsFile(Protocol):
    """What a run is told of the file of its results, and tells it; in the order of a run.

    path: where it is written, and those beside it, on this machine; None for stdout.
    name: as messages call it.  is_filled: there is something that would be lost.
    """

    @property
    def path(self) -> str | None:
        """As above."""

    @property
    def name(self) -> str | None:
        """As above."""

    @property
    def is_filled(self) -> bool:
        """As above."""

    def open(self, *, append: bool) -> Sink:
        """Return a sink for results, behind those that are there or in their place.

        Raises:
            OutputError: the file cannot be opened.
        """

    def begin(self) -> None:
        """Take note that the run begins: the file, and those beside it, are as it has them.

        Raises:
            OutputError, WriteError: they cannot be kept.
        """

    def settle(self) -> None:
        """Make sure that all that was written is kept.

        Raises:
            WriteError: it is not.
            Interrupted: a signal came.
        """

    def finish(self) -> None:
        """Take note that the run has come to its end: all is where it was to go.

        Raises:
            WriteError: it is not.
            Interrupted: a signal came.
        """

    def save(self) -> None:
        """Keep what can be of a run that has not come to its end."""

    def whereabouts(self) -> str:
        """Return where the results are."""

    @property
    def has_foreign_lines(self) -> bool:
        """Whether others have written into it meanwhile."""

    @property
    def is_in_place(self) -> bool:
        """Whether a run that goes on finds them."""


def results_file(options: RunOptions, waiting: Waiting) -> AbstractContextManager[ResultsFile]:
    """Return the file of results that `options` name, which is held while it is entered.

    waiting: entered while a store is waited for.

    Raises:
        OutputError: it cannot be written.
    """
    if options.output is None or not is_url(options.output):
        return OutFile(options.output)
    from .stored_results import StoredResults  # noqa: PLC0415 - few results go elsewhere

    return StoredResults(
        options.output, waiting, is_continued=options.resume, is_forced=options.force
    )
