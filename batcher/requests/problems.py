"""The second look at a line: everything that is wrong with it, each problem at its place.

It works on the raw values, so it goes on where a typed decoder stops, and it alone decides: a line
in which it finds nothing is a request.
"""

import json
import re
import unicodedata
from collections.abc import Iterator
from itertools import islice
from typing import Any, NamedTuple

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from batcher.errors import FieldProblem, Path
from batcher.request import PromptSegment, Request, ServerRequest, Transition
from batcher.requests import json_spans, openai
from batcher.requests.validation import (
    MAX_PROBLEMS,
    ModelCapabilities,
    cut,
    find_problems,
    quote,
    show,
)

# A problem in a line of input, and how a person is shown it: the place, the line, a caret.
#
# Whatever the line holds, only printable text of known width reaches the terminal.

CONTEXT = 500  # characters kept on either side of a problem: more than a terminal is wide
MIN_SOURCE_WIDTH = 20
ELLIPSIS = "…"
FIRST_PRINTABLE = 0x20
SYMBOL_FOR_NULL = 0x2400  # the first of the pictures of control characters, in their order
INVISIBLE = frozenset(("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"))
COMBINING = frozenset(("Mn", "Me"))
VARIATION_SELECTORS = range(0xFE00, 0xFE10)


class Problem(Struct, frozen=True):
    """One thing wrong with one line.

    line and column count from 1, column and width in characters.  source: the text around the
    place, with "…" where it was cut; source_start: the column of its first character.
    """

    code: str
    message: str
    line: int
    column: int
    width: int
    field: str | None
    hint: str | None
    source: str
    source_start: int = 1


class Style(NamedTuple):
    """The escape sequences around the parts of a shown problem."""

    error: str = ""
    strong: str = ""
    gutter: str = ""
    reset: str = ""


PLAIN = Style()
ANSI = Style(error="\x1b[1;31m", strong="\x1b[1m", gutter="\x1b[1;34m", reset="\x1b[0m")


class Cell(NamedTuple):
    """What is printed for one character, and how many columns of the terminal it takes."""

    text: str
    width: int


def make_problem(problem: FieldProblem, line: int, text: str, span: json_spans.TextSpan) -> Problem:
    """Return `problem`, found at `span` of the line `text`, with what is near it."""
    start, end = span.start, max(span.end, span.start + 1)
    first, last = max(0, start - CONTEXT), min(end, start + CONTEXT) + CONTEXT
    left = ELLIPSIS if first > 0 else ""
    right = ELLIPSIS if last < len(text) else ""
    return Problem(
        code=problem.code,
        message=problem.message,
        line=line,
        column=start + 1,
        width=end - start,
        field=problem.field,
        hint=problem.hint,
        source=left + text[first:last].rstrip("\r\n") + right,
        source_start=first + 1 - len(left),
    )


def render_problem(problem: Problem, *, filename: str, width: int, color: bool) -> str:
    """Return the problem as a person reads it; the line it shows is cut to `width` columns."""
    style = ANSI if color else PLAIN
    number = str(problem.line)
    indent = " " * len(number)
    cells = [_cell(character) for character in problem.source]
    start = min(problem.column - problem.source_start, len(cells))
    end = min(start + problem.width, len(cells))
    widths = [cell.width for cell in cells]
    first, last = _choose_window(widths, start, end, max(MIN_SOURCE_WIDTH, width - len(number) - 3))
    left = ELLIPSIS if first > 0 else ""
    right = ELLIPSIS if last < len(cells) else ""
    source = left + "".join(cell.text for cell in cells[first:last]) + right
    margin = len(left) + sum(widths[first:start])
    marks = " " * margin + "^" * max(1, sum(widths[start : min(end, last)]))
    bar = f"{style.gutter}{indent} |{style.reset}"
    arrow = f"{style.gutter}-->{style.reset}"
    title = f"{style.error}error[{problem.code}]{style.reset}{style.strong}: "
    lines = [
        f"{title}{printable(problem.message)}{style.reset}",
        f"{indent}{arrow} {printable(filename)}:{problem.line}:{problem.column}",
        bar,
        f"{style.gutter}{number} |{style.reset} {source}",
        f"{bar} {style.error}{marks}{style.reset}",
    ]
    if problem.hint is not None:
        gutter = f"{indent} {style.gutter}={style.reset}"
        lines.append(f"{gutter} {style.strong}help{style.reset}: {printable(problem.hint)}")
    return "\n".join(lines) + "\n"


