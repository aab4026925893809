"""What a model raised while the run went on: each kind is shown once, others are counted."""

from collections import Counter
from contextlib import AbstractContextManager
from typing import Self

from batcher.raised import LISTENERS, Raised

from ..screen.cells import printable_lines
from .problems import ProblemReport

_MAX_KINDS = 5


class ModelTracebacks(AbstractContextManager["ModelTracebacks"]):
    """Hears, while it is entered, of what is raised, and has `report` show it.

    is_quiet: only what was raised and where, without the traceback.
    """

    def __init__(self, report: ProblemReport, *, is_quiet: bool) -> None:
        self._report, self._is_quiet = report, is_quiet
        self._counts: Counter[str] = Counter()  # by type and place

    def __enter__(self) -> Self:
        LISTENERS.append(self.show)
        return self

    def __exit__(self, *_: object) -> None:
        LISTENERS.remove(self.show)

    def show(self, raised: Raised) -> None:
        """Show one, unless one like it was shown."""
        kind = f"{raised.said.partition(':')[0]} at {raised.place}"
        self._counts[kind] += 1
        if self._counts[kind] == 1 and len(self._counts) <= _MAX_KINDS:
            text = f"{raised}\n" if self._is_quiet else raised.traceback
            self._report.tell(printable_lines(text))

    def close(self) -> None:
        """Have the report tell how many were not shown; nothing more will come."""
        more = {kind: count - 1 for kind, count in self._counts.items() if count > 1}
        for kind, count in list(more.items())[:_MAX_KINDS]:
            which = "" if len(self._counts) == 1 else f": {kind}"
            self._report.tell(printable_lines(f"... and {count:,} more like it{which}\n"))
        self._counts.clear()
