"""Decoding by the slowest obvious means: one request at a time, stops looked for at every token."""

import random
from collections.abc import Callable, Sequence
from typing import NamedTuple

from hypothesis import strategies as st

from batcher import Request, SimulatedModel
from batcher.models.base import Tokenizer
from batcher.models.callables import CallableModel
from batcher.models.simulated import reference_next_token
from batcher.models.tokenizers import ByteTokenizer

SIMULATED = SimulatedModel()


class Decoded(NamedTuple):
    """What a request must be given, whatever the batch."""

    tokens: list[int]
    text: str
    finish_reason: str
    stop_reason: int | list[int] | str | None


class Language(NamedTuple):
    """A model as the reference sees it: the next token of a prefix, and how tokens are text."""

    next_token: Callable[[Sequence[int]], int]
    tokenizer: Tokenizer
    eos_token_id: int | None


ENGLISH = Language(lambda prefix: reference_next_token(SIMULATED, prefix), SIMULATED.tokenizer, 0)


def tiny_next(prefix):
    """A model of three letters that repeats one of them often, so that overlapping stops occur."""
    return random.Random(repr(list(prefix))).choice([97, 97, 97, 98, 99])


TINY = Language(tiny_next, ByteTokenizer(), None)


def tiny_model():
    return CallableModel(lambda prefixes: [tiny_next(prefix) for prefix in prefixes])


def decode_alone(request, language):
    prompt = request.prompt
    prefix = language.tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)
    tokens = []
    while len(tokens) < request.output_limit:
        tokens.append(language.next_token(prefix + tokens))
        stopped = first_stop(request, tokens, language)
        if stopped is not None:
            return stopped
    return Decoded(tokens, as_text(tokens, language), "length", None)


def as_text(tokens, language):
    return as_bytes(tokens, language).decode("utf-8", "replace")


def as_bytes(tokens, language):
    return b"".join(language.tokenizer.token_bytes[token] for token in tokens)


def first_stop(request, tokens, language):
    """Walk through the bytes of the last token; at each, the longest stop that ends there wins."""
    text = as_bytes(tokens, language)
    old = len(as_bytes(tokens[:-1], language))
    ids, texts = listed_stops(request, language)
    for end in range(min(old + 1, len(text)), len(text) + 1):
        ending = [
            (len(stop.encode()), 0, -order, stop)
            for order, stop in enumerate(texts)
            if end > old and text[:end].endswith(stop.encode())
        ]
        if end == len(text):
            ending += [
                (len(as_bytes(stop, language)), *rank(order, len(stop), given), given)
                for order, (stop, given) in enumerate(ids)
                if tokens[-len(stop) :] == stop
            ]
        if ending:
            length, _, _, given = max(ending, key=lambda stop: stop[:3])
            kept = text[: end - length].decode("utf-8", "replace")
            return Decoded(list(tokens), kept, "stop", given)
    return None


def rank(order, num_ids, given):
    return (0, -1000) if given is None else (num_ids, 1000 - order)


def listed_stops(request, language):
    """The id stops as (ids, what is reported), then the text stops, each in order of precedence."""
    token, sequence, text = request.stop_token, request.stop_sequence, request.stop
    ids = [([t], t) for t in ([token] if isinstance(token, int) else token or [])]
    sequence = [sequence] if isinstance(sequence, str) else sequence or []
    if sequence and isinstance(sequence[0], int):
        sequence = [sequence]
    ids += [(stop, stop) for stop in sequence if isinstance(stop, list)]
    if language.eos_token_id is not None and not request.ignore_eos:
        ids.append(([language.eos_token_id], None))
    texts = [stop for stop in sequence if isinstance(stop, str)]
    return ids, texts + ([text] if isinstance(text, str) else text or [])


def _outputs():
    prompts = ["", "Tell me", " the river", "é—", [258], [5, 6, 7], [2] * 40, " dog", [0], [0, 0]]
    endless = [Request(prompt=prompt, max_tokens=40, ignore_eos=True) for prompt in prompts]
    return [(request.prompt, decode_alone(request, ENGLISH).tokens) for request in endless]


OUTPUTS = _outputs()


@st.composite
def english_requests(draw):
    """A request for the simulated model whose stops are mostly pieces of what it would write."""
    prompt, output = draw(st.sampled_from(OUTPUTS))
    text = as_text(output, ENGLISH)

    def piece(of):
        starts = st.integers(0, len(of) - 1)
        return st.builds(lambda start, size: of[start : start + size], starts, st.integers(1, 9))

    ids = piece(output).filter(lambda stop: len(stop) < 6)
    return Request(
        prompt=prompt,
        max_tokens=draw(st.integers(0, 40)),
        ignore_eos=draw(st.booleans()),
        stop_token=draw(
            st.none() | st.sampled_from(output) | st.lists(st.sampled_from(output), min_size=1)
        ),
        stop_sequence=draw(
            st.none()
            | ids
            | st.lists(ids, min_size=1, max_size=3)
            | piece(text)
            | st.lists(piece(text), min_size=1, max_size=3)
        ),
        stop=draw(st.none() | piece(text) | st.lists(piece(text), min_size=1, max_size=3)),
        arrival_time=draw(st.sampled_from([0, 0, 0, 0.5, 3, 3.25, 7, 60, 1e6])),
    )


@st.composite
def tiny_requests(draw):
    """A request for the model of three letters, with stops that overlap each other."""
    letters = st.text("abc", min_size=1, max_size=5)
    ids = st.lists(st.sampled_from([97, 98, 99]), min_size=1, max_size=5)
    return Request(
        prompt=draw(st.text("abc", max_size=4)),
        max_tokens=draw(st.integers(0, 30)),
        stop_token=draw(st.none() | st.sampled_from([99, 300, 70_000])),
        stop_sequence=draw(st.none() | ids | st.lists(ids, min_size=1, max_size=4) | letters),
        stop=draw(st.none() | letters | st.lists(letters, min_size=1, max_size=4)),
        arrival_time=draw(st.sampled_from([0, 0, 2.5, 9])),
    )


def place_of(record):
    """Return the place in the input of a request whose id was left to the engine."""
    return int(record.id) - 1