def printable(text: str) -> str:
    return text if text.isprintable() else "".join(_cell(character).text for character in text)


def _choose_window(widths: list[int], start: int, end: int, available: int) -> tuple[int, int]:
    """Return the range of cells to show: all, or the fault and more before it than after it."""
    if sum(widths) < available:  # less: a caret may stand one column behind the text
        return 0, len(widths)
    room = available - 2 * len(ELLIPSIS) - 1
    marked = start + _count_fitting(widths[start:end], room)
    room -= sum(widths[start:marked])
    after = marked + _count_fitting(widths[marked:], room // 3)
    first = start - _count_fitting(widths[:start][::-1], room - sum(widths[marked:after]))
    room -= sum(widths[first:start])
    return first, marked + _count_fitting(widths[marked:], room)


def _count_fitting(widths: list[int], room: int) -> int:
    for count, width in enumerate(widths):
        room -= width
        if room < 0:
            return count
    return len(widths)


def _cell(character: str) -> Cell:
    if " " <= character <= "~":
        return Cell(character, 1)
    code = ord(character)
    if code < FIRST_PRINTABLE:
        return Cell(chr(SYMBOL_FOR_NULL + code), 1)
    category = unicodedata.category(character)
    if category in INVISIBLE:
        name = f"<U+{code:04X}>"
        return Cell(name, len(name))
    if category in COMBINING:
        # A variation selector would change the width of the character before it, on some terminals.
        return Cell("" if code in VARIATION_SELECTORS else character, 0)
    return Cell(character, 2 if unicodedata.east_asian_width(character) in "WF" else 1)


OBJECT_FIELDS = (
    *("prompt", "logit_bias", "json_schema", "states"),
    *("messages", "response_format", "guided_json", "structured_outputs"),
)

# The names in the records of a field, and those that none may lack.  `prompt_tokens` holds none.
_RECORDS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "states": (Transition.__struct_fields__, Transition.__struct_fields__),
    "prompt": (PromptSegment.__struct_fields__, ()),
}

# How messages name a place inside a text.
_PLACE_IN_TEXT = re.compile(
    r"(?P<regex>in the regex '.*', )?"
    r"(?:offset (?P<offset>\d+)|line (?P<line>\d+), column (?P<column>\d+)|the end): ",
    re.DOTALL,
)

# A problem, its path being the one in the line, and its place if that is not the value at the path.
Finding = tuple[FieldProblem, json_spans.TextSpan | None]


class BadRequestError(Exception):
    """A line is no request; id: as it gives it, or else its line number."""

    def __init__(self, request_id: str, problems: list[Problem], form: openai.Form) -> None:
        self.id, self.problems, self.form = request_id, problems, form
        super().__init__(request_id)


def read_line(
    line: bytes, line_number: int, capabilities: ModelCapabilities
) -> tuple[Request, openai.Form]:
    """Return the request of `line` and how it is to be answered.

    Raises:
        BadRequestError: it is none; with its problems, the one to be mended first at the head.
    """
    try:
        text = line.decode()
        value = json_spans.parse(text)
    except UnicodeDecodeError as error:
        start = len(line[: error.start].decode())
        text = line.decode(errors="backslashreplace")
        span = json_spans.TextSpan(start, start + len(r"\xff") * (error.end - error.start))
        fault = FieldProblem("invalid-text", (), f"not UTF-8: {error.reason}")
    except json_spans.JsonError as error:
        fault, span = FieldProblem(error.code, (), error.message), error.span
    else:
        if isinstance(value, dict):
            return _Line(text, line_number, value, capabilities).read(capabilities)
        message, span = (
            f"a request is a JSON object, not {show(value)}",
            json_spans.find_value(text, ()),
        )
        fault = FieldProblem("invalid-json", (), message)
    problem = make_problem(fault, line_number, text, span)
    raise BadRequestError(str(line_number), [problem], "result")


