"""A tokenizer that somebody else wrote; its answers are looked at before anybody uses them."""

from collections.abc import Iterable, Mapping
from itertools import islice
from threading import Lock
from typing import Any

from batcher.errors import BatchdecodeError, EncodingError, describe
from batcher.foreign import attribute_of, child_ends_here, has_attribute
from batcher.models.answers import shown
from batcher.models.base import Tokenizer
from batcher.models.byte_tokenizer import ByteTokenizer
from batcher.models.word_tokenizer import WordTokenizer
from batcher.request import MAX_INT

MAX_TABLE = 2**24  # token ids with bytes: more than any vocabulary has


class CheckedTokenizer:
    """Passes texts on to `inner`, one at a time, whoever asks from whichever thread.

    A text is mostly encoded twice, to check a request and then to begin it, so the last one is
    remembered until it is asked for again.  Chats are left to `inner`, if it has a template.

    Raises:
        BatchdecodeError: its `token_bytes` are no list of bytes, or it lacks a method.
    """

    def __init__(self, inner: Any, vocab_size: int | None) -> None:
        if not (has_attribute(inner, "encode") and has_attribute(inner, "token_bytes")):
            raise BatchdecodeError("the tokenizer lacks encode or token_bytes")
        self.token_bytes = _read_table(inner.token_bytes)
        self.apply_chat_template = attribute_of(inner, "apply_chat_template", None)
        self._inner, self._lock = inner, Lock()
        self._largest = MAX_INT if vocab_size is None else vocab_size - 1
        self._last: tuple[str, list[int]] | None = None

    def encode(self, text: str) -> list[int]:
        """Return the token ids of `text`, in a list of the caller's own.

        Raises:
            EncodingError: the tokenizer raised, or its answer is no list of the model's token ids.
        """
        with self._lock:
            last, self._last = self._last, None
            if last is not None and last[0] == text:
                return last[1]
            tokens = self._encode(text)
            self._last = text, tokens
            return tokens.copy()

    def _encode(self, text: str) -> list[int]:
        try:
            with child_ends_here():
                answer = self._inner.encode(text)
                tokens = _read_tokens(answer)
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # whatever another's code raises is its failure
            message = f"the tokenizer raised {describe(error)}"
            raise EncodingError("invalid-value", message) from error
        if tokens is None:
            message = f"the tokenizer returned {shown(answer)}, which is no list of token ids"
            raise EncodingError("invalid-value", message)
        if tokens and not 0 <= min(tokens) <= max(tokens) <= self._largest:
            wrong = next(token for token in tokens if not 0 <= token <= self._largest)
            message = f"the tokenizer returned token {shown(wrong)}, and the model knows "
            raise EncodingError("unknown-token", f"{message}0 to {self._largest}")
        return tokens


def checked_tokenizer(tokenizer: Tokenizer, vocab_size: int | None) -> Tokenizer:
    """Return `tokenizer` if it is sure to give tokens of the model for any text, else a check.

    Raises:
        BatchdecodeError: it is no tokenizer.
    """
    is_sure = isinstance(tokenizer, CheckedTokenizer) or (
        type(tokenizer) in {ByteTokenizer, WordTokenizer}
        and (vocab_size is None or len(tokenizer.token_bytes) <= vocab_size)
    )
    return tokenizer if is_sure else CheckedTokenizer(tokenizer, vocab_size)


def _read_table(table: Any) -> list[bytes]:
    """Return the bytes of every token id.

    Raises:
        BatchdecodeError: `table` is something else.
    """
    if isinstance(table, str | bytes | bytearray | Mapping) or not isinstance(table, Iterable):
        kind = type(table).__name__
        raise BatchdecodeError(f"the tokenizer's token_bytes is a {kind}, not a list of bytes")
    entries = list(islice(table, MAX_TABLE + 1))
    if len(entries) > MAX_TABLE:
        raise BatchdecodeError(f"the tokenizer's token_bytes has more than {MAX_TABLE:,} entries")
    if not set(map(type, entries)) <= {bytes}:
        index = next(index for index, entry in enumerate(entries) if type(entry) is not bytes)
        kind = type(entries[index]).__name__
        raise BatchdecodeError(f"the tokenizer's token_bytes[{index}] is a {kind}, not bytes")
    return entries


def _read_tokens(answer: Any) -> list[int] | None:
    """Return an answer as a list of integers, None if it is none; arrays know how to become one."""
    if hasattr(answer, "tolist"):
        answer = answer.tolist()
    if isinstance(answer, str | bytes | bytearray | Mapping) or not isinstance(answer, Iterable):
        return None
    tokens = list(answer)
    kinds = set(map(type, tokens))
    if kinds <= {int}:
        return tokens
    if bool in kinds or not all(hasattr(kind, "__index__") for kind in kinds):
        return None
    return [token.__index__() for token in tokens]
