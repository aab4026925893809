"""Requests from lines of JSON: one pass in C for a good line, a second look for every other.

Rule: the second look (`line_problems`) alone decides what is wrong; this file only has to be sure
of the lines it accepts by itself.
"""

import re
from itertools import islice
from typing import TYPE_CHECKING, Any, Literal

import msgspec
from msgspec import Struct
from msgspec.structs import force_setattr

from batcher.errors import FieldProblem
from batcher.request import REQUEST_FIELDS, Request, ServerRequest
from batcher.requests import openai
from batcher.requests.validation import (
    FREE_FIELDS,
    ModelCapabilities,
    checked_type,
    find_problems,
    goes_together,
)

if TYPE_CHECKING:
    from batcher.requests.problems import Problem

# Strings, names of fields among them, lists and objects of a line: each takes a hundred bytes and
# more once it is read, so they are counted before.
MAX_PARTS = 2**17

# The end of a string may be missing, lest each quote in what is no JSON be tried for a beginning.
_PART = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"?|[\[{]', re.DOTALL)

# Every key of the line, or "" where a quote and a colon end something else: a key with escapes or
# digits, or words in a string.  The decoder takes the last of two equal keys; if this finds a key
# twice, they may be of different objects, and a slower reader has to tell.
_KEY = re.compile(rb'"(?:([a-z_]+)"\s*:|\s*:)')

# Keys of lines that do not state each field by its own name.
_OTHER_KEYS = frozenset(
    n.encode() for n in ("body", *openai.SYNONYMS, *openai.SPELLINGS, *openai.OPTIONS[None])
)
_FREE_KEYS = frozenset(name.encode() for name in FREE_FIELDS)
_ROW_KEYS = frozenset(openai.ROW_FIELDS)
_KEYS = {url: frozenset(names) for url, names in openai.KNOWN_NAMES.items()}
_SERVER_KEYS = frozenset((*REQUEST_FIELDS, *openai.SYNONYMS, *openai.SPELLINGS, *openai.PASSED_ON))
_decode = msgspec.json.Decoder(Request).decode


Kind = Literal["free", "own", "respelled"]
"""Whether a line has only FREE_FIELDS, others by their own names, or says something otherwise."""

MAX_KINDS, MAX_KEYS = 1024, 64  # that are remembered, and of one of them


class ParsedLine(Struct, frozen=True):
    """A good line: its request, with an id, and how it is to be answered."""

    request: Request
    form: openai.Form = "result"


class BadLine(Struct, frozen=True):
    """A line that is no request: the id it gives, or else its line number, and its problems."""

    id: str
    problems: "list[Problem]"
    form: openai.Form = "result"


