"""Prompts of requests as token ids.

Rule: the tokens of a `length` depend only on its seed, their position in the segment and the size
of the vocabulary: equal segments share cached blocks.
"""

from array import array
from bisect import bisect_right
from collections.abc import Iterator
from itertools import takewhile
from struct import calcsize
from typing import TypeGuard

import numpy as np
from msgspec import Struct

from batcher.errors import EncodingError, RequestError, not_encoded
from batcher.models.base import Model, Tokenizer
from batcher.request import PromptInput, PromptSegment
from batcher.splitmix64 import GAMMA, scramble
from batcher.tokens import MANY, NO_TOKENS, Tokens, compact, joined, typecode_of

FIRST_ORDINARY_TOKEN = 3  # ids below are often special
DEFAULT_VOCAB_SIZE = 512  # for a model that takes any id

PINNED = 3
EVICTION_PRIORITIES = {None: 0, "assistant": 0, "user": 1, "system": 2}

SegmentEnd = tuple[int, int]

_BITS = 64
_STEP = np.uint64(GAMMA)
_HALF = np.uint64(32)  # bits


class Undrawn(Struct, frozen=True, gc=False):
    """A prompt with segments that give a length; their tokens are drawn when they are needed.

    parts: tokens and such segments, in order.  ends: the end of each, in tokens.
    """

    parts: list[Tokens | PromptSegment]
    ends: list[int]
    vocab_size: int | None

    @property
    def num_tokens(self) -> int:
        return self.ends[-1] if self.ends else 0

    def draw(self, start: int, stop: int) -> Tokens:
        return joined(self._parts(start, stop), self.vocab_size)

    def _parts(self, start: int, stop: int) -> Iterator[Tokens]:
        for index in range(bisect_right(self.ends, start), len(self.ends)):
            part, end = self.parts[index], self.ends[index]
            begin = self.ends[index - 1] if index else 0
            if begin >= stop:
                break
            first, last = max(start - begin, 0), min(stop, end) - begin
            if isinstance(part, PromptSegment):
                yield _drawn_tokens(part.seed, first, last, self.vocab_size)
            else:
                yield part if last - first == len(part) else part[first:last]


class Prompt(Struct, gc=False):
    """A prompt as the model reads it.

    segment_ends: end in tokens and eviction priority of each segment with tokens; cached blocks of
    the lowest priority are evicted first.  () without segments.
    """

    drawn: Tokens | Undrawn
    segment_ends: tuple[SegmentEnd, ...] = ()

    @property
    def num_tokens(self) -> int:
        drawn = self.drawn
        return drawn.num_tokens if isinstance(drawn, Undrawn) else len(drawn)

    @property
    def tokens(self) -> Tokens:
        """Its tokens; do not change the list."""
        if isinstance(self.drawn, Undrawn):
            self.drawn = self.drawn.draw(0, self.num_tokens)
        return self.drawn

    def read(self, start: int, stop: int) -> Tokens:
        """Return tokens start..stop without keeping what is drawn for a long prompt."""
        if isinstance(self.drawn, Undrawn) and self.drawn.num_tokens > MANY:
            return self.drawn.draw(start, stop)
        return self.tokens[start:stop]

    def after(self, history: Tokens, vocab_size: int | None) -> "Prompt":
        """Return the prompt of a turn that continues `history`."""
        start = len(history)
        segment_ends = tuple((start + end, priority) for end, priority in self.segment_ends)
        if segment_ends and start:
            segment_ends = ((start, 0), *segment_ends)
        return Prompt(joined((history, self.tokens), vocab_size), segment_ends)

    def cut(self, num_tokens: int) -> "Prompt":
        """Return the first `num_tokens` tokens, with a boundary where the last segment is cut."""
        segment_ends: list[SegmentEnd] = []
        for end, priority in self.segment_ends:
            segment_ends.append((min(end, num_tokens), priority))
            if end >= num_tokens:
                break
        return Prompt(self.tokens[:num_tokens], tuple(segment_ends) if num_tokens else ())


def read_prompt(
    prompt: PromptInput, field: str, request_id: str, model: Model, history: Tokens = NO_TOKENS
) -> Prompt:
    """Return the tokens of a valid `prompt`, the value of `field`; a list of ids is not copied.

    history: tokens of the earlier turns of its session.

    Raises:
        RequestError: the tokenizer fails on a text.
    """
    if isinstance(prompt, str) or (prompt and isinstance(prompt[0], PromptSegment)):
        prefix = NO_TOKENS if history else prefix_of(prompt, model.tokenizer)
        own = _read(prompt, field, request_id, model, prefix)
    else:
        own = Prompt(prompt)  # type: ignore[arg-type]  # token ids
    return own.after(history, model.vocab_size) if history else own


def _read(
    prompt: str | list[PromptSegment], field: str, request_id: str, model: Model, prefix: Tokens
) -> Prompt:
    if isinstance(prompt, str):
        tokens = _encode(prompt, (field,), request_id, model)
        return Prompt(joined((prefix, tokens), model.vocab_size) if prefix else tokens)
    parts: list[Tokens | PromptSegment] = []
    segment_ends: list[SegmentEnd] = []
    num_tokens = 0
    for index, segment in enumerate(prompt):
        part: Tokens | PromptSegment = segment if segment.tokens is None else segment.tokens
        num_more = segment.length or 0
        if segment.text is not None:
            part = _encode(segment.text, (field, index, "text"), request_id, model)
            if prefix and index == 0:
                part = joined((prefix, part), model.vocab_size)
        if not isinstance(part, PromptSegment):
            num_more = len(part)
        if num_more:
            num_tokens += num_more
            parts.append(part)
            segment_ends.append((num_tokens, eviction_priority_of(segment)))
    ends = [end for end, _ in segment_ends]
    return Prompt(Undrawn(parts, ends, model.vocab_size), tuple(segment_ends))


