"""A warning that a model is spoken to in chats, and is given texts as they are."""

from collections.abc import Callable

import msgspec

from batcher.formats.requests import BadLine, ParsedLine, RequestParser
from batcher.validation import ModelCapabilities

_fields_of = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_WARNING = "warning: this model has a chat template: --chat puts each prompt into it\n"


class ChatHintingParser(RequestParser):
    """Parses lines for a model with a chat template; of the first text that skips it, it warns.

    Messages have been through the template, token ids need none, and the row of an API says itself
    what its text is.

    tell: takes the warning.
    """

    def __init__(self, capabilities: ModelCapabilities, tell: Callable[[str], None]) -> None:
        super().__init__(capabilities)
        self._tell, self._has_told = tell, False

    def parse(self, line: bytes, line_number: int) -> ParsedLine | BadLine:
        """Return the request of `line`, or what is wrong with it; no bytes make it raise."""
        parsed = super().parse(line, line_number)
        if not self._has_told and _has_text_alone(parsed, line):
            self._has_told = True
            self._tell(_WARNING)
        return parsed


def _has_text_alone(parsed: ParsedLine | BadLine, line: bytes) -> bool:
    if isinstance(parsed, BadLine) or parsed.form != "result":
        return False
    return isinstance(parsed.request.prompt, str) and "messages" not in _fields_of(line)
