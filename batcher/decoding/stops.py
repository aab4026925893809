"""What ends a sequence before max_tokens, stated exactly: its stops, and which of them won.

This is the definition.  The engine only learns from a table (stop_table.py) that *some* stop
completed, and asks here, once per sequence, which one.
"""

from operator import itemgetter
from typing import NamedTuple, cast

from msgspec import Struct

from batcher.models.base import Tokenizer, join_bytes
from batcher.request import Request, StopReason


class StopSet(Struct, frozen=True, cache_hash=True):
    """The stops of a request by precedence, hashable so that equal sets share one automaton.

    token_ids: stop_token.  sequences: the id lists of stop_sequence.  texts: its strings, then
    those of `stop`.
    eos_token_id: the model's EOS, None if there is none or the request ignores it.
    """

    token_ids: tuple[int, ...] = ()
    sequences: tuple[tuple[int, ...], ...] = ()
    texts: tuple[str, ...] = ()
    eos_token_id: int | None = None

    @property
    def has_ids(self) -> bool:
        """Whether any stop is made of token ids."""
        return bool(self.token_ids or self.sequences) or self.eos_token_id is not None

    @property
    def id_patterns(self) -> list[tuple[int, ...]]:
        """Every stop that is made of token ids, EOS included."""
        singles = [(token_id,) for token_id in self.token_ids]
        eos = [] if self.eos_token_id is None else [(self.eos_token_id,)]
        return [*singles, *self.sequences, *eos]

    @property
    def text_patterns(self) -> list[bytes]:
        """The UTF-8 of every text stop."""
        return [text.encode() for text in self.texts]


class StopMatch(NamedTuple):
    """A stop that completed: what the result reports, and the bytes of the text before it."""

    reason: StopReason
    text: bytes


def stop_set(request: Request, eos_token_id: int | None) -> StopSet:
    """Return the stops of a valid `request`."""
    eos_token_id = None if request.ignore_eos else eos_token_id
    if request.stop_token is None and request.stop_sequence is None and request.stop is None:
        return StopSet(eos_token_id=eos_token_id)
    ids, texts = _split_sequences(request.stop_sequence)
    if request.stop is not None:
        texts += (request.stop,) if isinstance(request.stop, str) else tuple(request.stop)
    token = request.stop_token
    return StopSet(
        token_ids=() if token is None else (token,) if isinstance(token, int) else tuple(token),
        sequences=ids,
        texts=texts,
        eos_token_id=eos_token_id,
    )


def _split_sequences(
    stop_sequence: str | list[int | str | list[int]] | None,
) -> tuple[tuple[tuple[int, ...], ...], tuple[str, ...]]:
    """Return the (id sequences, texts) of a valid stop_sequence in any of its four forms."""
    if not stop_sequence:
        return (), ()
    if isinstance(stop_sequence, str):
        return (), (stop_sequence,)
    if isinstance(stop_sequence[0], str):
        return (), tuple(cast(list[str], stop_sequence))
    if isinstance(stop_sequence[0], int):
        return (tuple(cast(list[int], stop_sequence)),), ()
    return tuple(map(tuple, cast(list[list[int]], stop_sequence))), ()


def find_match(stops: StopSet, tokens: list[int], tokenizer: Tokenizer) -> StopMatch | None:
    """Return the stop of `stops` that the last of `tokens` completes, None if it completes none.

    Among several the one that ends at the earliest byte of the last token wins (ids end with their
    token), then the longest, then the order of docs/requests-and-results.md: stop_token,
    stop_sequence, stop, as listed; EOS comes last, so a stop the request itself names is the one
    reported.
    """
    token_bytes = tokenizer.token_bytes
    text = join_bytes(tokens, token_bytes)
    num_new = len(join_bytes(tokens[-1:], token_bytes))
    matches: list[tuple[tuple[int, int, int], StopMatch]] = []  # by precedence, each with its rank

    def match_ids(ids: tuple[int, ...], num_ids: int, reason: StopReason) -> None:
        if tuple(tokens[-len(ids) :]) == ids:
            size = len(join_bytes(ids, token_bytes))
            rank = (len(text), -size, -num_ids)
            matches.append((rank, StopMatch(reason, text[: len(text) - size])))

    for token_id in stops.token_ids:
        match_ids((token_id,), 1, token_id)
    for sequence in stops.sequences:
        match_ids(sequence, len(sequence), list(sequence))
    for given in stops.texts:
        pattern = given.encode()
        begin = text.find(pattern, max(0, len(text) - num_new - len(pattern) + 1))
        if begin >= 0:
            rank = (begin + len(pattern), -len(pattern), 0)
            matches.append((rank, StopMatch(given, text[:begin])))
    if stops.eos_token_id is not None:
        match_ids((stops.eos_token_id,), 0, None)
    return min(matches, key=itemgetter(0))[1] if matches else None  # min takes the first of equals