def place_problem(problem: FieldProblem, line: bytes, line_number: int) -> Problem:
    """Return a problem of the request on the line `line`, which has been parsed, with its place."""
    text = line.decode()
    return _Line(text, line_number, json.loads(text), ModelCapabilities()).place(problem)


class _Line:
    """One line that is a JSON object, and where each field of the request is in it."""

    def __init__(
        self, text: str, number: int, fields: dict[str, Any], capabilities: ModelCapabilities
    ) -> None:
        self._text, self._number, self._fields = text, number, fields
        self._reading = openai.Reading(fields, capabilities)
        self._is_server = capabilities.served is not None

    def read(self, capabilities: ModelCapabilities) -> tuple[Request, openai.Form]:
        reading, default_id = self._reading, str(self._number)
        given: dict[str, Any] = {"prompt": ""}  # of which nothing is to be said if it is missing
        place = reading.path_of("prompt")
        if place[-1] in self._holder(place):
            given["prompt"] = None
        for name, value in reading.named.items():
            given[name] = _with_records(reading.path_of(name)[-1], value)
        request = Request(**given)
        if self._is_server:
            request = ServerRequest(**given, stated=reading.stated() | {"prompt"})
        findings = list(islice(self._check_layout(), MAX_PROBLEMS))
        problems = [self._show(*finding) for finding in findings]
        missing = {problem.path for problem, _ in findings if problem.code == "missing-field"}
        problems += (
            self.place(problem)
            for problem in find_problems(request, capabilities)[:MAX_PROBLEMS]
            if self._locate(problem) not in missing
        )
        form = openai.form_of(reading.url, request)
        if problems:
            request_id = request.id if isinstance(request.id, str) else default_id
            problems.sort(key=_rank)
            if problems[0].field in openai.ROW_FIELDS:  # what is inside a row is read by these
                problems = [problem for problem in problems if problem.field in openai.ROW_FIELDS]
            raise BadRequestError(request_id, problems, form)
        given = msgspec.structs.asdict(request)
        given["id"] = default_id if request.id is None else request.id
        # An integer where any number may stand becomes a float, as it does for every decoder.
        return msgspec.convert(given, type(request)), form

    def place(self, problem: FieldProblem) -> Problem:
        """Return `problem`, whose path is one in the request, with its place in the line."""
        message = problem.message
        if self._reading.is_echoing:
            message = message.replace("`prompt_logprobs`", "`echo` with `logprobs`")
        located = replace(problem, path=self._locate(problem), message=message)
        return self._show(located, self._span_of(located))

    def _span_of(self, problem: FieldProblem) -> json_spans.TextSpan | None:
        if problem.is_key:
            return json_spans.find_key(self._text, problem.path)
        place = _PLACE_IN_TEXT.search(problem.message)
        if place is None or problem.code not in {"invalid-grammar", "invalid-value"}:
            return None
        path = (*problem.path, "pattern") if place["regex"] else problem.path
        span = json_spans.find_value(self._text, path)
        if span == json_spans.find_value(self._text, path[:-1]):  # it is in a schema that is text
            return None
        text = msgspec.json.decode(self._text[span.start : span.end])
        if not isinstance(text, str):
            return None
        offset = int(place["offset"] or 0)
        if place["line"]:
            lines = text.splitlines(keepends=True)[: int(place["line"]) - 1]
            offset = sum(map(len, lines)) + int(place["column"]) - 1
        elif not place["offset"]:
            offset = len(text)
        return json_spans.find_character(self._text, span, offset)

    def _locate(self, problem: FieldProblem) -> Path:
        first, rest = problem.path[:1], problem.path[1:]
        return self._reading.path_of(str(first[0])) + rest if first else ()

    def _show(self, problem: FieldProblem, span: json_spans.TextSpan | None) -> Problem:
        span = span or json_spans.find_value(self._text, problem.path)
        return make_problem(problem, self._number, self._text, span)

    def _holder(self, path: Path) -> dict[Any, Any]:
        """Return the object that the field at `path` belongs into; an empty one if it is none."""
        holder = self._fields if len(path) == 1 else self._fields.get(str(path[0]))
        return holder if isinstance(holder, dict) else {}

    def _check_layout(self) -> Iterator[Finding]:
        """Yield what is wrong with the names, and with what stands beside fields of a request."""
        reading, fields = self._reading, self._fields
        for problem in reading.problems:
            yield problem, self._span_of(problem)
        if reading.url is not None:
            yield from self._check_names((), openai.ROW_FIELDS)
            if (method := fields.get("method")) not in (None, "POST"):
                message = f'`method` must be "POST", not {show(method)}'
                yield FieldProblem("unsupported-option", ("method",), message), None
            if openai.url_of(fields) is None:
                expected = " or ".join(f'"{value}"' for value in openai.URLS)
                message = f"`url` must be {expected}, not {show(fields.get('url'))}"
                yield FieldProblem("unsupported-option", ("url",), message), None
            if "body" not in fields:
                yield self._missing((), "body")
                return
            if not isinstance(fields["body"], dict):
                message = f"`body` must be an object, not {show(fields['body'])}"
                yield FieldProblem("invalid-type", ("body",), message), None
                return
        elif isinstance(fields.get("prompt_tokens"), str):
            message = "`prompt_tokens` must be a list of token ids, not a string"
            yield FieldProblem("invalid-type", ("prompt_tokens",), message, "use `prompt`"), None
        # Answers of servers are streamed, with their usage, whatever a row says.
        passed_on = (*openai.PASSED_ON, "stream", "stream_options") if self._is_server else ()
        path, values = reading.prefix, reading.values
        allowed = (*openai.KNOWN_NAMES[reading.url], *passed_on)
        findings = list(islice(self._check_names(path, allowed), MAX_PROBLEMS))
        yield from findings
        for name in OBJECT_FIELDS if json_spans.has_doubles(self._text) else ():
            if isinstance(values.get(name), dict | list):
                start = json_spans.find_value(self._text, (*path, name)).start
                for below, span, first in json_spans.find_doubles(self._text, start):
                    yield _doubled((*path, name, *below[:-1], cut(str(below[-1]))), first), span
        for field, (known, required) in _RECORDS.items():
            for below, record in _objects_in(field, values.get(field)):
                whole = (*path, field, *below)
                for name in (name for name in record if name not in known):
                    span = json_spans.find_key(self._text, (*whole, name))
                    yield _unknown((*whole, cut(name)), known), span
                for name in (name for name in required if name not in record):
                    yield self._missing(whole, name)
        names = [name for name in ("prompt", "prompt_tokens", "messages") if name in allowed]
        hints = {openai.HINT.format(name) for name in names}
        is_misspelt = any(problem.hint in hints for problem, _ in findings)
        is_there = names[0] in values or any(values.get(name) is not None for name in names)
        if not (is_there or is_misspelt):
            yield self._missing(path, names[0])
        for option, supported in openai.OPTIONS[reading.url].items():
            value, place = values.get(option), (*path, option)
            if option in passed_on or openai.is_supported(supported, value):
                continue
            if isinstance(supported, type):
                kind = {str: "a string", dict: "an object"}[supported]
                message = f"{quote(place)} must be {kind}, not {show(value)}"
                yield FieldProblem("invalid-type", place, message), None
            else:
                message = f"{quote(place)} {show(value)} is not supported"
                hint = " or ".join(["leave it out", *(f"give {json.dumps(v)}" for v in supported)])
                own = openai.own_name(option, Request.__struct_fields__)
                hint = hint if own is None else openai.HINT.format(own)
                yield FieldProblem("unsupported-option", place, message, hint), None

    def _check_names(self, path: Path, allowed: tuple[str, ...]) -> Iterator[Finding]:
        first: dict[str, json_spans.TextSpan] = {}
        start = json_spans.find_value(self._text, path).start
        for key, span, _ in json_spans.find_members(self._text, start):
            name = str(key)
            place = (*path, cut(name))
            if name in first:
                yield _doubled(place, first[name]), span
            elif name not in allowed and not (
                name in openai.UNSUPPORTED and self._holder(place).get(name) is None
            ):
                yield _unknown(place, allowed), span
            first.setdefault(name, span)

    def _missing(self, path: Path, name: str) -> Finding:
        start = json_spans.find_value(self._text, path).start
        problem = FieldProblem("missing-field", (*path, name), f"field `{name}` is missing")
        return problem, json_spans.TextSpan(start, start + 1)


