"""Reads the tokenizer of a folder, tokenizer.json, and its chat template from the files beside."""

from collections.abc import Callable
from itertools import takewhile
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from msgspec import Struct
from msgspec.structs import asdict

from batcher.errors import BatchdecodeError
from batcher.foreign import calling
from batcher.transformer.chat_template import ChatTemplate
from batcher.transformer.files import about, read_file, read_json
from batcher.transformer.tokenizer import (
    TransformerTokenizer,
    byte_level_bytes,
    sentencepiece_bytes,
    tokenizer_of,
)

if TYPE_CHECKING:
    from tokenizers import Tokenizer

TOKENIZER = "tokenizer.json"
SETTINGS = "tokenizer_config.json"
SPECIAL_TOKENS = "special_tokens_map.json"
TEMPLATE = "chat_template.jinja"
DECODERS: dict[str, Callable[[str], bytes]] = {
    "ByteLevel": byte_level_bytes,
    "ByteFallback": sentencepiece_bytes,
}


class _Decoder(Struct):
    type: str
    decoders: list["_Decoder"] = []


class _Tokenizer(Struct):
    decoder: _Decoder | None = None


class _Named(Struct):
    name: str
    template: str


class _Content(Struct):
    content: str


_Text = str | _Content | None


class _SpecialTokens(Struct):
    bos_token: _Text = None
    eos_token: _Text = None
    unk_token: _Text = None
    pad_token: _Text = None


class _Settings(_SpecialTokens):
    chat_template: str | list[_Named] | None = None


def tokenizer_from_folder(folder: Path) -> TransformerTokenizer:
    """Return the tokenizer of a folder.

    Raises:
        BatchdecodeError: there is none, or it is damaged, or of an unknown kind.
    """
    from tokenizers import Tokenizer  # noqa: PLC0415 - optional

    template = _template_of(folder)
    with about(folder / TOKENIZER):
        text = read_file(folder / TOKENIZER)
        bytes_of = decoding_of(text)
        with calling("it cannot be used:"):
            inner = Tokenizer.from_buffer(text)
            prefix_token_ids = prefix_of(inner)
        return tokenizer_of(inner, bytes_of, prefix_token_ids, template)


def prefix_of(inner: "Tokenizer") -> list[int]:
    """Return the tokens that the post-processor of a tokenizer puts before a text."""
    encoded = inner.encode("a")
    is_special = zip(encoded.ids, encoded.special_tokens_mask, strict=True)
    return [token_id for token_id, _ in takewhile(itemgetter(1), is_special)]


def decoding_of(text: bytes | str) -> Callable[[str], bytes]:
    """Return what a tokenizer's decoder makes of the text of one token.

    text: the tokenizer, as JSON.

    Raises:
        BatchdecodeError: it decodes in an unknown way.
        MsgspecError: it is no tokenizer.
    """
    decoder = msgspec.json.decode(text, type=_Tokenizer).decoder
    kinds = [] if decoder is None else [decoder.type, *(part.type for part in decoder.decoders)]
    found = next((kind for kind in kinds if kind in DECODERS), None)
    if found is None:
        said = " and ".join(kinds) or "nothing"
        raise BatchdecodeError(
            f"a tokenizer decoded by {said} is not supported, known: {', '.join(DECODERS)}"
        )
    return DECODERS[found]


def _template_of(folder: Path) -> ChatTemplate | None:
    """Return the chat template that is there, a file of its own before one in the settings.

    It may name the special tokens of tokenizer_config.json, or else of special_tokens_map.json.
    """
    settings, named, source = _Settings(), _SpecialTokens(), None
    if (folder / SPECIAL_TOKENS).is_file():
        with about(folder / SPECIAL_TOKENS):
            named = read_json(folder / SPECIAL_TOKENS, _SpecialTokens)
    if (folder / SETTINGS).is_file():
        with about(folder / SETTINGS):
            settings = read_json(folder / SETTINGS, _Settings)
            source = _default_of(settings.chat_template)
    place = folder / SETTINGS
    if (folder / TEMPLATE).is_file():
        place = folder / TEMPLATE
        with about(place):
            source = read_file(place).decode()
    if source is None:
        return None
    tokens = {name: getattr(settings, name) or text for name, text in asdict(named).items()}
    with about(place):
        return ChatTemplate(
            source,
            {
                name: text if isinstance(text, str) else text.content
                for name, text in tokens.items()
                if text is not None
            },
        )


def _default_of(given: str | list[_Named] | None) -> str | None:
    """Return the template for plain chats, of one or of several."""
    if isinstance(given, list):
        return next((named.template for named in given if named.name == "default"), None)
    return given
