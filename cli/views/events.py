"""The events that `batchdecode trace` shows: read from a trace, or made by running requests.

Rule: the first line says which of the two the input is, so the input can always be read again.
"""

import io
import os
import re
import shlex
import stat
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

import msgspec

from batcher.errors import BatchdecodeError, InvariantError
from batcher.events import Event, RunEvent
from batcher.hf.settings import LOADING_SETTINGS
from batcher.trace.files import is_trace, read_trace
from batcher.trace.run import TraceChecks

from ..config import OF_ROWS, OF_SCHEDULING, model_settings
from ..options import SchedulingOptions
from ..run.intake import (
    CHUNK_BYTES,
    MAX_SKIPPED_BYTES,
    CutOffError,
    InputError,
    OpenInput,
    PatientPipe,
    open_input,
)
from ..screen.terminal import listed

STDIN = "-"
FEW_NAMES = 8  # which a message lists all
_REQUEST_KEYS = ("prompt", "prompt_tokens", "messages", "body", "max_tokens")
_REQUEST_KEY = re.compile(rb'"(prompt|prompt_tokens|messages|body)"')
_RESULT_KEYS = {"finish_reason", "response"}


def open_twice(path: str | None) -> tuple[str, OpenInput]:
    """Return the input, and the path it can be opened by again; a pipe is kept as stdin.

    Raises:
        BatchdecodeError: there is no such input, or it cannot be read.
    """
    path = path or STDIN
    if _is_pipe(path):
        _keep_as_stdin(path)
        path = STDIN
    return path, open_input(path, nullcontext)


def events_of(
    path: str,
    source: OpenInput,
    run_options: Mapping[str, Any],
    preset: Collection[str] = (),
) -> Iterator[Event]:
    """Yield the events of the input.

    run_options: those given for running requests.  preset: those of them that the line does not
    say, which mean nothing to a trace.

    Raises:
        BatchdecodeError: the input is neither a trace nor requests, or a trace to be run.
    """
    first_line = next(_lines(source), b"")
    if is_trace(first_line):
        for option in (name for name in run_options if name not in preset):
            name = option.replace("_", "-")
            raise BatchdecodeError(f"--{name} is for requests, and {source.name} is a trace")
        return read_trace(_lines(source), source.name, TraceChecks().complaint)
    if not run_options.get("keep_going"):  # or else it may be any bad line
        _check_is_request(first_line, source.name)
    if path == STDIN:
        os.lseek(0, 0, os.SEEK_SET)
    from ..run.run_options import RunOptions  # noqa: PLC0415 - with the engine comes numpy
    from ..run.runner import run_events  # noqa: PLC0415 - as above

    options = dict(run_options)
    config = options.pop("config", None)
    if config is not None:
        options |= model_settings(config)
    given = {name: options.pop(name) for name in OF_SCHEDULING & options.keys()}
    checkpoint = {n: options.pop(n) for n in LOADING_SETTINGS if n in options}
    defaults = {n: options.pop(n) for n in OF_ROWS if n in options}
    scheduling = SchedulingOptions(**given)
    return run_events(
        RunOptions(
            input=path,
            scheduling=scheduling,
            checkpoint=checkpoint,
            defaults=defaults,
            **options,
        )
    )


def num_workers_of(source: OpenInput) -> int:
    """Return of how many workers an input is: a trace of those that it says, requests of one.

    Raises:
        BatchdecodeError: it is a trace of another version, or cannot be read.
    """
    first_line = next(_lines(source), b"")
    if not is_trace(first_line):
        return 1
    run = next(read_trace([first_line], source.name), None)
    return run.workers if isinstance(run, RunEvent) else 1


def refuse_workers(view: str, *sources: OpenInput) -> None:
    """Make sure that inputs are of one worker each, for a view that shows schedules in step.

    Raises:
        BatchdecodeError: one is of several.
    """
    for source in sources:
        number = num_workers_of(source)
        if number > 1:
            raise BatchdecodeError(
                f"{view} shows two schedules in step, and each of the {number} workers of "
                f"{source.name} has steps and a clock of its own; trace diff compares their "
                "requests and totals"
            )


