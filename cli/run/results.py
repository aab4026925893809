"""Turn results into the lines of the output, as they come or in the order of the input.

On a terminal these lines are shown as text, see ResultText.

A request with one result, which becomes a line when it comes, takes no memory here.
"""

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from operator import attrgetter
from typing import TYPE_CHECKING, Literal

from msgspec import Struct
from msgspec.structs import force_setattr

from batcher.events import FinishEvent
from batcher.request import Request
from batcher.requests.lines import BadLine
from batcher.requests.openai import Form
from batcher.requests.results import (
    decode_result_line,
    encode_result,
    encode_results,
    make_rejected_result,
)
from batcher.requests.validation import constraint_fields_of
from batcher.result import Result
from batcher.trace.run import label_of

from ..screen.terminal import (
    HANGING_INDENT,
    MIN_COLUMN,
    can_print,
    columns_of,
    counted,
    encoding_of,
    fill,
    printable,
)
from ..signals import stdout_descriptor
from .input import SpilledTable

if TYPE_CHECKING:
    from .resume import EarlierResults

BytesOf = Callable[[int], bytes]
Replaying = Literal["steps", "whole", "never"]
HELD_BYTES = 32 * 2**20
_NOTHING: Mapping[int, Result] = {}


class InputOrder:
    """Puts answers into the order of the input; beyond max_held_bytes they wait on the disk."""

    def __init__(self, max_held_bytes: int = HELD_BYTES) -> None:
        self._next = 0
        self._max_held_bytes, self._num_held_bytes = max_held_bytes, 0
        self._held: dict[int, bytes] = {}
        self._spilled = SpilledTable("results that wait for their turn")

    def put(self, index: int, lines: bytes) -> list[bytes]:
        """Add the answer to the input line `index`; return the answers whose turn has come."""
        self._held[index] = lines
        self._num_held_bytes += len(lines)
        if index != self._next:
            if self._num_held_bytes > self._max_held_bytes:
                self._spilled.add(self._held)
                self._num_held_bytes = 0
            return []
        ready: list[bytes] = []
        while True:
            answer = self._held.pop(self._next, None)
            if answer is not None:
                self._num_held_bytes -= len(answer)
            elif self._spilled:
                answer = self._spilled.find(self._next)
            if answer is None:
                return ready
            ready.append(answer)
            self._next += 1

    def rest(self) -> Iterator[bytes]:
        """Yield the answers that still wait, in order."""
        if self._spilled:
            self._spilled.add(self._held)
        for index, lines in self._spilled.items_from(self._next):
            self._next = index + 1
            yield lines
        for index in sorted(self._held):
            yield self._held.pop(index)

    def close(self) -> None:
        self._spilled.close()


class _OpenRequest(Struct, gc=False):
    """A request in the engine that does not become one line when its one result comes.

    num_left: results that have not come.  num_lacking: results that are not written; failures may
    have made other samples the best ones.
    found: the results of an earlier run.  is_replayed: the engine replays them, and decodes others.
    is_ranked: the results come best first, all at once.  kept: results that are answered together.
    """

    input_index: int
    num_left: int
    num_lacking: int
    found: Mapping[int, Result]
    is_replayed: bool
    is_ranked: bool
    form: Form
    has_failed: bool = False
    kept: list[Result] = []


