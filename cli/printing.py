"""What a command answers, whole: text or JSON on stdout, or bytes where --output says."""

import sys

import msgspec

from .running.output import Sink, open_sink, stdout_json_sink, stdout_sink


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


def output_sink(path: str | None) -> Sink:
    """Return where --output leads to; None is stdout.

    Raises:
        OutputError: the file cannot be opened.
    """
    return stdout_sink() if path is None else open_sink(path)


def _write(sink: Sink, content: bytes) -> None:
    sink.write(content)
    sink.close()
