"""Requests from lines of JSON: one pass in C for a good line, a second look for every other.

The second look, `read_line`, decides what is wrong; the first only has to be sure of good lines.
"""

import re
from collections.abc import Callable, Sequence
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec import Struct
from msgspec.structs import force_setattr

from batcher.errors import FieldProblem
from batcher.request import Request, ServerRequest
from batcher.requests import openai
from batcher.requests.validation import (
    ModelCapabilities,
    checked_type,
    find_problems,
    goes_together,
)

if TYPE_CHECKING:
    from batcher.requests.problems import Problem

# Strings, field names, lists and objects in a line: each takes a hundred bytes and more once it is
# read, so they are counted first.
MAX_PARTS = 2**17

# The end of a string is optional: otherwise each quote of broken JSON would be tried as a start.
_PART = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"?|[\[{]', re.DOTALL)

# Every key of the line, or "" where a quote and a colon end something else: a key with escapes or
# digits, or words in a string.  The decoder takes the last of two equal keys; if this finds a key
# twice, they may be in different objects, and a slower reader decides.
_KEY = re.compile(rb'"(?:([a-z_]+)"\s*:|\s*:)')


class ParsedLine(Struct, frozen=True):
    """The request of a good line, with an id, and the form of its answer."""

    request: Request
    form: openai.Form = "result"


class BadLine(Struct, frozen=True):
    """The id of a bad line, or else its number, and its problems."""

    id: str
    problems: "list[Problem]"
    form: openai.Form = "result"


class RequestParser:
    """Parses the lines of one file, and checks the requests against `capabilities`.

    is_respelling: fields may have other spellings, or defaults.
    """

    def __init__(self, capabilities: ModelCapabilities) -> None:
        self._capabilities = capabilities
        self._is_server = capabilities.served is not None
        self.is_respelling = (
            self._is_server or capabilities.takes_chats or bool(capabilities.defaults)
        )
        base: type[Request] = ServerRequest if self._is_server else Request
        self._checked = checked_type(capabilities.vocab_size, base)
        kinds = (self._checked, base)  # the second for segments, which the first refuses
        self._decoders = [msgspec.json.Decoder(kind).decode for kind in kinds]
        self._converters = [partial(msgspec.convert, type=kind) for kind in kinds]

    def parse(self, line: bytes, line_number: int) -> ParsedLine | BadLine:
        """Return the request of `line`, or its problems; no bytes make it raise."""
        if len(line) > MAX_PARTS:
            too_many = find_too_many(line, line_number)
            if too_many is not None:
                return BadLine(str(line_number), [too_many])
        try:
            parsed = self._parse_good(line, line_number)
        except (ValueError, RecursionError):  # not JSON or UTF-8, or nested deeply
            parsed = None
        if parsed is not None:
            return parsed
        from batcher.requests.problems import BadRequestError, read_line  # noqa: PLC0415 - good lines need none of it

        try:
            request, form = read_line(line, line_number, self._capabilities)
        except BadRequestError as error:
            return BadLine(error.id, error.problems, error.form)
        return ParsedLine(request, form)

    def parse_body(self, url: str, body: dict[str, Any]) -> ParsedLine | BadLine:
        """Return the request in the body of a row for `url`, or its problems.

        It equals the request of the row alone in a file.  body: checked for too many parts.
        """
        row = {"method": "POST", "url": url, "body": body}
        try:
            parsed = self._convert(row, 1)
        except (ValueError, RecursionError):
            parsed = None
        return parsed or self.parse(msgspec.json.encode(row), 1)

    def _parse_good(self, line: bytes, line_number: int) -> ParsedLine | None:
        """Return the request of a plain line; None, or an error, for any other."""
        if b'"body"' in line:
            row = msgspec.json.decode(line)
            body = row.get("body") if isinstance(row, dict) else None
            # as many colons as keys: no key is there twice, and no string or other object has one
            if isinstance(body, dict) and len(row) + len(body) == line.count(b":"):
                return self._convert(row, line_number)
        keys = _KEY.findall(line)
        if b"" in keys:
            keys = _KEY.findall(line.replace(rb"\"", b""))
        if len({*keys, b""}) <= len(keys):  # one is there twice, or is unknown
            from batcher.requests.json_spans import read_distinct  # noqa: PLC0415 - as in `parse`

            read_distinct(line)
        if not self.is_respelling:
            request = self._first_right(self._decoders, line)
            if request is not None:
                if request.id is None:
                    force_setattr(request, "id", str(line_number))
                return ParsedLine(request)
        return self._convert(msgspec.json.decode(line), line_number)

    def _convert(self, whole: Any, line_number: int) -> ParsedLine | None:
        if not isinstance(whole, dict):
            return None
        reading = openai.Reading(whole, self._capabilities)
        if any(reading.find_misplaced()):
            return None
        fields = reading.named
        fields.setdefault("id", str(line_number))
        if reading.path_of("prompt")[-1] == "prompt_tokens":  # which holds no segments
            tokens = fields["prompt"]
            if type(tokens) is not list or not set(map(type, tokens)) <= {int}:
                return None
        if self._is_server:
            fields["stated"] = reading.stated()
        found = self._first_right(self._converters, fields)
        return None if found is None else ParsedLine(found, openai.form_of(reading.url, found))

    def _first_right(
        self, readers: Sequence[Callable[[Any], Request]], given: Any
    ) -> Request | None:
        for read in readers:
            try:
                request = read(given)
            except msgspec.ValidationError:
                continue
            if type(request) is self._checked:
                is_right = goes_together(request, self._capabilities)
            else:
                is_right = not find_problems(request, self._capabilities)
            if is_right:
                return request
        return None


def find_too_many(line: bytes, line_number: int) -> "Problem | None":
    """Return the problem of a line with more than MAX_PARTS parts, else None."""
    most = line.count(b'"') // 2 + line.count(b"[") + line.count(b"{")
    if most <= MAX_PARTS or next(islice(_PART.finditer(line), MAX_PARTS, None), None) is None:
        return None
    from batcher.requests.json_spans import TextSpan  # noqa: PLC0415 - as above
    from batcher.requests.problems import CONTEXT, make_problem  # noqa: PLC0415 - as in `parse`

    message = f"the line has more than {MAX_PARTS} strings, field names, lists and objects"
    hint = "a list of token ids counts once; merge texts and messages"
    start = line[:CONTEXT].decode(errors="replace")
    problem = FieldProblem("too-many-parts", (), message, hint)
    return make_problem(problem, line_number, start, TextSpan(0, 1))
