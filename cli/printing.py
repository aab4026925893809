"""What a command answers, whole: text or JSON on stdout, or bytes where --output says."""

import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import islice

import msgspec

from batcher.errors import BatchdecodeError

from .run.out_file import OutFile
from .run.output import Sink, stdout_json_sink, stdout_sink

LINES_OF_BLOCK = 256


def print_text(text: str) -> None:
    """Write an answer for people to stdout; what its encoding lacks becomes escapes.

    Raises:
        WriteError, BrokenPipeError: stdout takes no more.
    """
    stdout = sys.__stdout__ or sys.stdout  # the other one may lead to stderr
    _write(stdout_sink(), text.encode(stdout.encoding, "backslashreplace"))


def print_json(answer: object) -> None:
    """Write an answer for programs to stdout, as indented JSON.

    Raises:
        WriteError, BrokenPipeError: stdout takes no more.
    """
    _write(stdout_json_sink(), msgspec.json.format(msgspec.json.encode(answer)) + b"\n")


@contextmanager
def output_sink(path: str | OutFile | None) -> Iterator[Sink]:
    """Give what --output leads to, a file that is written as a whole; None is stdout.

    Raises:
        OutputError: the file cannot be opened.
        WriteError, BrokenPipeError: it, or stdout, takes no more.
    """
    if path is None:
        yield stdout_sink()
    else:
        file = OutFile(path) if isinstance(path, str) else path
        with file.replace() as sink:
            yield sink


def check_no_terminal(what: str, path: str | None) -> None:
    """Make sure that `what`, which is for a browser, does not go to a terminal; None is stdout.

    Raises:
        BatchdecodeError: it would.
    """
    if path is None and os.isatty(1):
        raise BatchdecodeError(f"{what} is for a browser: give -o FILE.html")


def write_lines(lines: Iterable[bytes], sink: Sink) -> None:
    """Write `lines` to `sink`, many at once.

    Raises:
        WriteError, BrokenPipeError: it takes no more.
    """
    remaining = iter(lines)
    while block := b"".join(islice(remaining, LINES_OF_BLOCK)):
        sink.write(block)


def _write(sink: Sink, content: bytes) -> None:
    sink.write(content)
    sink.close()
