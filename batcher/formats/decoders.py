"""The two decoders of lines: one for the fields that every file uses, one for all of them.

Rule: both give the same request for a line that both can read; the plain one only is quicker.
"""

from typing import Any, Literal

import msgspec
from msgspec import Struct, defstruct

from batcher.formats.line_problems import ROW_FIELDS, SYNONYMS
from batcher.formats.openai import (
    CHAT_URL,
    COMPLETION_OPTIONS,
    URLS,
    BatchRow,
    ChatRow,
)
from batcher.formats.spellings import Fields, respell, spellings_of
from batcher.request import PromptInput, Request, TokenId
from batcher.validation import (
    DEFAULTS,
    ModelCapabilities,
    find_problems,
    has_plain_stops,
    plain_types,
    token_type,
)

# The keys of lines and rows that a PlainDecoder reads.
PLAIN_KEYS = frozenset(
    name.encode()
    for name in (*plain_types(ModelCapabilities()), *SYNONYMS, *ROW_FIELDS, *COMPLETION_OPTIONS)
)


class RequestLine(Request, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A line that is a request, by whichever names of its fields."""

    prompt: PromptInput | None = None  # type: ignore[assignment]  # or prompt_tokens is given
    custom_id: str | None = None
    prompt_tokens: list[TokenId] | None = None


class FullDecoder:
    """Decodes lines and rows with any fields of a request.

    line, row: JSON to a RequestLine or a BatchRow.
    """

    def __init__(self, capabilities: ModelCapabilities) -> None:
        self._capabilities = capabilities
        self.line = msgspec.json.Decoder(RequestLine).decode
        self.row = msgspec.json.Decoder(BatchRow).decode

    def respelled(self, line: bytes, *, is_row: bool) -> Any:
        """Return what `line` or `row` do of a line that has other names for some of its fields.

        None if anything about it is unusual.
        """
        whole = msgspec.json.decode(line)
        if not isinstance(whole, dict):
            return None
        url = whole.get("url") if is_row else None
        values = whole.get("body") if is_row else whole
        is_chat = url == CHAT_URL
        if not isinstance(values, dict) or (is_row and url not in URLS):
            return None
        if is_chat and "prompt" in values:
            return None
        named = respell(Fields(values, self._capabilities.chat_template), spellings_of(url))
        if named is None:
            return None
        if not is_row:
            return msgspec.convert(named, RequestLine)
        return msgspec.convert({**whole, "body": named}, ChatRow if is_chat else BatchRow)

    def make(self, fields: Request, request_id: str, prompt: PromptInput) -> Request | None:
        """Return the request that the fields of a line or a body stand for; None for a bad one."""
        named = msgspec.structs.replace(fields, id=request_id, prompt=prompt)
        request = msgspec.convert(named, Request, from_attributes=True)
        return None if find_problems(request, self._capabilities) else request


class PlainDecoder:
    """Decodes lines and rows whose keys are PLAIN_KEYS, and checks the values on the way.

    line, row: JSON to what has the attributes of a RequestLine or a BatchRow, as far as plain.
    """

    def __init__(self, capabilities: ModelCapabilities) -> None:
        self._can_encode = None if capabilities.encode is None else capabilities.can_encode
        types = plain_types(capabilities)
        prompt, custom_id = types.pop("prompt"), ("custom_id", types.pop("id"), None)
        prompt_tokens = ("prompt_tokens", list[token_type(capabilities)] | None, None)  # type: ignore[misc]  # made at run time
        fields: list[Any] = [(name, kind, DEFAULTS[name]) for name, kind in types.items()]
        own = [("id", str | None, None), ("prompt", prompt | None, None)]
        line = _define("PlainLine", [*own, custom_id, prompt_tokens, *fields])
        options = [(name, Any, None) for name in COMPLETION_OPTIONS]
        body = _define("PlainBody", [("prompt", prompt), *fields, *options])
        fixed = [("method", Literal["POST"]), ("url", Literal["/v1/completions"])]
        row = _define("PlainRow", [custom_id, *fixed, ("body", body)])
        self.line = msgspec.json.Decoder(line).decode
        self.row = msgspec.json.Decoder(row).decode

    def make(self, fields: Any, request_id: str, prompt: PromptInput) -> Request | None:
        """Return the request that the fields of a line or a body stand for; None for a bad one."""
        if not has_plain_stops(fields):
            return None
        if self._can_encode is not None and not self._can_encode(prompt):
            return None
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


def _define(name: str, fields: list[Any]) -> type[Struct]:
    return defstruct(name, fields, kw_only=True, frozen=True, gc=False, forbid_unknown_fields=True)
