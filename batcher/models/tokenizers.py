"""Tokenizers: bytes, the words of the simulated model, and a check of users' tokenizers.

The simulated model has a small English vocabulary, and single bytes for the rest. Id 0 is EOS and
id 1 stands before every prefix; neither has text. Then come the 256 bytes, then the words, each
with the space before it. A word that is not in the vocabulary is its bytes, so any text round-
trips.
"""

import re
import reprlib
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property, partial
from itertools import islice
from operator import index as to_index
from threading import Lock
from typing import Any

import numpy as np

from batcher.errors import BatchdecodeError, EncodingError, describe, writable
from batcher.foreign import attribute_of, child_ends_here, has_attribute
from batcher.models.base import FloatArray, Tokenizer
from batcher.request import MAX_INT

# The answer of user code for a row: logits or a token id.


def read_logits(vocab_size: int | None, answer: Any) -> FloatArray:
    """Return `answer` as logits [vocab] float32, which need not be finite.

    vocab_size: the required number; None for any number from 1.

    Raises:
        ValueError: it is not a sequence of that many numbers; the message describes it.
    """
    is_list = isinstance(answer, list | tuple)
    if is_list and bool in set(map(type, answer)):  # numpy would read True as 1
        raise ValueError(f"{shown(answer)}, not a list of logits")
    try:
        logits = np.asarray(answer)
    except Exception:  # noqa: BLE001 - its own __array__ may raise anything
        raise ValueError(f"{shown(answer)}, not a list of logits") from None
    if logits.ndim == 1 and logits.size == 0:
        raise ValueError("no logits")
    if logits.ndim != 1 or logits.dtype.kind not in "iuf":
        raise ValueError(f"{shown(answer)}, not a list of logits")
    if vocab_size is not None and logits.size != vocab_size:
        raise ValueError(f"{logits.size} logits, not {vocab_size}")
    with np.errstate(over="ignore"):  # too large ones become infinite
        return logits.astype(np.float32)


def read_token_id(vocab_size: int | None, answer: Any) -> int:
    """Return `answer` as a token id; raise a ValueError that describes it."""
    largest = MAX_INT if vocab_size is None else vocab_size - 1
    try:
        token_id = -1 if isinstance(answer, bool) else to_index(answer)
    except Exception:  # noqa: BLE001 - its own __index__ may raise anything
        token_id = -1
    if not 0 <= token_id <= largest:
        message = f"{shown(answer)}, which is not a token id, an integer from 0 to {largest}"
        raise ValueError(message)
    return token_id


def shown(answer: Any) -> str:
    """Return a short description of any answer."""
    is_huge = isinstance(answer, int) and abs(answer) > MAX_INT  # too long for repr
    return "a huge integer" if is_huge else writable(" ".join(reprlib.repr(answer).split()))


ROLES = ("system", "developer", "user", "assistant", "tool")
EOS_TOKEN_ID = 0
BEGIN_TOKEN_ID = 1
FIRST_BYTE_ID = 2
FIRST_WORD_ID = FIRST_BYTE_ID + 256

_WORDS = {
    "opener": "The This That Our Every Another Some Each One Her His My",
    "opening pronoun": "She He They We Nobody Everyone Someone You I",
    "opening adverb": "Later Today Then Slowly Suddenly Tonight Outside Yesterday",
    "determiner": "the this that our every another some each one her his my",
    "pronoun": "she he they we nobody everyone someone you",
    "subject adjective": (
        "brave quiet clever tired young old hungry gentle curious patient careful honest "
        "lazy proud shy kind busy famous lonely cheerful stubborn sleepy polite nervous"
    ),
    "subject": (
        "cat dog fox owl engineer baker sailor teacher student doctor farmer painter "
        "pilot robot child king queen writer singer gardener captain poet wolf horse bear "
        "rabbit crow whale turtle spider librarian driver nurse judge clerk guard tailor "
        "miner hunter monk"
    ),
    "adverb": (
        "quietly slowly carefully often never always gently quickly suddenly proudly "
        "secretly happily"
    ),
    "verb": (
        "found saw built carried opened closed painted followed watched crossed repaired "
        "lost kept forgot remembered sold bought drew moved dropped lifted guarded "
        "counted cleaned broke mended hid read wrote studied measured borrowed returned "
        "admired ignored described sketched polished wrapped buried discovered trusted "
        "chose gathered cooked planted touched noticed pushed pulled"
    ),
    "object adjective": (
        "red blue small large broken silver golden wooden ancient heavy narrow bright "
        "dusty empty frozen hidden warm cold round sharp strange simple green distant"
    ),
    "object": (
        "river bridge window garden letter book machine door road boat lamp clock map key "
        "stone tree hill house tower bell mirror field table chair basket train wheel "
        "rope coin flag ladder forest harbor island engine kettle"
    ),
    "preposition": "in on under near behind beside above across beyond before after inside",
    "conjunction": "and but while because so until since",
}