class RequestParser:
    """Parses the lines of one file; capabilities: what their requests are checked against.

    is_respelling: whether lines mean more than their fields say by their own names.
    """

    def __init__(self, capabilities: ModelCapabilities) -> None:
        self._capabilities = capabilities
        self._is_server = capabilities.served is not None
        self.is_respelling = (
            self._is_server or capabilities.takes_chats or bool(capabilities.defaults)
        )
        self._checked = checked_type(capabilities)
        self._free_fields = FREE_FIELDS | ({"extra_body"} if self._is_server else set())
        self._decode = msgspec.json.Decoder(self._checked).decode
        self._kinds: dict[tuple[bytes, ...], Kind] = {}  # by the keys of lines

    def parse(self, line: bytes, line_number: int) -> ParsedLine | BadLine:
        """Return the request of `line`, or what is wrong with it; no bytes make it raise."""
        if len(line) > MAX_PARTS:
            too_many = find_too_many(line, line_number)
            if too_many is not None:
                return BadLine(str(line_number), [too_many])
        try:
            parsed = self._parse_good(line, line_number)
        except (ValueError, RecursionError):  # not JSON or UTF-8, of another type, nested deeply
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
        """Return the request in the body of a row with that `url`, or what is wrong with it.

        It is what the row would be if it were alone in a file.  body: as read from JSON; whoever
        has read it has looked for too many parts.
        """
        row = {"method": "POST", "url": url, "body": body}
        try:
            parsed = self._convert(row, 1)
        except (ValueError, RecursionError):
            parsed = None
        return parsed or self.parse(msgspec.json.encode(row), 1)

    def _parse_good(self, line: bytes, line_number: int) -> ParsedLine | None:
        """Return the request of `line` if nothing about it is unusual; else None, or raise."""
        if b'"body"' in line:
            row = msgspec.json.decode(line)
            body = row.get("body") if isinstance(row, dict) else None
            # As many colons as keys: none is there twice, and no string or other object has one.
            if isinstance(body, dict) and len(row) + len(body) == line.count(b":"):
                return self._convert(row, line_number)
        keys = tuple(_KEY.findall(line))
        kind = self._kinds.get(keys) or self._kind_of(keys, line)
        if kind == "respelled":
            return self._convert(msgspec.json.decode(line), line_number)
        if kind == "free":
            request = self._decode(line)
            is_right = goes_together(request, self._capabilities)
        else:
            request = _decode(line)
            is_right = not find_problems(request, self._capabilities)
        if request.id is None:
            force_setattr(request, "id", str(line_number))
        return ParsedLine(request) if is_right else None

    def _kind_of(self, keys: tuple[bytes, ...], line: bytes) -> Kind:
        """Return how a line with these keys is read; raise if one is there twice."""
        found = keys
        if b"" in keys:
            found = tuple(_KEY.findall(line.replace(rb"\"", b"")))
        distinct = set(found)
        is_sure = found is keys and len(distinct) == len(keys)
        if len(distinct) < len(found) or b"" in distinct:
            from batcher.requests.json_spans import read_distinct  # noqa: PLC0415 - as in `parse`

            value = read_distinct(line)
            if not isinstance(value, dict):
                raise ValueError("not an object")
            body = value.get("body")
            names = value.keys() | (body.keys() if isinstance(body, dict) else ())
            distinct = {name.encode(errors="replace") for name in names}
        kind: Kind = "free" if distinct <= _FREE_KEYS else "own"
        if self.is_respelling or not distinct.isdisjoint(_OTHER_KEYS):
            kind = "respelled"
        if is_sure and len(keys) <= MAX_KEYS and len(self._kinds) < MAX_KINDS:
            self._kinds[keys] = kind
        return kind

    def _convert(self, whole: Any, line_number: int) -> ParsedLine | None:
        """Return the request of a decoded line as `_parse_good` does."""
        if not isinstance(whole, dict):
            return None
        reading = openai.Reading(whole, self._capabilities)
        if reading.problems or not self._is_usual(whole, reading):
            return None
        fields = reading.named
        fields.setdefault("id", str(line_number))
        is_free = fields.keys() <= self._free_fields
        if self._is_server:
            fields["stated"] = reading.stated()
        if is_free:
            request = msgspec.convert(fields, self._checked)
            is_right = goes_together(request, self._capabilities)
        else:
            kind: type[Request] = ServerRequest if self._is_server else Request
            request = msgspec.convert(fields, kind)
            is_right = not find_problems(request, self._capabilities)
        return ParsedLine(request, openai.form_of(reading.url, request)) if is_right else None

    def _is_usual(self, whole: dict[str, Any], reading: openai.Reading) -> bool:
        """Return whether each name is known, and whether those that are no fields ask nothing."""
        values = reading.values
        if reading.url is not None and not (
            whole.keys() <= _ROW_KEYS
            and whole.get("method") in (None, "POST")
            and openai.url_of(whole) is not None
            and whole.get("body") is values
            and not self._is_server  # a row may pass on what is no field of a request
        ):
            return False
        options = openai.OPTIONS[reading.url]
        if not values.keys() <= (_SERVER_KEYS if self._is_server else _KEYS[reading.url]):
            return False
        if not self._is_server and not values.keys().isdisjoint(options):
            named = ((options[name], value) for name, value in values.items() if name in options)
            if not all(openai.is_supported(supported, value) for supported, value in named):
                return False
        tokens = None if reading.url else values.get("prompt_tokens")
        return tokens is None or (type(tokens) is list and set(map(type, tokens)) <= {int})


def find_too_many(line: bytes, line_number: int) -> "Problem | None":
    """Return the problem of a line that has more than MAX_PARTS parts; None of any other."""
    most = line.count(b'"') // 2 + line.count(b"[") + line.count(b"{")
    if most <= MAX_PARTS or next(islice(_PART.finditer(line), MAX_PARTS, None), None) is None:
        return None
    from batcher.requests.json_spans import TextSpan  # noqa: PLC0415 - as above
    from batcher.requests.problems import CONTEXT, make_problem  # noqa: PLC0415 - as in `parse`

    message = (
        f"the line has more than {MAX_PARTS} strings, lists and objects, names of fields "
        f"included; at most {MAX_PARTS} are allowed"
    )
    hint = "a list of token ids is one of them, however long; join texts and messages to fewer"
    start = line[:CONTEXT].decode(errors="replace")
    problem = FieldProblem("too-many-parts", (), message, hint)
    return make_problem(problem, line_number, start, TextSpan(0, 1))