class Answers:
    """Turns the results of a run into lines.

    bytes_of: the bytes of a token.  earlier: the results of an earlier run.
    order: for answers in the order of the input.  first_slot: of this engine among all workers.
    replaying: "steps" replays earlier results if the schedule follows from the number of their
    tokens, "whole" replays all of them, and "never" none.
    """

    def __init__(
        self,
        model: str,
        bytes_of: BytesOf,
        earlier: "EarlierResults | None" = None,
        order: InputOrder | None = None,
        *,
        replaying: Replaying = "steps",
        first_slot: int = 0,
    ) -> None:
        self.is_resumed = earlier is not None
        self._model, self._bytes_of, self._replaying = model, bytes_of, replaying
        self._earlier, self._order, self._first_slot = earlier, order, first_slot
        self._open: dict[str, _OpenRequest] = {}
        self._alone: dict[str, int] = {}  # requests with one result -> input index

    def open(self, request: Request, form: Form, input_index: int) -> Mapping[int, Result]:
        """Add a request; return the earlier results that the engine replays."""
        num_results, earlier = request.n, self._earlier
        request_id: str = request.id  # type: ignore[assignment]  # its parser has set it
        if num_results == 1 and form == "result" and earlier is None:
            if self._order is not None:
                self._alone[request_id] = input_index
            return _NOTHING
        found, is_replayed = _NOTHING, False
        if earlier is not None:
            found = earlier.results_of(request)
            is_replayed = self._replaying == "whole"
            if self._replaying == "steps" and can_be_replayed(request):
                is_replayed = True
        num_lacking = num_results - len(found)
        is_ranked = request.best_of is not None
        self._open[request_id] = _OpenRequest(
            input_index, num_results, num_lacking, found, is_replayed, is_ranked, form
        )
        return found if is_replayed else _NOTHING

    def reject(self, bad: BadLine, input_index: int) -> list[bytes]:
        number = bad.problems[0].line
        if self._earlier is not None and self._earlier.has_rejected(number):
            return []
        line = self._encode([make_rejected_result(bad.id, bad.problems)], bad.form)
        return [line] if self._order is None else self._order.put(input_index, line)

    def is_first_failure(self, request_id: str) -> bool:
        request = self._open.get(request_id)
        if request is None:  # it has one result
            return True
        is_first = not request.has_failed
        request.has_failed = True
        return is_first

    @property
    def num_failing(self) -> int:
        return sum(request.has_failed for request in self._open.values())

    def note_replayed(self, event: FinishEvent) -> bool:
        """Note the end of a sequence in a resumed run; return whether it fails the request.

        A replayed sample has no result that would show it.
        """
        request = self._open.get(event.id)
        if request is None or not request.is_replayed or event.index not in request.found:
            return False
        if event.role == "negative":
            return False
        has_failed = event.reason == "error" and self.is_first_failure(event.id)
        self._count_down(event.id, request)
        return has_failed

    def take(self, results: Sequence[Result]) -> list[bytes]:
        """Return the lines that can be written now; an item may hold several."""
        order, alone = self._order, self._alone
        if self._first_slot:
            for result in results:
                if result.slot is not None:
                    force_setattr(result, "slot", self._first_slot + result.slot)
        if not (self._open or order):  # the common case
            return [encode_results(results)] if results else []
        lines: list[bytes] = []
        for result in results:
            if order is not None and (index := alone.pop(result.id, None)) is not None:
                lines += order.put(index, encode_result(result))
                continue
            request = self._open.get(result.id)
            if request is None:
                lines.append(encode_result(result))
            else:
                lines += self._answer(request, result)
        return lines

    def rest(self) -> Iterator[bytes]:
        if self._order is not None:
            for request in self._open.values():
                if request.form == "result" and request.kept:
                    yield from self._order.put(request.input_index, self._join(request))
            yield from self._order.rest()

    def close(self) -> None:
        if self._order is not None:
            self._order.close()

    def _answer(self, request: _OpenRequest, result: Result) -> list[bytes]:
        self._count_down(result.id, request)
        is_row = request.form != "result"
        if is_row:
            if request.found:  # of a row, all results were found or none was
                return []
        elif result.index in request.found or request.num_lacking <= 0:
            return []
        request.num_lacking -= 1
        if not is_row and self._order is None:
            return [encode_result(result)]
        request.kept.append(result)
        if request.num_left:
            return []
        lines = self._join(request)
        return [lines] if self._order is None else self._order.put(request.input_index, lines)

    def _join(self, request: _OpenRequest) -> bytes:
        if not request.is_ranked:
            request.kept.sort(key=attrgetter("index"))
        if request.form != "result":
            return self._encode(request.kept, request.form)
        return encode_results(request.kept)

    def _encode(self, results: list[Result], form: Form) -> bytes:
        if form == "result":
            return encode_result(results[0])
        from batcher.requests.result_rows import encode_openai_row  # noqa: PLC0415 - only for them

        return encode_openai_row(results, self._model, form, self._bytes_of)

    def _count_down(self, request_id: str, request: _OpenRequest) -> None:
        request.num_left -= 1
        if not request.num_left:
            del self._open[request_id]