_PIECES = re.compile(rb" ?[A-Za-z]+|[^A-Za-z ]+| ")
_NO_LETTER = re.compile(rb"[^A-Za-z]")
_WINDOW = 2**16  # bytes encoded at once
_LONGER_THAN_WORDS = 64  # bytes
MAX_TABLE = 2**24  # token ids with bytes: more than any vocabulary


class ByteTokenizer:
    """Ids 0 to 255 are the bytes of UTF-8; larger ids show as U+FFFD."""

    def __init__(self) -> None:
        self.token_bytes: Sequence[bytes] = [bytes([byte]) for byte in range(256)]

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def encode_array(self, text: str) -> "array[int]":
        return array("B", text.encode())


class WordTokenizer:
    """Ids 0 to 511 and their text."""

    def __init__(self) -> None:
        self.token_bytes = [b"", b"", *(bytes([byte]) for byte in range(256))]
        self.words: dict[str, list[int]] = {}  # part of speech -> token ids
        for part, words in _WORDS.items():
            tokens = [b" " + word.encode() for word in words.split()]
            self.words[part] = list(
                range(len(self.token_bytes), len(self.token_bytes) + len(tokens))
            )
            self.token_bytes += tokens

    @cached_property
    def _word_ids(self) -> dict[bytes, int]:
        words = self.token_bytes[FIRST_WORD_ID:]
        return {word: token_id for token_id, word in enumerate(words, FIRST_WORD_ID)}

    def encode(self, text: str) -> list[int]:
        return [id_ for window in _windows(text.encode()) for id_ in self._encode(window)]

    def encode_array(self, text: str) -> "array[int]":
        tokens = array("H")
        for window in _windows(text.encode()):
            tokens.extend(self._encode(window))
        return tokens

    def _encode(self, text: bytes) -> list[int]:
        word_ids = self._word_ids
        token_ids: list[int] = []
        for piece in _PIECES.findall(text):
            word_id = word_ids.get(piece)
            if word_id is None:
                token_ids += [FIRST_BYTE_ID + byte for byte in piece]
            else:
                token_ids.append(word_id)
        return token_ids

    def apply_chat_template(
        self,
        conversation: Sequence[Mapping[str, str]],
        *,
        tokenize: bool = True,
        add_generation_prompt: bool = False,
    ) -> list[int] | str:
        """Return the prompt of a chat, as token ids or as text; parameters as in transformers."""
        lines = []
        for message in conversation:
            role = message["role"]
            if role not in ROLES:
                raise ValueError(f"unknown role {role!r}; known are {', '.join(ROLES)}")
            name = f" {message['name']}" if "name" in message else ""
            lines.append(f"{role}{name}: {message['content']}\n")
        text = "".join(lines) + ("assistant:" if add_generation_prompt else "")
        return self.encode(text) if tokenize else text


def byte_id(byte: int | str) -> int:
    return FIRST_BYTE_ID + (byte if isinstance(byte, int) else ord(byte))


def _windows(data: bytes) -> Iterator[bytes]:
    begin = 0
    while begin < len(data):
        end = begin + _WINDOW
        boundary = _NO_LETTER.search(data, end, end + _LONGER_THAN_WORDS)
        # without one, the piece across the end is longer than any word
        end = end + _LONGER_THAN_WORDS if boundary is None else boundary.start()
        yield data[begin:end]
        begin = end


