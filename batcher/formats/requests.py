"""Requests from lines of JSON: one pass in C for a good line, a second look for every other.

Rule: the second look (`line_problems`) alone decides what is wrong; this file only has to be sure
of the lines it accepts by itself.
"""

import re

import msgspec
from msgspec import Struct

from batcher.formats.diagnostics import Problem
from batcher.formats.line_problems import BadRequestError, read_line
from batcher.formats.openai import BatchRow, has_only_supported_options
from batcher.request import Request, TokenId
from batcher.validation import find_problems

# Every key of the line, or "" where a quote and a colon end something else: a key with escapes, or
# words in a string.  The decoder takes the last of two equal keys; this is what notices them.
_KEY = re.compile(rb'"(?:([a-z_]+)"\s*:|\s*:)')


class RequestLine(Request, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A line that is a request, by whichever names of its fields."""

    prompt: str | list[TokenId] | None = None  # type: ignore[assignment]  # or prompt_tokens is given
    custom_id: str | None = None
    prompt_tokens: list[TokenId] | None = None


class ParsedLine(Struct, frozen=True):
    """A good line: its request, with an id; is_openai: the answer is to be an OpenAI row, too."""

    request: Request
    is_openai: bool


class BadLine(Struct, frozen=True):
    """A line that is no request: the id it gives, or else its line number, and its problems."""

    id: str
    is_openai: bool
    problems: list[Problem]


class RequestParser:
    """Parses the lines of one file.

    vocab_size: one more than the largest token id the model knows, None if it takes any.
    """

    def __init__(self, *, vocab_size: int | None) -> None:
        self._vocab_size = vocab_size
        self._decode_request = msgspec.json.Decoder(RequestLine).decode
        self._decode_row = msgspec.json.Decoder(BatchRow).decode

    def parse(self, line: bytes, line_number: int) -> ParsedLine | BadLine:
        """Return the request of `line`, or what is wrong with it; no bytes make it raise."""
        try:
            parsed = self._parse_good(line, line_number)
        except (ValueError, RecursionError):  # not JSON or UTF-8, of another type, nested deeply
            parsed = None
        if parsed is not None:
            return parsed
        try:
            request, is_openai = read_line(line, line_number, self._vocab_size)
        except BadRequestError as error:
            return BadLine(error.id, error.is_openai, error.problems)
        return ParsedLine(request, is_openai)

    def _parse_good(self, line: bytes, line_number: int) -> ParsedLine | None:
        """Return the request of `line` if nothing about it is unusual."""
        keys = _KEY.findall(line)
        if b"" in keys:
            keys = _KEY.findall(line.replace(rb"\"", b""))
        if len(set(keys)) != len(keys) or b"" in keys:
            return None
        is_openai = b"body" in keys
        if is_openai and b"id" in keys:
            return None  # the decoder would take a body's id if it is null
        read = self._read_row if is_openai else self._read_request
        request = read(line, str(line_number))
        if request is None or find_problems(request, self._vocab_size):
            return None
        return ParsedLine(request, is_openai)

    def _read_request(self, line: bytes, default_id: str) -> Request | None:
        fields = self._decode_request(line)
        request_id, prompt = fields.id, fields.prompt
        if fields.custom_id is not None:
            if request_id is not None:
                return None
            request_id = fields.custom_id
        if prompt is None:
            prompt = fields.prompt_tokens
        elif fields.prompt_tokens is not None:
            return None
        if prompt is None:
            return None
        return _plain(fields, default_id if request_id is None else request_id, prompt)

    def _read_row(self, line: bytes, default_id: str) -> Request | None:
        row = self._decode_row(line)
        if not has_only_supported_options(row.body):
            return None
        request_id = default_id if row.custom_id is None else row.custom_id
        return _plain(row.body, request_id, row.body.prompt)


def _plain(fields: Request, request_id: str, prompt: str | list[int]) -> Request:
    """Return the request that `fields`, of a line or a body, stand for."""
    return Request(
        id=request_id,
        prompt=prompt,
        max_tokens=fields.max_tokens,
        stop_token=fields.stop_token,
        stop_sequence=fields.stop_sequence,
        stop=fields.stop,
        ignore_eos=fields.ignore_eos,
        arrival_time=fields.arrival_time,
        priority=fields.priority,
    )
