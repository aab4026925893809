"""The lines of a file of results, read back: those that are whole, and as a run wrote them."""

from collections.abc import Callable, Iterator
from typing import BinaryIO, NamedTuple

from batcher.errors import RUN_ERROR_CODES, BatchdecodeError
from batcher.formats.results import decode_result_line
from batcher.result import Result

from .output import ResumeError

REPAIR = "--resume=repair drops such lines, and decodes again what they were for"


class ResultLine(NamedTuple):
    """A line, and the results in it."""

    line: bytes
    results: list[Result]

    @property
    def id(self) -> str:
        """The id of the request that it answers."""
        return self.results[0].id

    @property
    def has_failed(self) -> bool:
        """Whether one of its results failed in the run; a bad line stays one."""
        return any(
            result.error is not None and result.error.code in RUN_ERROR_CODES
            for result in self.results
        )


class ResultLines:
    """Reads lines up to the first that is torn.

    num_slots: of the batch.  was_written: tells whether a run has written a line.
    is_repairing: what no run has written is left out, not refused.
    """

    def __init__(
        self, num_slots: int, was_written: Callable[[bytes], bool], *, is_repairing: bool = False
    ) -> None:
        self._num_slots, self._was_written = num_slots, was_written
        self._is_repairing = is_repairing

    def read(self, file: BinaryIO) -> Iterator[ResultLine]:
        """Yield each line, from the first one on.

        Raises:
            ResumeError: one is no result of the run.
        """
        file.seek(0)
        for number, line in enumerate(file, start=1):
            if not line.endswith(b"\n"):
                return
            try:
                results = self._results_in(line)
            except (BatchdecodeError, RecursionError) as error:
                if self._is_repairing:
                    continue
                raise ResumeError(f"line {number}: {error}; {REPAIR}") from error
            yield ResultLine(line, results)

    def _results_in(self, line: bytes) -> list[Result]:
        """Return the results of `line`.

        Raises:
            BatchdecodeError: it is not what a run wrote.
        """
        if line.isspace():
            raise ResumeError("it is blank")
        results = decode_result_line(line)
        for result in results:
            self._check(result)
        if not self._was_written(line):
            raise ResumeError(
                f"the result of {results[0].id!r} is not what the run has written: "
                "it was changed, or put there"
            )
        return results

    def _check(self, result: Result) -> None:
        """Make sure that `result` can be one of this run.

        Raises:
            ResumeError: it cannot.
        """
        slot, admitted, finished = result.slot, result.steps.admitted, result.steps.finished
        if slot is None and admitted is None:
            return
        if slot is None or admitted is None or finished is None:
            raise ResumeError("some of slot, admitted and finished are null")
        if not 0 <= slot < self._num_slots:
            raise ResumeError(f"slot {slot}, but there are {self._num_slots}")
        if not 0 <= admitted <= finished:
            raise ResumeError(f"it cannot have held a slot from step {admitted} to {finished}")
