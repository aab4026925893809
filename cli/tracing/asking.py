"""`batchdecode trace why` and `trace diff`: from traces or requests to an answer on stdout."""

import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass

import msgspec

from batcher.errors import BatchdecodeError, InvariantError
from batcher.events import Event
from batcher.explaining.differences import compare
from batcher.explaining.reading import read_requests
from batcher.explaining.story import answer_of

from ..commands.trace import DiffOptions, WhyOptions
from ..running.intake import OpenInput
from ..running.output import stdout_json_sink, stdout_sink
from ..running.stdout import user_code_prints_to_stderr
from ..screen.cells import printable, wrapped
from ..screen.terminal import terminal_size
from .difference_text import describe, results_of
from .events import STDIN, alike_names, contradictions_named, events_of, open_twice
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
        with contradictions_named(source.name):
            kept = read_requests(events, options.request_id)
            if not kept.is_known:
                hint = alike_names(options.request_id, kept.ids)
                raise BatchdecodeError(f"{source.name} has no request {options.request_id}{hint}")
            answer = answer_of(kept)
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


def _write_json(answer: msgspec.Struct) -> None:
    sink = stdout_json_sink()
    sink.write(msgspec.json.format(msgspec.json.encode(answer), indent=2) + b"\n")
    sink.close()


def _in_columns(lines: list[str]) -> list[str]:
    """Return `lines` as wide as the terminal, or 80 columns, at most."""
    width = terminal_size(1, os.environ).columns
    return [part for line in lines for part in wrapped(printable(line), width)]


def _write_lines(lines: list[str]) -> None:
    sink = stdout_sink()
    text = "".join(f"{printable(line)}\n" for line in lines)
    sink.write(text.encode(sys.stdout.encoding, "backslashreplace"))
    sink.close()
