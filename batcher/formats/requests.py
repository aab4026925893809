"""Requests from lines of JSON: one pass in C for a good line, a second look for every other.

Rule: the second look (`line_problems`) alone decides what is wrong; this file only has to be sure
of the lines it accepts by itself.
"""

import re
from typing import Any

from msgspec import Struct

from batcher.formats.decoders import PLAIN_KEYS, FullDecoder, PlainDecoder
from batcher.formats.diagnostics import Problem
from batcher.formats.json_spans import read_distinct
from batcher.formats.line_parts import find_too_many
from batcher.formats.line_problems import BadRequestError, read_line
from batcher.formats.openai import OPTIONS, Form, form_of, has_only_supported_options
from batcher.formats.spellings import SPELLED_KEYS, SPELLED_KEYS_OF_ROWS
from batcher.request import PromptInput, Request
from batcher.validation import ModelCapabilities

# Every key of the line, or "" where a quote and a colon end something else: a key with escapes or
# digits, or words in a string.  The decoder takes the last of two equal keys; if this finds a key
# twice, they may be of different objects, and a slower reader has to tell.
_KEY = re.compile(rb'"(?:([a-z_]+)"\s*:|\s*:)')


class ParsedLine(Struct, frozen=True):
    """A good line: its request, with an id, and how it is to be answered."""

    request: Request
    form: Form = "result"


class BadLine(Struct, frozen=True):
    """A line that is no request: the id it gives, or else its line number, and its problems."""

    id: str
    problems: list[Problem]
    form: Form = "result"


class RequestParser:
    """Parses the lines of one file; capabilities: what their requests are checked against."""

    def __init__(self, capabilities: ModelCapabilities) -> None:
        self._capabilities = capabilities
        self._plain = PlainDecoder(capabilities)
        self._full = FullDecoder(capabilities)

    def parse(self, line: bytes, line_number: int) -> ParsedLine | BadLine:
        """Return the request of `line`, or what is wrong with it; no bytes make it raise."""
        too_many = find_too_many(line, line_number)
        if too_many is not None:
            return BadLine(str(line_number), [too_many])
        try:
            parsed = self._parse_good(line, line_number)
        except (ValueError, RecursionError):  # not JSON or UTF-8, of another type, nested deeply
            parsed = None
        if parsed is not None:
            return parsed
        try:
            request, form = read_line(line, line_number, self._capabilities)
        except BadRequestError as error:
            return BadLine(error.id, error.problems, error.form)
        return ParsedLine(request, form)

    def _parse_good(self, line: bytes, line_number: int) -> ParsedLine | None:
        """Return the request of `line` if nothing about it is unusual."""
        keys = _KEY.findall(line)
        if b"" in keys:
            keys = _KEY.findall(line.replace(rb"\"", b""))
        distinct = set(keys)
        decoder = self._plain if distinct <= PLAIN_KEYS else self._full
        if len(distinct) < len(keys) or b"" in distinct:
            distinct = _read_keys(line)
        is_openai = b"body" in distinct
        if is_openai and b"id" in distinct:
            return None  # the decoder would take a body's id if it is null
        if distinct & (SPELLED_KEYS_OF_ROWS if is_openai else SPELLED_KEYS):
            decoder, parsed = self._full, self._full.respelled(line, is_row=is_openai)
            if parsed is None:
                return None
        else:
            parsed = decoder.row(line) if is_openai else decoder.line(line)
        found = _read_row(parsed) if is_openai else _read_line(parsed)
        if found is None:
            return None
        fields, request_id, prompt = found
        request = decoder.make(
            fields, str(line_number) if request_id is None else request_id, prompt
        )
        if request is None:
            return None
        return ParsedLine(request, form_of(parsed.url if is_openai else None, request))


Found = tuple[Any, str | None, PromptInput]  # the fields, with the id and the prompt they mean


def _read_line(fields: Any) -> Found | None:
    request_id, prompt = fields.id, fields.prompt
    if fields.custom_id is not None:
        if request_id is not None:
            return None
        request_id = fields.custom_id
    if prompt is None:
        prompt = fields.prompt_tokens
    elif fields.prompt_tokens is not None:
        return None
    return None if prompt is None else (fields, request_id, prompt)


def _read_row(row: Any) -> Found | None:
    if not has_only_supported_options(row.body, OPTIONS[row.url]):
        return None
    return row.body, row.custom_id, row.body.prompt


def _read_keys(line: bytes) -> set[bytes]:
    """Return the keys of the line and of its body, which no other object's keys are mixed with.

    Raises:
        ValueError: an object in the line has two equal keys, or the line is not one.
    """
    value = read_distinct(line)
    if not isinstance(value, dict):
        raise ValueError("not an object")  # noqa: TRY004 - as the decoders say it
    body = value.get("body")
    names = value.keys() | (body.keys() if isinstance(body, dict) else ())
    return {name.encode(errors="replace") for name in names}
