"""`batchdecode trace why` and `trace diff`: from traces or requests to an answer on stdout."""

import os
import shlex
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from operator import itemgetter

from batcher.errors import BatchdecodeError, InvariantError
from batcher.events import Event
from batcher.explaining.differences import compare
from batcher.explaining.story import KeptRequests, answer_of, read_requests
from batcher.explaining.worker_differences import compare_workers
from batcher.page import is_page_start

from ..commands.trace import DiffOptions, WhyOptions
from ..printing import check_no_terminal, output_sink, print_json, print_text, write_lines
from ..run.files import check_distinct, check_replaceable
from ..run.intake import InputError, OpenInput
from ..run.stdout import user_code_prints_to_stderr
from ..screen.terminal import counted, printable, terminal_size, wrapped
from .difference_text import describe, results_of
from .events import (
    STDIN,
    alike_names,
    contradictions_named,
    events_of,
    num_workers_of,
    open_twice,
    refuse_workers,
)
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
    path, source = _open_why(options)
    title: list[str] = []
    with source, user_code_prints_to_stderr():
        events = events_of(path, source, options.run_options, options.preset)
        with contradictions_named(source.name):
            if options.longest:
                kept = read_requests(events)
                title = [_keep_longest(kept, source.name)]
            else:
                kept = read_requests(events, options.request_id)
                if not any(of_worker.is_known for of_worker in kept):
                    known = set[str]().union(*(of_worker.ids for of_worker in kept))
                    raise BatchdecodeError(_unknown(options, known, source.name))
            answer = answer_of(kept)
    if options.json:
        print_json(answer)
        return
    length = WHOLE if options.all else SHORT
    stories = [tell(story, length) for story in answer.stories]
    stories += map(tell_reject, answer.rejects)
    _print_lines(_in_columns([*title, *(line for story in stories for line in story)]))


def _open_why(options: WhyOptions) -> tuple[str, OpenInput]:
    """Return the input as `open_twice` does; behind --longest it is the only argument.

    Raises:
        BatchdecodeError: the line does not say whose story is wanted, or of which input; or that
            cannot be read.
    """
    request_id, path = options.request_id, options.input
    if options.longest:
        if path is not None:
            raise BatchdecodeError(f"--longest stands in place of an ID, and {request_id} is one")
        return open_twice(request_id)
    if request_id is None:
        raise BatchdecodeError("trace why needs the ID of a request, or --longest")
    if path is None and os.isatty(0):
        hint = _missing_input(request_id)
        raise BatchdecodeError(f"trace why {request_id} needs an INPUT, - for stdin{hint}")
    try:
        return open_twice(path)
    except InputError as error:
        if path is not None and _is_file(request_id):
            swapped = shlex.join([path, request_id])
            raise InputError(f"{error}; did you mean: batchdecode trace why {swapped}?") from None
        raise


def _keep_longest(workers: Sequence[KeptRequests], name: str) -> str:
    """Let only the request be kept that took longest, and return which one that is; or raise."""
    found = [(kept.seconds(longest), longest) for kept in workers if (longest := kept.longest)]
    if not found:
        raise BatchdecodeError(f"{name} has no request")
    _, longest = max(found, key=itemgetter(0))
    num_outputs = sum(len(kept.all) for kept in workers)
    for kept in workers:
        kept.only(longest.id)
    return f"longest of {counted(num_outputs, 'output')}: {longest.label}"


def _unknown(options: WhyOptions, known: Collection[str], name: str) -> str:
    """Return what is said of an id that is none in the input `name`, and what may be meant."""
    request_id = str(options.request_id)
    hint = ""
    if options.input is None:
        hint = _missing_id(request_id) if known else _missing_input(request_id)
    hint = hint or alike_names(request_id, known, options.input)
    return f"{name} has no request {request_id}{hint}"


def _missing_input(request_id: str) -> str:
    """Return the end of a message where nobody has said of which run the story is wanted."""
    line = shlex.join([request_id, "FILE"])
    return _missing_id(request_id) or (
        f": batchdecode trace why {line}, where FILE is a trace, which `batchdecode run --trace "
        "FILE` writes, or requests, which are run for it"
    )


def _missing_id(argument: str) -> str:
    """Return the end of a message where a file may stand in the place of an ID."""
    if not _is_file(argument):
        return ""
    return f"; before the file {argument} goes the ID of a request, or --longest"


def _is_file(path: str) -> bool:
    return os.path.isfile(path)  # noqa: PTH113 - this one raises nothing


def open_both(options: DiffOptions) -> tuple[tuple[str, OpenInput], tuple[str, OpenInput]]:
    """Return A and B as `open_twice` does.

    Raises:
        BatchdecodeError: they are one pipe, or cannot be read.
    """
    if options.a == options.b == STDIN:
        raise BatchdecodeError("A and B are both stdin: give a file for one of them")
    return open_twice(options.a), open_twice(options.b)


def show_diff(options: DiffOptions) -> int:
    """Carry out `batchdecode trace diff`, and return its exit status.

    Raises:
        BatchdecodeError: an input is not right.
        WriteError, BrokenPipeError: the output takes no more.
    """
    (path_a, source_a), (path_b, source_b) = open_both(options)
    with source_a, source_b:
        _check_page_options(options, source_a, source_b)
        events_a, events_b = _Events(path_a, source_a), _Events(path_b, source_b)
        if options.html:
            refuse_workers("trace diff --html", source_a, source_b)
        has_workers = max(map(num_workers_of, (source_a, source_b))) > 1
        with user_code_prints_to_stderr():
            try:
                how = compare_workers if has_workers else compare
                comparison = how(events_a, events_b)
            except InvariantError as error:
                raise BatchdecodeError(
                    f"{source_a.name} or {source_b.name}: events contradict each other: {error}"
                ) from error
        told = describe(comparison, source_a.name, source_b.name)
        has_page = options.html or not os.isatty(1)
        width = None if has_page else terminal_size(1, os.environ).columns
        results = results_of(comparison, options.top, width)
        if options.json:
            print_json(comparison)
        elif options.html:
            from .page import render_difference  # noqa: PLC0415 - with it comes numpy

            runs = [(source_a.name, events_a), (source_b.name, events_b)]
            with user_code_prints_to_stderr():
                page = render_difference(runs, comparison, [*told, *results], options)
                with output_sink(options.output) as sink:
                    write_lines(page, sink)
        else:
            _print_lines([*_in_columns(told), *results])
    return EQUAL if comparison.is_equal else DIFFERENT


def _check_page_options(options: DiffOptions, *sources: OpenInput) -> None:
    """Make sure that a page, if one is wanted, has a place to go to; or raise."""
    if not options.html:
        if options.output is not None:
            raise BatchdecodeError("--output is for --html")
        return
    if options.json:
        raise BatchdecodeError("--html and --json exclude each other")
    check_no_terminal("--html", options.output)
    for source, path in zip(sources, (options.a, options.b), strict=True):
        check_distinct(source.status, [("--output", options.output)], path)
    if options.output is not None and not options.force:
        check_replaceable("--output", options.output, is_page_start)


def _in_columns(lines: list[str]) -> list[str]:
    """Return `lines` as wide as the terminal, or 80 columns, at most."""
    width = terminal_size(1, os.environ).columns
    return [part for line in lines for part in wrapped(printable(line), width)]


def _print_lines(lines: Iterable[str]) -> None:
    print_text("".join(f"{printable(line)}\n" for line in lines))