def prefix_of(prompt: PromptInput, tokenizer: Tokenizer) -> Tokens:
    """Return the tokens that the tokenizer puts before a text, such as BOS."""
    prefix: Tokens = getattr(tokenizer, "prefix_token_ids", NO_TOKENS)
    is_text = isinstance(prompt, str) or (has_segments(prompt) and prompt[0].text is not None)
    return prefix if is_text else NO_TOKENS


def has_segments(prompt: PromptInput) -> TypeGuard[list[PromptSegment]]:
    return bool(prompt) and isinstance(prompt[0], PromptSegment)


def eviction_priority_of(segment: PromptSegment) -> int:
    """Return the eviction priority of cached blocks; the highest is evicted last."""
    return PINNED if segment.pin else EVICTION_PRIORITIES[segment.type]


def count_tokens(prompt: PromptInput, tokenizer: Tokenizer) -> int:
    """Return the number of tokens of a valid `prompt`, without its prefix."""
    if isinstance(prompt, str):
        return len(encoded(prompt, tokenizer))
    if not has_segments(prompt):
        return len(prompt)
    return sum(_count(segment, tokenizer) for segment in prompt)


def num_lasting_tokens(prompt: PromptInput, tokenizer: Tokenizer) -> int:
    """Return the number of system tokens at the start of a prompt, which a session never drops."""
    if not has_segments(prompt):
        return 0
    return sum(_count(one, tokenizer) for one in takewhile(lambda o: o.type == "system", prompt))


def _count(segment: PromptSegment, tokenizer: Tokenizer) -> int:
    if segment.text is not None:
        return len(encoded(segment.text, tokenizer))
    return segment.length or len(segment.tokens or ())


def _drawn_tokens(seed: int | str, start: int, stop: int, vocab_size: int | None) -> Tokens:
    """Return ids from `start` up to `stop`, uniform over the ordinary ones: splitmix64, hashed."""
    size = DEFAULT_VOCAB_SIZE if vocab_size is None else vocab_size
    first = FIRST_ORDINARY_TOKEN if size > FIRST_ORDINARY_TOKEN else 0
    places = np.arange(start, stop, dtype=np.uint64)
    bits = scramble(places * _STEP + np.uint64(_hash(seed)))
    # The upper half, as a fraction of 2^32, scaled to the number of tokens.
    drawn = ((bits >> _HALF) * np.uint64(size - first)) >> _HALF
    token_ids = drawn.view(np.int64) + first
    if stop - start <= MANY:
        tokens: list[int] = token_ids.tolist()
        return tokens
    typecode = typecode_of(vocab_size)
    return array(typecode, token_ids.astype(typecode).tobytes())


def _hash(seed: int | str) -> int:
    """Return 64 well mixed bits, the same in every process."""
    if isinstance(seed, str):
        from hashlib import blake2b  # noqa: PLC0415 - rare, and it loads OpenSSL

        return int.from_bytes(blake2b(seed.encode(), digest_size=_BITS // 8).digest(), "little")
    return int(scramble(seed & (2**_BITS - 1)))


def encoded(text: str, tokenizer: Tokenizer, vocab_size: int | None = None) -> Tokens:
    """Return the tokens of `text`, as an array if it is long; raise an EncodingError."""
    if len(text) > MANY:
        encode_array = getattr(tokenizer, "encode_array", None)
        if encode_array is not None:
            tokens: array[int] = encode_array(text)
            return tokens
    return compact(tokenizer.encode(text), vocab_size)


def _encode(text: str, path: tuple[str | int, ...], request_id: str, model: Model) -> Tokens:
    try:
        return encoded(text, model.tokenizer, model.vocab_size)
    except EncodingError as error:
        raise RequestError(request_id, [not_encoded(path, error)]) from error


def block_contents(
    prompt: Prompt, output: Tokens, start: int, stop: int, size: int, typecode: str
) -> Iterator[bytes]:
    """Yield the tokens start..stop of a prompt and its output as bytes, in blocks of `size`.

    The first block is read by itself, as most callers need no more.  Drawn tokens of a long prompt
    are not kept.

    output: ends at `stop`.  typecode: of an array of tokens.
    """
    num_prompt, num_read = stop - len(output), size
    while start < stop:
        end = min(start + num_read, stop)
        if end <= num_prompt:
            tokens = prompt.read(start, end)
        elif start >= num_prompt:
            tokens = output[start - num_prompt : end - num_prompt]
        else:
            tokens = [*prompt.read(start, num_prompt), *output[: end - num_prompt]]
        data = array(typecode, tokens).tobytes()
        if end - start <= size:
            yield data
        else:
            width = size * calcsize(typecode)
            for place in range(0, len(data), width):
                yield data[place : place + width]
        start, num_read = end, max(MANY // size, 1) * size