def can_be_replayed(request: Request) -> bool:
    """Return whether the schedule of `request` follows from its results.

    It does not if tokens are forced (several may come in one step), if some rows have no result
    (best_of, beams), or if a slot is held for no token (scoring a prompt).
    """
    is_forced = request.heal or bool(constraint_fields_of(request))
    is_scored_alone = request.max_tokens == 0 and request.prompt_logprobs is not None
    has_hidden_rows = request.best_of is not None or request.num_beams > 1
    return not (is_forced or is_scored_alone or has_hidden_rows)


class ResultText:
    """Writes results as text for people, `id  text`, wrapped to the width of a terminal.

    It escapes control characters, and marks an output that was cut or has failed.
    write: takes the text.
    """

    is_file = False

    def __init__(self, write: Callable[[bytes], object]) -> None:
        stdout = sys.__stdout__ or sys.stdout  # the other one may lead to stderr
        self._encoding = encoding_of(stdout.encoding)
        self._dots = "…" if can_print(self._encoding, "…") else "..."
        self._write = write

    def write(self, lines: bytes) -> None:
        for line in lines.splitlines():
            self._show(map(self._text_of, decode_result_line(line)))

    def write_unfinished(self, outputs: Iterable[tuple[str, str, int]]) -> None:
        """Write the label, the text and the number of tokens of each output of a stopped run."""
        for label, text, num_tokens in outputs:
            remark = f"[stopped after {counted(num_tokens, 'token')}]"
            self._show([self._marked(label, text.rstrip("\ufffd").strip(), remark)])

    def close(self) -> None:
        """Leave stdout open."""

    def _text_of(self, result: Result) -> str:
        text, num_tokens = result.text.strip(), result.usage.completion_tokens
        remark = ""
        if result.error is not None:
            remark = f"error ({result.error.code}): {result.error.message}"
        elif result.tool_calls or result.function_call:
            remark = "[calls a tool; --format jsonl shows it]"
        elif result.finish_reason == "aborted":
            remark = "[aborted]"
        elif result.finish_reason == "length" and num_tokens:
            what = "cut at the end of the context" if result.limit else "cut"
            remark = f"[{what} after {counted(num_tokens, 'token')}]"
        elif not text:
            remark = "[no text]"
        return self._marked(label_of(result.id, result.index, "sample"), text, remark)

    def _marked(self, label: str, text: str, remark: str) -> str:
        dots = f"{self._dots} " if text and remark else ""
        return f"{printable(label)}  {text}{dots}{printable(remark)}"

    def _show(self, texts: Iterable[str]) -> None:
        columns = columns_of(stdout_descriptor())
        shown = [f"{line}\n" for text in texts for line in self._wrapped(text, columns)]
        self._write("".join(shown).encode(self._encoding, "backslashreplace"))

    def _wrapped(self, text: str, columns: int | None) -> Iterator[str]:
        first_indent, indent = "", HANGING_INDENT
        for line in text.expandtabs(4).split("\n"):
            bare = printable(line.lstrip(" "))
            own = " " * (len(line) - len(line.lstrip(" ")))
            width = 0 if columns is None else columns - len(indent + own)
            parts = fill(bare.split(" "), " ", width) if width >= MIN_COLUMN else [bare]
            yield f"{first_indent}{own}{parts[0]}".rstrip()
            yield from (f"{indent}{own}{part}" for part in parts[1:])
            first_indent = indent
