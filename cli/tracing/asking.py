"""`batchdecode trace why` and `trace diff`: from traces or requests to an answer on stdout."""

import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass

import msgspec

from batcher.errors import BatchdecodeError, InvariantError
from batcher.events import Event
from batcher.explaining.differences import compare
from batcher.explaining.reading import KeptRequests, read_requests
from batcher.explaining.story import answer_of

from ..commands.trace import DiffOptions, WhyOptions
from ..running.intake import OpenInput
from ..running.output import stdout_json_sink, stdout_sink
from ..running.stdout import user_code_prints_to_stderr
from ..screen.cells import printable, wrapped
from ..screen.terminal import terminal_size
from .difference_text import describe, results_of
from .events import STDIN, events_of, open_twice
from .story_text import SHORT, WHOLE, tell, tell_reject

EQUAL, DIFFERENT = 0, 1


@dataclass(frozen=True, slots=True)
class _Events:
    """The events of an input, as often as they are wanted."""

    path: str
    source: OpenInput

    def __iter__(self) -> Iterator[Event]:
        return events_of(self.path, self.source, {})


def show_why(options: WhyOptions) -> None:
    """Carry out `batchdecode trace why`.

    Raises:
        BatchdecodeError: the input is not right, or has no such request.
        WriteError, BrokenPipeError: the output takes no more.
    """
    path, source = open_twice(options.input)
    with user_code_prints_to_stderr():
        events = events_of(path, source, options.run_options)
        try:
            kept = read_requests(events, options.request_id)
            _check_is_known(options.request_id, kept, source.name)
            answer = answer_of(kept)
        except InvariantError as error:
            raise BatchdecodeError(
                f"{source.name}: its events contradict each other: {error}"
            ) from error
    if options.json:
        _write_json(answer)
        return
    length = WHOLE if options.all else SHORT
    stories = [tell(story, length) for story in answer.stories]
    stories += map(tell_reject, answer.rejects)
    _write_lines(_in_columns([line for story in stories for line in story]))


def show_diff(options: DiffOptions) -> int:
    """Carry out `batchdecode trace diff`, and return its exit status.

    Raises:
        BatchdecodeError: an input is not right.
        WriteError, BrokenPipeError: the output takes no more.
    """
    if options.a == options.b == STDIN:
        raise BatchdecodeError("A and B are both stdin: give a file for one of them")
    (path_a, source_a), (path_b, source_b) = open_twice(options.a), open_twice(options.b)
    with user_code_prints_to_stderr():
        try:
            comparison = compare(_Events(path_a, source_a), _Events(path_b, source_b))
        except InvariantError as error:
            raise BatchdecodeError(
                f"{source_a.name} or {source_b.name}: events contradict each other: {error}"
            ) from error
    if options.json:
        _write_json(comparison)
    else:
        told = describe(comparison, source_a.name, source_b.name)
        _write_lines([*_in_columns(told), *results_of(comparison, options.top)])
    return EQUAL if comparison.is_equal else DIFFERENT


def _check_is_known(request_id: str, kept: KeptRequests, name: str) -> None:
    """Make sure that the run has the request.

    Raises:
        BatchdecodeError: it has not; the message names some that look alike.
    """
    if kept.is_known:
        return
    from difflib import get_close_matches  # noqa: PLC0415 - for a mistake only

    near = get_close_matches(request_id, sorted(kept.ids))
    hint = f"; there is {', '.join(near)}" if near else ""
    raise BatchdecodeError(f"{name} has no request {request_id}{hint}")


def _write_json(answer: msgspec.Struct) -> None:
    sink = stdout_json_sink()
    sink.write(msgspec.json.format(msgspec.json.encode(answer), indent=2) + b"\n")
    sink.close()


def _in_columns(lines: list[str]) -> list[str]:
    """Return `lines` as wide as the terminal, or 80 columns, at most."""
    width = terminal_size(1, os.environ).columns
    return [part for line in lines for part in wrapped(printable(line), width)]


def _write_lines(lines: list[str]) -> None:
    encoding = sys.stdout.encoding
    sink = stdout_sink()
    text = "".join(f"{printable(line)}\n" for line in lines)
    sink.write(text.encode(encoding, "backslashreplace"))
    sink.close()