class CheckedTokenizer:
    """Passes texts on to `inner`, one at a time, from any thread.

    A text is mostly encoded twice, to validate and to start a request, so the last result is kept
    for one more call. Chats use the template of `inner`, if any.

    Raises:
        BatchdecodeError: `token_bytes` or `prefix_token_ids` are invalid, or a method is missing.
    """

    def __init__(self, inner: Any, vocab_size: int | None) -> None:
        if not (has_attribute(inner, "encode") and has_attribute(inner, "token_bytes")):
            raise BatchdecodeError("the tokenizer lacks encode or token_bytes")
        table = inner.token_bytes
        if isinstance(table, str | bytes | bytearray | Mapping) or not isinstance(table, Iterable):
            kind = type(table).__name__
            raise BatchdecodeError(f"the tokenizer's token_bytes is a {kind}, not a list of bytes")
        entries = list(islice(table, MAX_TABLE + 1))
        if len(entries) > MAX_TABLE:
            raise BatchdecodeError(
                f"the tokenizer's token_bytes has more than {MAX_TABLE:,} entries"
            )
        if not set(map(type, entries)) <= {bytes}:
            index = next(index for index, entry in enumerate(entries) if type(entry) is not bytes)
            kind = type(entries[index]).__name__
            raise BatchdecodeError(f"the tokenizer's token_bytes[{index}] is a {kind}, not bytes")
        self.token_bytes = entries
        self.apply_chat_template = attribute_of(inner, "apply_chat_template", None)
        self._inner, self._lock = inner, Lock()
        self._largest = MAX_INT if vocab_size is None else vocab_size - 1
        given = attribute_of(inner, "prefix_token_ids", ())
        prefix = _read_tokens(given)
        if prefix is None or not all(0 <= token <= self._largest for token in prefix):
            raise BatchdecodeError(
                f"the tokenizer's prefix_token_ids are {shown(given)}, "
                f"not a list of token ids from 0 to {self._largest}"
            )
        self.prefix_token_ids = prefix
        self._last: tuple[str, list[int]] | None = None
        encode = attribute_of(inner, "encode_with_special", None)
        if encode is not None:
            self.encode_with_special = partial(self._encode, encode=encode)

    def encode(self, text: str) -> list[int]:
        """Return the token ids of `text`, in a new list."""
        with self._lock:
            last, self._last = self._last, None
            if last is not None and last[0] == text:
                return last[1]
            tokens = self._encode(text, self._inner.encode)
            self._last = text, tokens
            return tokens.copy()

    def _encode(self, text: str, encode: Callable[[str], object]) -> list[int]:
        try:
            with child_ends_here():
                answer = encode(text)
                tokens = _read_tokens(answer)
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # user code may raise anything
            message = f"the tokenizer raised {describe(error)}"
            raise EncodingError("invalid-value", message) from error
        if tokens is None:
            message = f"the tokenizer returned {shown(answer)}, not a list of token ids"
            raise EncodingError("invalid-value", message)
        if tokens and not 0 <= min(tokens) <= max(tokens) <= self._largest:
            wrong = next(token for token in tokens if not 0 <= token <= self._largest)
            message = f"the tokenizer returned token {shown(wrong)}, and the model knows "
            raise EncodingError("unknown-token", f"{message}0 to {self._largest}")
        return tokens


def checked_tokenizer(tokenizer: Tokenizer, vocab_size: int | None) -> Tokenizer:
    """Return `tokenizer`, with a check unless it always returns tokens of the model."""
    is_sure = isinstance(tokenizer, CheckedTokenizer) or (
        type(tokenizer) in {ByteTokenizer, WordTokenizer}
        and (vocab_size is None or len(tokenizer.token_bytes) <= vocab_size)
    )
    return tokenizer if is_sure else CheckedTokenizer(tokenizer, vocab_size)


def _read_tokens(answer: Any) -> list[int] | None:
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
