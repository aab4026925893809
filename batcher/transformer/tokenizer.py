"""Tokenizers of checkpoints, over the package `tokenizers`, with the bytes of every token.

A text is only text: a special token that is spelled out in it is encoded letter by letter.  A chat
template inserts special tokens; the messages that it is given cannot, unless the request allows it.
"""

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from os import environ
from re import compile as pattern
from re import escape
from threading import Lock
from typing import TYPE_CHECKING, Any

from batcher.errors import BatchdecodeError, EncodingError
from batcher.transformer.chat_template import ChatTemplate

if TYPE_CHECKING:
    from tokenizers import Tokenizer

MAX_VOCABULARY = 2**24
SPACE = "\N{LOWER ONE EIGHTH BLOCK}"  # how sentencepiece writes one
_MARKS = tuple(map(chr, range(0xFDD0, 0xFDF0)))  # noncharacters, which no text should have
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
        environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # a batch is one text here
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
            return self._ids_of(text)

    def encode_with_special(self, text: str) -> list[int]:
        """Return the token ids of `text`, in which special tokens are what they are.

        Raises:
            EncodingError: as `encode` does.
        """
        self._check(text)
        with self._lock:
            self._inner.encode_special_tokens = False
            try:
                return self._ids_of(text)
            finally:
                self._inner.encode_special_tokens = True

    def _ids_of(self, text: str) -> list[int]:
        """Return the token ids of `text`, encoded as a batch: it alone lets other threads run."""
        return self._inner.encode_batch_fast([text], add_special_tokens=False)[0].ids

    def _check(self, text: str) -> None:
        found = None if self._lacking is None else self._lacking.search(text.encode())
        if found is not None:
            message = f"the tokenizer has no token for the byte 0x{found[0].hex().upper()}"
            raise EncodingError("invalid-value", message)


class ChatTokenizer(TransformerTokenizer):
    """One whose model has a chat template.

    Rule: a special token comes from the template.  Where a message spells one out, a mark in it
    shows after rendering whose token it is; text is encoded letter by letter there.
    """

    def __init__(
        self,
        inner: "Tokenizer",
        token_bytes: list[bytes],
        prefix_token_ids: list[int],
        template: ChatTemplate,
    ) -> None:
        super().__init__(inner, token_bytes, prefix_token_ids)
        self._template = template
        added = inner.get_added_tokens_decoder()
        self._special_ids = {token_id for token_id, token in added.items() if token.special}
        texts = sorted({added[token_id].content for token_id in self._special_ids} - {""})
        self._beginnings = {text[:size] for text in texts for size in range(1, len(text))}
        self._longest = max(map(len, texts), default=0)
        longest_first = sorted(texts, key=len, reverse=True)
        self._special = pattern("|".join(map(escape, longest_first)) or "(?!)")

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tokenize: bool = True,
        add_generation_prompt: bool = True,
        special_tokens_in_text: bool = False,
    ) -> list[int] | str:
        """Return a chat as token ids, or as text; what the template raises passes through.

        special_tokens_in_text: whether those that messages spell out are special, too.
        """
        mark, marked = "", messages
        if not special_tokens_in_text:
            mark, marked = self._marked(messages)
        text = self._template.render(marked, add_generation_prompt=add_generation_prompt)
        if not mark or mark not in text:
            return self.encode_with_special(text) if tokenize else text
        parts = text.split(mark)
        text = "".join(parts)
        if not tokenize:
            return text
        return self._encode_marked(text, list(accumulate(map(len, parts[:-1]))))

    def _marked(
        self, messages: Sequence[Mapping[str, Any]]
    ) -> tuple[str, Sequence[Mapping[str, Any]]]:
        """Return a mark, and messages with it in each special token that they spell out.

        It is behind the first character, so that no trimming reaches it.  What a text ends in may
        be the beginning of a token that the template, or the next text, completes.
        """
        texts = [text for message in messages for text in message.values() if isinstance(text, str)]
        if not any(self._special.search(text) or self._beginning_at_end(text) for text in texts):
            return "", messages
        mark = next((m for m in _MARKS if not any(m in text for text in texts)), None)
        if mark is None:
            raise ValueError("messages spell out special tokens, and have all noncharacters")

        def with_mark(text: str) -> str:
            marked = self._special.sub(lambda found: f"{found[0][0]}{mark}{found[0][1:]}", text)
            size = self._beginning_at_end(marked)
            if not size:
                return marked
            place = len(marked) - size + 1
            return f"{marked[:place]}{mark}{marked[place:]}"

        return mark, [
            {
                name: with_mark(text) if isinstance(text, str) else text
                for name, text in message.items()
            }
            for message in messages
        ]

    def _beginning_at_end(self, text: str) -> int:
        """Return how many of the last characters begin a special token, at most; 0 for none."""
        sizes = range(min(self._longest - 1, len(text)), 0, -1)
        return next((size for size in sizes if text[-size:] in self._beginnings), 0)

    def _encode_marked(self, text: str, marks: list[int]) -> list[int]:
        """Return the token ids of a chat in which marks stood at those places of `text`."""
        self._check(text)
        with self._lock:
            self._inner.encode_special_tokens = False
            try:
                [encoding] = self._inner.encode_batch([text], add_special_tokens=False)
            finally:
                self._inner.encode_special_tokens = True
        token_ids: list[int] = []
        for token_id, (start, end) in zip(encoding.ids, encoding.offsets, strict=True):
            index = bisect_right(marks, start)
            if token_id in self._special_ids and index < len(marks) and marks[index] <= end:
                token_ids += self.encode(text[start:end])
            else:
                token_ids.append(token_id)
        return token_ids


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
