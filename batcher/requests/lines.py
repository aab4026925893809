"""Requests from lines of JSON: one pass in C for a good line, a second look for every other.

Rule: the second look (`line_problems`) alone decides what is wrong; this file only has to be sure
of the lines it accepts by itself.
"""

import re
from itertools import islice
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec import Struct
from msgspec.structs import force_setattr

from batcher.errors import FieldProblem
from batcher.request import Request, ServerRequest
from batcher.requests.openai import (
    BODY_FIELDS,
    OPTIONS,
    ROW_FIELDS,
    SPELLINGS,
    SYNONYMS,
    Fields,
    Form,
    Supported,
    defaults_of,
    form_of,
    is_supported,
    respell,
    spellings_of,
    url_of,
)
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
_OTHER_KEYS = frozenset(n.encode() for n in ("body", *SYNONYMS, *SPELLINGS, *OPTIONS[None]))
_FREE_KEYS = frozenset(name.encode() for name in FREE_FIELDS)
_ROW_KEYS = frozenset(ROW_FIELDS)
_BODY_KEYS = {url: frozenset(names) for url, names in BODY_FIELDS.items()}
_decode = msgspec.json.Decoder(Request).decode


class ParsedLine(Struct, frozen=True):
    """A good line: its request, with an id, and how it is to be answered."""

    request: Request
    form: Form = "result"


class BadLine(Struct, frozen=True):
    """A line that is no request: the id it gives, or else its line number, and its problems."""

    id: str
    problems: "list[Problem]"
    form: Form = "result"


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
        """Return the request of `line` if nothing about it is unusual.

        Raises:
            ValueError, RecursionError: something is.
        """
        if b'"body"' in line:
            row = msgspec.json.decode(line)
            body = row.get("body") if isinstance(row, dict) else None
            # As many colons as keys: none is there twice, and no string or other object has one.
            if isinstance(body, dict) and len(row) + len(body) == line.count(b":"):
                return self._convert(row, line_number)
        keys = _KEY.findall(line)
        if b"" in keys:
            keys = _KEY.findall(line.replace(rb"\"", b""))
        distinct = set(keys)
        if len(distinct) < len(keys) or b"" in distinct:
            distinct = _read_keys(line)
        if self.is_respelling:
            return self._convert(msgspec.json.decode(line), line_number)
        if distinct <= _FREE_KEYS:
            request = self._decode(line)
            is_right = goes_together(request, self._capabilities)
        elif distinct.isdisjoint(_OTHER_KEYS):
            request = _decode(line)
            is_right = not find_problems(request, self._capabilities)
        else:
            return self._convert(msgspec.json.decode(line), line_number)
        if request.id is None:
            force_setattr(request, "id", str(line_number))
        return ParsedLine(request) if is_right else None

    def _convert(self, whole: Any, line_number: int) -> ParsedLine | None:
        """Return the request of a line that was decoded, if nothing about it is unusual.

        Raises:
            ValueError, RecursionError: something is.
        """
        url, given, fields = self._respell(whole)
        for name, value in defaults_of(given, self._capabilities).items():
            if fields.get(name) is None:
                fields[name] = value
        if fields.get("id") is None:
            fields["id"] = str(line_number)
        is_free = fields.keys() <= self._free_fields
        if self._is_server:
            fields["stated"] = frozenset((*fields, *given))
        if is_free:
            request = msgspec.convert(fields, self._checked)
            is_right = goes_together(request, self._capabilities)
        else:
            kind: type[Request] = ServerRequest if self._is_server else Request
            request = msgspec.convert(fields, kind)
            is_right = not find_problems(request, self._capabilities)
        return ParsedLine(request, form_of(url, request)) if is_right else None

    def _respell(self, whole: Any) -> tuple[str | None, dict[str, Any], dict[str, Any]]:
        """Return the url, None of what is no row, and the fields: as given, and by their own names.

        Raises:
            ValueError: something about them is unusual.
        """
        url, values, is_server = None, whole, self._is_server
        if isinstance(whole, dict) and "body" in whole:
            if is_server:
                raise ValueError("a row may pass on what is no field of a request")
            url = url_of(whole)
            values = None if url is None else _fields_of_row(whole, url)
        elif isinstance(whole, dict):
            values = _without_synonyms(
                whole if is_server else _without_options(whole, OPTIONS[None])
            )
        fields = Fields(values, self._capabilities)
        if not isinstance(values, dict):
            raise ValueError("no object holds the fields")  # noqa: TRY004 - as the decoders say it
        spellings = spellings_of(url, reads_text=fields.reads_text, is_server=is_server)
        named = respell(fields, spellings)
        if named is None:
            raise ValueError("not by the names of a request alone")
        return url, values, named


def _fields_of_row(row: dict[str, Any], url: str) -> dict[str, Any] | None:
    """Return the fields of the request in a row, its id included; None of one that is unusual."""
    body = row["body"]
    if row.get("method") not in (None, "POST") or not row.keys() <= _ROW_KEYS:
        return None
    if not isinstance(body, dict) or not body.keys() <= _BODY_KEYS[url]:
        return None
    fields = _without_options(body, OPTIONS[url])
    if fields is not None:
        fields["id"] = row.get("custom_id")
    return fields


def _without_options(fields: dict[str, Any], options: Supported) -> dict[str, Any] | None:
    """Return `fields` without the options, which ask for nothing; None if one does."""
    kept = {}
    for name, value in fields.items():
        if name not in options:
            kept[name] = value
        elif not is_supported(options[name], value):
            return None
    return kept


def _without_synonyms(line: dict[str, Any] | None) -> dict[str, Any] | None:
    if line is None:
        return None
    fields = dict(line)
    for synonym, name in SYNONYMS.items():
        value = fields.pop(synonym, None)
        if value is None:
            continue
        if fields.get(name) is not None:
            return None
        if name == "prompt" and not (type(value) is list and set(map(type, value)) <= {int}):
            return None
        fields[name] = value
    return fields


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


def _read_keys(line: bytes) -> set[bytes]:
    """Return the keys of the line and of its body, which no other object's keys are mixed with.

    Raises:
        ValueError: an object in the line has two equal keys, or the line is not one.
    """
    from batcher.requests.json_spans import read_distinct  # noqa: PLC0415 - as in `parse`

    value = read_distinct(line)
    if not isinstance(value, dict):
        raise ValueError("not an object")  # noqa: TRY004 - as the decoders say it
    body = value.get("body")
    names = value.keys() | (body.keys() if isinstance(body, dict) else ())
    return {name.encode(errors="replace") for name in names}