@contextmanager
def contradictions_named(name: str) -> Iterator[None]:
    """Let events that contradict each other be said to do so in the input `name`.

    Raises:
        BatchdecodeError: they do.
    """
    try:
        yield
    except InvariantError as error:
        raise BatchdecodeError(f"{name}: its events contradict each other: {error}") from error


def alike_names(request_id: str, known: Collection[str], path: str | None) -> str:
    """Return the end of a message on an unknown request: which it may be, and what lists all.

    known: ids of the input.  path: where that is, None for stdin.
    """
    from difflib import get_close_matches  # noqa: PLC0415 - for a mistake only

    names = sorted(known)
    if 0 < len(names) <= FEW_NAMES:
        return f"; there is {listed(names, 'and')}"
    near = get_close_matches(request_id, names)
    hint = f"; did you mean {listed(near)}?" if near else ""
    if path is None or path == STDIN:
        return hint
    return f"{hint} (batchdecode trace {shlex.quote(path)} --format spans lists all)"


def _check_is_request(first_line: bytes, name: str) -> None:
    """Make sure that `first_line` is meant as a request, good or bad; or raise."""
    try:
        fields = msgspec.json.decode(first_line)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        if first_line.isspace() or not first_line or _REQUEST_KEY.search(first_line):
            return
        fields = None
    if not isinstance(fields, dict):
        from ..run.other_forms import why_no_lines  # noqa: PLC0415 - for a mistake only

        found = why_no_lines(first_line, name) or "is neither a trace nor requests"
        raise BatchdecodeError(f"{name} {found}")
    is_stream = fields.get("event") == "token"
    if is_stream or _RESULT_KEYS & fields.keys():
        held = "a stream" if is_stream else "results"
        raise BatchdecodeError(
            f"{name} holds {held}: give the trace of that run (run --trace FILE) or its requests"
        )
    if "event" in fields:
        raise BatchdecodeError(
            f'{name}: a trace whose first line, {{"event":"run",...}}, is missing'
        )
    from difflib import get_close_matches  # noqa: PLC0415 - only for requests, as the engine

    if not any(get_close_matches(key, _REQUEST_KEYS) for key in fields):
        raise BatchdecodeError(
            f"{name} is neither a trace nor requests: its first line has no prompt"
        )


def _is_pipe(path: str) -> bool:
    """Return whether what is read from `path` is gone then."""
    if path == STDIN:
        return not stat.S_ISREG(os.fstat(0).st_mode) or os.lseek(0, 0, os.SEEK_CUR) > 0
    try:
        mode = Path(path).stat().st_mode
    except OSError:  # whoever opens it says what is wrong
        return False
    return stat.S_ISFIFO(mode) or stat.S_ISCHR(mode)


def _keep_as_stdin(path: str) -> None:
    """Read the pipe `path` to its end, and make what came a file that is stdin; or raise."""
    import tempfile  # noqa: PLC0415 - for a pipe only

    name = "<stdin>" if path == STDIN else path
    copy = tempfile.TemporaryFile()  # noqa: SIM115 - it lives on as stdin
    try:
        with io.FileIO(0 if path == STDIN else path, closefd=path != STDIN) as raw:
            pipe, num_bytes = PatientPipe(raw, nullcontext), 0  # of the last line
            while chunk := pipe.read(CHUNK_BYTES):
                copy.write(chunk)
                num_bytes = len(chunk) + (-chunk.rfind(b"\n") - 1 if b"\n" in chunk else num_bytes)
                if num_bytes > MAX_SKIPPED_BYTES:
                    copy.close()
                    limit = f"{MAX_SKIPPED_BYTES >> 30} GiB"
                    raise InputError(f"cannot read {name}: a line does not end within {limit}")
    except OSError as error:
        raise InputError(f"cannot read {name}: {error.strerror}") from error
    copy.seek(0)
    os.dup2(copy.fileno(), 0)


def _lines(source: OpenInput) -> Iterator[bytes]:
    """Yield the lines of the input; a packed file that is cut off has those before the cut."""
    reader = source.lines()
    number = 0
    with suppress(CutOffError):
        while (line := reader.read()) is not None:
            for _ in range(number + 1, reader.number):
                yield b"\n"  # the reader leaves out blank lines, which count
            number = reader.number
            yield line