def _rank(problem: Problem) -> tuple[int, int]:
    """Return what sorts the problems of a line: those that others may come from go first."""
    ranks = {"conflicting-fields": 2, "missing-field": 3}
    rank = 0 if problem.field in openai.ROW_FIELDS else ranks.get(problem.code, 1)
    return rank, problem.column


def _unknown(path: Path, allowed: tuple[str, ...]) -> FieldProblem:
    name = str(path[-1])
    is_foreign = name in openai.UNSUPPORTED and openai.own_name(name, allowed) is None
    if is_foreign and "prompt_logprobs" in allowed:  # where fields of a request belong
        message = f"{quote(path)} is known from OpenAI or vLLM, and not supported here"
        return FieldProblem("unsupported-option", path, message, "leave it out", is_key=True)
    hint = openai.suggest(name, allowed)
    if allowed is openai.ROW_FIELDS and any(name in names for names in openai.BODY_FIELDS.values()):
        hint = "it belongs inside `body`"
    if path[:-1] == ("body",):
        urls = [url for url, names in openai.BODY_FIELDS.items() if name in names]
        hint = f"it is for {urls[0]}" if urls else hint
    return FieldProblem("unknown-field", path, f"unknown field `{name}`", hint)


def _doubled(path: Path, first: json_spans.TextSpan) -> FieldProblem:
    hint = f"it is first given at column {first.start + 1}"
    return FieldProblem("duplicate-field", path, f"field `{path[-1]}` is given twice", hint)


def _objects_in(field: str, value: object) -> Iterator[tuple[Path, dict[str, Any]]]:
    lists: dict[Path, object] = {(): value}
    if field == "states":
        lists = {(name,): v for name, v in value.items()} if isinstance(value, dict) else {}
    for above, items in lists.items():
        for index, item in enumerate(items if isinstance(items, list) else ()):
            if isinstance(item, dict):
                yield (*above, index), item


def _with_records(name: str | int, value: Any) -> Any:
    """Return the value that a line gives a field by this name, with records for its objects.

    What is no object stays as it is, for the rules of validation to say what is wrong.
    """
    if name == "prompt" and isinstance(value, list):
        return [_record(PromptSegment, item) for item in value]
    if name == "states" and isinstance(value, dict):
        return {
            state: [_record(Transition, item) for item in items]
            if isinstance(items, list)
            else items
            for state, items in value.items()
        }
    return value


def _record(kind: type[Struct], item: Any) -> Any:
    if not isinstance(item, dict):
        return item
    given = {name: item[name] for name in kind.__struct_fields__ if item.get(name) is not None}
    return kind(**({"on": None, "to": None} if kind is Transition else {}) | given)
