"""Tokenizers of checkpoints, over the package `tokenizers`, with the bytes of every token.

A text is only text: a special token that is written out in it is taken letter by letter.  In what a
chat template makes, special tokens are what they are.
"""

from collections.abc import Callable, Mapping, Sequence
from re import compile as pattern
from threading import Lock
from typing import TYPE_CHECKING, Any

from batcher.errors import BatchdecodeError, EncodingError
from batcher.transformer.chat_template import ChatTemplate

if TYPE_CHECKING:
    from tokenizers import Tokenizer

MAX_VOCABULARY = 2**24
SPACE = "\N{LOWER ONE EIGHTH BLOCK}"  # how sentencepiece writes one
_BYTE_TOKEN = pattern("<0x([0-9A-F]{2})>")


class TransformerTokenizer:
    """Text to token ids, and the bytes of each id.

    token_bytes: [vocabulary] b"" for special tokens, and for ids without a token.
    prefix_token_ids: what stands before a prompt of text, such as BOS; no part of what is encoded.

    The tokens of a text stand for its bytes, unless the tokenizer normalises it: Qwen's composes
    characters (NFC), those of sentencepiece may put a space before it.
    """

    def __init__(
        self, inner: "Tokenizer", token_bytes: list[bytes], prefix_token_ids: list[int]
    ) -> None:
        self.token_bytes, self.prefix_token_ids = token_bytes, prefix_token_ids
        known = {entry[0] for entry in token_bytes if len(entry) == 1}
        lacking = [b"\\x%02x" % byte for byte in range(256) if byte not in known]
        self._lacking = pattern(b"[%b]" % b"".join(lacking)) if lacking else None
        self._inner, self._lock = inner, Lock()
        inner.no_truncation()
        inner.no_padding()
        inner.encode_special_tokens = True  # as text

    def encode(self, text: str) -> list[int]:
        """Return the token ids of `text`.

        Raises:
            EncodingError: it has a byte that no token stands for, as some vocabularies leave out
            control characters; `tokenizers` would drop it.
        """
        self._check(text)
        with self._lock:
            return self._inner.encode(text, add_special_tokens=False).ids

    def encode_with_special(self, text: str) -> list[int]:
        """Return the token ids of `text`, in which special tokens are what they are.

        Raises:
            EncodingError: as `encode` does.
        """
        self._check(text)
        with self._lock:
            self._inner.encode_special_tokens = False
            try:
                return self._inner.encode(text, add_special_tokens=False).ids
            finally:
                self._inner.encode_special_tokens = True

    def _check(self, text: str) -> None:
        found = None if self._lacking is None else self._lacking.search(text.encode())
        if found is not None:
            message = f"the tokenizer has no token for the byte 0x{found[0].hex().upper()}"
            raise EncodingError("invalid-value", message)


class ChatTokenizer(TransformerTokenizer):
    """One whose model has a chat template."""

    def __init__(
        self,
        inner: "Tokenizer",
        token_bytes: list[bytes],
        prefix_token_ids: list[int],
        template: ChatTemplate,
    ) -> None:
        super().__init__(inner, token_bytes, prefix_token_ids)
        self._template = template

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tokenize: bool = True,
        add_generation_prompt: bool = True,
    ) -> list[int] | str:
        """Return a chat as token ids, or as text; what the template raises passes through."""
        text = self._template.render(messages, add_generation_prompt=add_generation_prompt)
        return self.encode_with_special(text) if tokenize else text


def tokenizer_of(
    inner: "Tokenizer",
    bytes_of: Callable[[str], bytes],
    prefix_token_ids: list[int],
    template: ChatTemplate | None,
) -> TransformerTokenizer:
    """Return a tokenizer whose tokens stand for `bytes_of` their texts.

    Raises:
        BatchdecodeError: its ids are too large, or those of the prefix beyond all others.
    """
    token_bytes = _table_of(inner, bytes_of)
    if max(prefix_token_ids, default=-1) >= len(token_bytes):
        last = len(token_bytes) - 1
        raise BatchdecodeError(f"texts begin with {prefix_token_ids}, and tokens end with {last}")
    if template is None:
        return TransformerTokenizer(inner, token_bytes, prefix_token_ids)
    return ChatTokenizer(inner, token_bytes, prefix_token_ids, template)


def byte_level_bytes(token: str) -> bytes:
    """Return the bytes of a token of byte-level BPE, in which a character stands for each."""
    try:
        return bytes(map(_BYTE_OF.__getitem__, token))
    except KeyError:
        return token.encode()


def sentencepiece_bytes(token: str) -> bytes:
    """Return the bytes of a token as sentencepiece writes it, such as <0x0A>."""
    byte = _BYTE_TOKEN.fullmatch(token)
    return bytes([int(byte[1], 16)]) if byte else token.replace(SPACE, " ").encode()


def _table_of(inner: "Tokenizer", bytes_of: Callable[[str], bytes]) -> list[bytes]:
    """Return the bytes of every token id."""
    vocabulary = inner.get_vocab(with_added_tokens=True)
    size = max(vocabulary.values(), default=-1) + 1
    if size > MAX_VOCABULARY:
        raise BatchdecodeError(f"the tokenizer has ids up to {size - 1:,}")
    table = [b""] * size
    for token, token_id in vocabulary.items():
        table[token_id] = bytes_of(token)
    for token_id, added in inner.get_added_tokens_decoder().items():
        table[token_id] = b"" if added.special else added.content.encode()
    return table


def _byte_characters() -> dict[str, int]:
    """Return the byte of each character in byte-level BPE: `bytes_to_unicode` of GPT-2.

    A byte that is a visible character of Latin-1 is that character, others go on from U+0100.
    """
    visible = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in visible]
    return {chr(byte): byte for byte in visible} | {
        chr(0x100 + index): byte for index, byte in enumerate(others)
    }


_BYTE_OF = _byte_characters()
