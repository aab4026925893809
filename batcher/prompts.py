"""Prompts as requests state them, read into token ids.

Rule: the tokens that a `length` stands for depend on its seed, their place in the segment and the
size of the vocabulary, and on nothing else: equal segments share cached blocks.
"""

from functools import lru_cache
from hashlib import blake2b
from typing import TypeGuard

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from batcher.errors import EncodingError, RequestError, not_encoded
from batcher.models.base import Model, Tokenizer
from batcher.models.simulated_logits import scramble
from batcher.request import PromptInput, PromptSegment

FIRST_ORDINARY_TOKEN = 3  # ids below are often special
DEFAULT_VOCAB_SIZE = 512  # for a model that takes any id

MAX_TABLE = 2**18  # ids; of a larger vocabulary each token of a prompt is an integer of its own

PINNED_RANK = 3
RANKS = {None: 0, "assistant": 0, "user": 1, "system": 2}

Border = tuple[int, int]

_BITS = 64
_STEP = np.uint64(0x9E3779B97F4A7C15)  # of splitmix64's counter
_HALF = np.uint64(32)  # bits


class Prompt(Struct, frozen=True, gc=False):
    """A prompt as the model reads it.

    borders: for each segment that has tokens where it ends, counted in tokens, and its rank: of
    cached blocks, those of the lowest rank are given up first.  () without segments.
    """

    tokens: list[int]
    borders: tuple[Border, ...] = ()

    def after(self, history: list[int]) -> "Prompt":
        """Return the prompt of a turn that goes on from the tokens of `history`."""
        start = len(history)
        borders = tuple((start + end, rank) for end, rank in self.borders)
        if borders and start:
            borders = ((start, 0), *borders)
        return Prompt([*history, *self.tokens], borders)

    def cut(self, num_tokens: int) -> "Prompt":
        """Return the first `num_tokens` tokens, with a border where the last segment is cut."""
        borders: list[Border] = []
        for end, rank in self.borders:
            borders.append((min(end, num_tokens), rank))
            if end >= num_tokens:
                break
        return Prompt(self.tokens[:num_tokens], tuple(borders) if num_tokens else ())


def read_prompt(prompt: PromptInput, field: str, request_id: str, model: Model) -> Prompt:
    """Return the tokens of a valid `prompt`, which is the value of `field`.

    The list is the prompt's own if that is one of token ids.

    Raises:
        RequestError: the model's tokenizer fails on a text.
    """
    if isinstance(prompt, str):
        return Prompt(_encode(prompt, (field,), request_id, model))
    if not (prompt and isinstance(prompt[0], PromptSegment)):
        return Prompt(prompt)  # type: ignore[arg-type]  # of ids, then
    tokens: list[int] = []
    borders: list[Border] = []
    for index, segment in enumerate(prompt):
        if segment.text is not None:
            found = _encode(segment.text, (field, index, "text"), request_id, model)
        else:
            found = segment_tokens(segment, model.vocab_size)
        if found:
            tokens += found
            borders.append((len(tokens), rank_of(segment)))
    return Prompt(tokens, tuple(borders))


def has_segments(prompt: PromptInput) -> TypeGuard[list[PromptSegment]]:
    """Return whether a valid `prompt` is a list of segments."""
    return bool(prompt) and isinstance(prompt[0], PromptSegment)


def rank_of(segment: PromptSegment) -> int:
    """Return how late cached blocks of `segment` are given up: a higher rank is kept longer."""
    return PINNED_RANK if segment.pin else RANKS[segment.type]


def segment_tokens(segment: PromptSegment, vocab_size: int | None) -> list[int]:
    """Return the tokens of a segment without text: those it lists, or those its seed stands for."""
    if segment.tokens is not None:
        return segment.tokens
    return _drawn_tokens(segment.seed, segment.length or 0, vocab_size)


def count_tokens(prompt: PromptInput, tokenizer: Tokenizer) -> int:
    """Return how many tokens a valid `prompt` has, without drawing any."""
    if isinstance(prompt, str):
        return len(tokenizer.encode(prompt))
    if not has_segments(prompt):
        return len(prompt)
    return sum(_count(segment, tokenizer) for segment in prompt)


def _count(segment: PromptSegment, tokenizer: Tokenizer) -> int:
    if segment.text is not None:
        return len(tokenizer.encode(segment.text))
    return segment.length or len(segment.tokens or ())


def _drawn_tokens(seed: int | str, length: int, vocab_size: int | None) -> list[int]:
    """Return `length` ids, uniform over the ordinary ones: splitmix64, seeded with a hash."""
    size = DEFAULT_VOCAB_SIZE if vocab_size is None else vocab_size
    first = FIRST_ORDINARY_TOKEN if size > FIRST_ORDINARY_TOKEN else 0
    places = np.arange(length, dtype=np.uint64)
    bits = scramble(places * _STEP + np.uint64(_hash(seed)))
    # The upper half, as a fraction of 2^32, of so many tokens.
    drawn = ((bits >> _HALF) * np.uint64(size - first)) >> _HALF
    token_ids = drawn.view(np.int64) + first
    shared = _token_table(size).take(token_ids) if size <= MAX_TABLE else token_ids
    tokens: list[int] = shared.tolist()
    return tokens


@lru_cache(maxsize=2)
def _token_table(size: int) -> NDArray[np.object_]:
    """Return [size] the ids as Python's integers, which all prompts share: 28 bytes each."""
    return np.array(range(size), dtype=object)


def _hash(seed: int | str) -> int:
    """Return 64 bits that are the same in every process; neighbouring seeds have nothing alike."""
    if isinstance(seed, str):
        return int.from_bytes(blake2b(seed.encode(), digest_size=_BITS // 8).digest(), "little")
    return int(scramble(seed & (2**_BITS - 1)))


def _encode(text: str, path: tuple[str | int, ...], request_id: str, model: Model) -> list[int]:
    try:
        return model.tokenizer.encode(text)
    except EncodingError as error:
        raise RequestError(request_id, [not_encoded(path, error)]) from error
