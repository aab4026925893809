"""All problems of a line, each at its place, and how they are shown: the line with a caret.

It works on raw values, where a typed decoder stops at the first mistake.  Rule: this alone decides
whether a line is a request.  Only printable text of known width reaches a terminal.
"""

import json
import re
import unicodedata
from collections.abc import Iterator
from itertools import islice
from typing import Any

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
    missing,
    show,
)

CONTEXT = 500  # characters on either side of a problem: more than a terminal is wide
MIN_SOURCE_WIDTH = 20
ELLIPSIS = "…"
FIRST_PRINTABLE = 0x20
SYMBOL_FOR_NULL = 0x2400  # first of the pictures of control characters
INVISIBLE = frozenset(("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"))
COMBINING = frozenset(("Mn", "Me"))
VARIATION_SELECTORS = range(0xFE00, 0xFE10)


class Problem(Struct, frozen=True):
    """One mistake in one line.

    line and column count from 1, column and width in characters.  source: the text around the
    place, with "…" where it is cut; source_start: the column of its first character.
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


# Escape sequences: error, bold, gutter, reset.
ANSI = ("\x1b[1;31m", "\x1b[1m", "\x1b[1;34m", "\x1b[0m")


def make_problem(problem: FieldProblem, line: int, text: str, span: json_spans.TextSpan) -> Problem:
    """Return a problem at `span` of the line `text`, with the text around it."""
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
    """Return the problem as text with a caret; the line is cut to `width` columns."""
    error, strong, gutter, reset = ANSI if color else ("", "", "", "")
    number = str(problem.line)
    indent = " " * len(number)
    texts, widths = zip(*map(_cell, problem.source), strict=True) if problem.source else ((), ())
    start = min(problem.column - problem.source_start, len(texts))
    end = min(start + problem.width, len(texts))
    available = max(MIN_SOURCE_WIDTH, width - len(number) - 3)
    first, last = 0, len(texts)
    if sum(widths) >= available:  # or equal: the caret may be one column behind the text
        first, last = _choose_window(list(widths), start, end, available)
    left = ELLIPSIS if first > 0 else ""
    right = ELLIPSIS if last < len(texts) else ""
    source = left + "".join(texts[first:last]) + right
    margin = len(left) + sum(widths[first:start])
    marks = " " * margin + "^" * max(1, sum(widths[start : min(end, last)]))
    bar = f"{gutter}{indent} |{reset}"
    place = f"{printable(filename)}:{problem.line}:{problem.column}"
    lines = [
        f"{error}error[{problem.code}]{reset}{strong}: {printable(problem.message)}{reset}",
        f"{indent}{gutter}-->{reset} {place}",
        bar,
        f"{gutter}{number} |{reset} {source}",
        f"{bar} {error}{marks}{reset}",
    ]
    if problem.hint is not None:
        hint = printable(problem.hint)
        lines.append(f"{indent} {gutter}={reset} {strong}help{reset}: {hint}")
    return "\n".join(lines) + "\n"


def printable(text: str) -> str:
    return text if text.isprintable() else "".join(_cell(character)[0] for character in text)


def _choose_window(widths: list[int], start: int, end: int, available: int) -> tuple[int, int]:
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


def _cell(character: str) -> tuple[str, int]:
    """Return the text to print for a character, and its number of columns."""
    if " " <= character <= "~":
        return character, 1
    code = ord(character)
    if code < FIRST_PRINTABLE:
        return chr(SYMBOL_FOR_NULL + code), 1
    category = unicodedata.category(character)
    if category in INVISIBLE:
        name = f"<U+{code:04X}>"
        return name, len(name)
    if category in COMBINING:
        # On some terminals a variation selector changes the width of the character before it.
        return "" if code in VARIATION_SELECTORS else character, 0
    return character, 2 if unicodedata.east_asian_width(character) in "WF" else 1


# Fields with objects that may not have two equal names, at any depth.
OBJECT_FIELDS = (
    *("prompt", "logit_bias", "json_schema", "states"),
    *("messages", "response_format", "guided_json", "structured_outputs"),
)
# Missing fields that are shown at the first character of their object.
_MISSING_FROM = {"body", "prompt", "messages", "on", "to"}

# A place inside a text, as messages name it.
_PLACE_IN_TEXT = re.compile(
    r"(?P<regex>in the regex '.*', )?"
    r"(?:offset (?P<offset>\d+)|line (?P<line>\d+), column (?P<column>\d+)|the end): ",
    re.DOTALL,
)


class BadRequestError(Exception):
    """A line is not a request; id: its own, or else its line number."""

    def __init__(self, request_id: str, problems: list[Problem], form: openai.Form) -> None:
        self.id, self.problems, self.form = request_id, problems, form
        super().__init__(request_id)


def read_line(
    line: bytes, line_number: int, capabilities: ModelCapabilities
) -> tuple[Request, openai.Form]:
    """Return the request of `line` and its form, or raise a BadRequestError with all problems."""
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
            return _read_object(text, line_number, value, capabilities)
        message = f"a request is a JSON object, not {show(value)}"
        fault, span = FieldProblem("invalid-json", (), message), json_spans.find_value(text, ())
    problem = make_problem(fault, line_number, text, span)
    raise BadRequestError(str(line_number), [problem], "result")


def place_problem(problem: FieldProblem, line: bytes, line_number: int) -> Problem:
    """Return a problem of the request on a parsed line, with its place."""
    text = line.decode()
    reading = openai.Reading(json.loads(text), ModelCapabilities())
    return _show(_located(problem, reading), line_number, text)


def _read_object(
    text: str, number: int, fields: dict[str, Any], capabilities: ModelCapabilities
) -> tuple[Request, openai.Form]:
    reading = openai.Reading(fields, capabilities)
    problems = [*islice(_find_doubled(text, number, reading), MAX_PROBLEMS)]
    findings = [*islice(reading.find_misplaced(), MAX_PROBLEMS)]
    given: dict[str, Any] = {"prompt": ""}  # a missing prompt is reported once
    *above, name = reading.path_of("prompt")
    if name in (reading.values if above else fields):
        given["prompt"] = None
    for name, value in reading.named.items():
        path = reading.path_of(name)
        given[name] = _with_records(path, value, findings)
    request = Request(**given)
    if capabilities.served is not None:
        request = ServerRequest(**given, stated=reading.stated() | {"prompt"})
    missing = {found.path for found in findings if found.code == "missing-field"}
    others = (_located(found, reading) for found in find_problems(request, capabilities))
    findings += (found for found in islice(others, MAX_PROBLEMS) if found.path not in missing)
    form = openai.form_of(reading.url, request)
    problems += (_show(found, number, text) for found in findings)
    if problems:
        problems.sort(key=_rank)
        if problems[0].field in openai.ROW_FIELDS:  # these decide how the rest is read
            problems = [problem for problem in problems if problem.field in openai.ROW_FIELDS]
        raise BadRequestError(
            request.id if isinstance(request.id, str) else str(number), problems, form
        )
    given = msgspec.structs.asdict(request)
    given["id"] = str(number) if request.id is None else request.id
    # An integer becomes a float where the type is float.
    return msgspec.convert(given, type(request)), form


def _find_doubled(text: str, number: int, reading: openai.Reading) -> Iterator[Problem]:
    """Yield doubled names where they are mistakes: of the request, and in OBJECT_FIELDS."""
    start = len(reading.prefix)
    for path, span, first in json_spans.find_doubles(text):
        inner = path[start:] if path[:start] == reading.prefix else ()
        if len(path) == 1 or len(inner) == 1 or (inner and inner[0] in OBJECT_FIELDS):
            name, hint = cut(str(path[-1])), f"it is first given at column {first.start + 1}"
            message = f"field `{name}` is given twice"
            problem = FieldProblem("duplicate-field", (*path[:-1], name), message, hint)
            yield make_problem(problem, number, text, span)


def _located(problem: FieldProblem, reading: openai.Reading) -> FieldProblem:
    message, path = problem.message, problem.path
    if reading.is_echoing:
        message = message.replace("`prompt_logprobs`", "`echo` with `logprobs`")
    if path:
        path = reading.path_of(str(path[0])) + path[1:]
    return replace(problem, path=path, message=message)


def _show(problem: FieldProblem, number: int, text: str) -> Problem:
    path, span = problem.path, _span_of(problem, text)
    if problem.is_key:
        problem = replace(problem, path=(*path[:-1], cut(str(path[-1]))))
    return make_problem(problem, number, text, span)


def _span_of(problem: FieldProblem, text: str) -> json_spans.TextSpan:
    path = problem.path
    if problem.is_key:
        return json_spans.find_key(text, path)
    span = json_spans.find_value(text, path)
    if problem.code == "missing-field" and path and path[-1] in _MISSING_FROM:
        return json_spans.TextSpan(span.start, span.start + 1)
    place = _PLACE_IN_TEXT.search(problem.message)
    if place is None or problem.code not in {"invalid-grammar", "invalid-value"}:
        return span
    path = (*path, "pattern") if place["regex"] else path
    inner = json_spans.find_value(text, path)
    if inner == json_spans.find_value(text, path[:-1]):  # in a schema that is text
        return span
    value = msgspec.json.decode(text[inner.start : inner.end])
    if not isinstance(value, str):
        return span
    offset = int(place["offset"] or 0)
    if place["line"]:
        lines = value.splitlines(keepends=True)[: int(place["line"]) - 1]
        offset = sum(map(len, lines)) + int(place["column"]) - 1
    elif not place["offset"]:
        offset = len(value)
    return json_spans.find_character(text, inner, offset)


def _rank(problem: Problem) -> tuple[int, int]:
    # Problems that may cause others come first.
    ranks = {"conflicting-fields": 2, "missing-field": 3}
    rank = 0 if problem.field in openai.ROW_FIELDS else ranks.get(problem.code, 1)
    return rank, problem.column


def _with_records(path: Path, value: Any, findings: list[FieldProblem]) -> Any:
    """Return the value of a field with records for its objects; bad names join `findings`."""

    def record(kind: type[Struct], item: Any, at: Path) -> Any:
        if not isinstance(item, dict):
            return item
        known, required = kind.__struct_fields__, ("on", "to") if kind is Transition else ()
        findings.extend(openai.unknown((*at, name), known) for name in item if name not in known)
        findings.extend(missing((*at, name)) for name in required if name not in item)
        given = {name: item[name] for name in known if item.get(name) is not None}
        return kind(**dict.fromkeys(required) | given)

    if path[-1] == "prompt" and isinstance(value, list):
        return [record(PromptSegment, item, (*path, at)) for at, item in enumerate(value)]
    if path[-1] == "states" and isinstance(value, dict):
        return {
            state: [record(Transition, item, (*path, state, at)) for at, item in enumerate(items)]
            if isinstance(items, list)
            else items
            for state, items in value.items()
        }
    return value
