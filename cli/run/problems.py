"""Problems of the input and of a model: the first are shown in full, the others counted."""

import os
import sys
from collections import Counter
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Self

from msgspec.structs import replace

from batcher.errors import BatchdecodeError, FieldProblem
from batcher.foreign import LISTENERS, Raised
from batcher.requests.ids import duplicate_id
from batcher.requests.lines import BadLine, ParsedLine

from ..screen.terminal import ColorChoice, counted, printable_lines, terminal_size, wants_color
from .intake import MAX_LINE_BYTES

if TYPE_CHECKING:
    from batcher.requests.diagnostics import Problem

MAX_SHOWN = 50
_SHOWN_BYTES = 2000
_MAX_KINDS = 5  # of what a model raises


class ProblemReport:
    """Collects problems; the first MAX_SHOWN are kept to be shown, the others counted.

    num_lines: how many lines are bad.  news: what there is to show that was not taken yet.
    """

    def __init__(self, filename: str, color: ColorChoice = "auto") -> None:
        self.num_lines = 0
        self._filename, self._color = filename, color
        self._num_shown = self._num_hidden = 0
        self._hidden_codes: set[str] = set()
        self.news: list[str] = []

    def add(self, bad: BadLine) -> None:
        """Take in one more line, of whose problems the first is shown."""
        self.num_lines += 1
        problem = bad.problems[0]
        if self._num_shown < MAX_SHOWN and problem.code not in self._hidden_codes:
            self._num_shown += 1
            from batcher.requests.diagnostics import render_problem  # noqa: PLC0415 - if there is one

            width = terminal_size(2, os.environ).columns
            color = wants_color(self._color, 2, os.environ)
            advised, name = self._advise(problem), self._filename
            self.news.append(render_problem(advised, filename=name, width=width, color=color))
        else:
            self._num_hidden += 1

    def _advise(self, problem: "Problem") -> "Problem":
        """Return a problem with what to do if it tells that the whole input has another form.

        Other lines have the same problem then, and are counted.
        """
        if self._hidden_codes or problem.code not in {"invalid-json", "invalid-text"}:
            return problem
        from .other_forms import advice_for  # noqa: PLC0415 - good input does without

        advice = advice_for(problem, self._filename)
        if advice is None:
            return problem
        self._hidden_codes = {"invalid-text", problem.code}
        return replace(problem, hint=advice)

    def tell(self, text: str) -> None:
        """Take in whole lines about something else than the input."""
        self.news.append(text.removesuffix("\n"))

    def take(self) -> str:
        """Return what there is to show of the problems since the last call, empty for nothing."""
        shown = "".join(f"{text}\n" for text in self.news)
        self.news.clear()
        return shown

    def closing(self) -> str:
        """Return what there is to show at the end: news, and how many problems were left out."""
        num_hidden, self._num_hidden = self._num_hidden, 0
        return self.take() + (
            f"... and {counted(num_hidden, 'more problem')}\n" if num_hidden else ""
        )


class ModelTracebacks(AbstractContextManager["ModelTracebacks"]):
    """Hears, while it is entered, of what a model raises, and has `report` show it.

    Each kind is shown once, others are counted.

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


class InvalidInput(BatchdecodeError):  # noqa: N818 - the fault is the input's
    """The input has bad lines, which have been reported."""

    def __init__(self, report: ProblemReport, num_lines: int, what_now: str) -> None:
        lines = "line" if num_lines == 1 else "lines"
        super().__init__(f"{report.num_lines:,} invalid of {num_lines:,} {lines}; {what_now}")


def line_too_long(line: bytes, number: int) -> BadLine:
    """Return what is wrong with a line that is longer than any may be."""
    from batcher.requests.diagnostics import make_problem  # noqa: PLC0415 - as above
    from batcher.requests.json_spans import TextSpan  # noqa: PLC0415 - as above

    message = f"the line has more than the {MAX_LINE_BYTES // 2**20} MiB that are allowed"
    problem = FieldProblem("line-too-long", (), message)
    start = line[:_SHOWN_BYTES].decode(errors="replace")
    return BadLine(
        id=str(number),
        problems=[make_problem(problem, number, start, TextSpan(0, 1))],
    )


def id_of(parsed: ParsedLine) -> str:
    """Return the id of the request, which its parser has set; "" is one, too."""
    return parsed.request.id  # type: ignore[return-value]  # see above


def id_given_before(parsed: ParsedLine, line: bytes, number: int, first: int) -> BadLine:
    """Return what is wrong with a line whose id the line `first` has already."""
    return _bad(parsed, duplicate_id(id_of(parsed), first), line, number)


def arrival_goes_back(parsed: ParsedLine, line: bytes, number: int, last: float) -> BadLine:
    """Return what is wrong with a line of a pipe that arrives before the line before it."""
    message = f"arrival_time goes back from {last:g} to {parsed.request.arrival_time:g}"
    hint = "sort the requests by arrival_time, or give them as a file"
    problem = FieldProblem("arrival-order", ("arrival_time",), message, hint)
    return _bad(parsed, problem, line, number)


def _bad(parsed: ParsedLine, problem: FieldProblem, line: bytes, number: int) -> BadLine:
    from batcher.requests.problems import place_problem  # noqa: PLC0415 - as above

    return BadLine(id_of(parsed), [place_problem(problem, line, number)], parsed.form)


def say(text: str) -> None:
    """Write `text` for the person who started the command."""
    sys.stderr.write(text)
    sys.stderr.flush()
