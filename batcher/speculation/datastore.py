"""What follows what in texts that do not change, however long the end that is looked for.

A suffix array (Manber and Myers 1990) of what stands before each token, read backwards: so the
places that have the same tokens before them stand together, and those of a longer end among them.
"""

from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from batcher.speculation.branches import likeliest_branches
from batcher.tokens import Tokens

LONGEST = 16  # tokens, a power of two: of an end no more are looked for
_MAX_PLACES = 64  # of those that have the same end before them so many, evenly chosen, are counted
_BETWEEN = -1  # between two texts


class Datastore:
    """Finds what followed the end of a row in texts."""

    def __init__(self, texts: Iterable[Tokens]) -> None:
        between = np.array([_BETWEEN], np.int32)
        parts = [part for text in texts for part in (between, np.asarray(text, np.int32))]
        tokens = np.concatenate([*parts, between])
        order = _by_what_is_before(tokens)
        self._tokens = tokens.data
        self._places = order[tokens[order] != _BETWEEN].astype(np.int32).data

    def continuation(self, tokens: Sequence[int], number: int) -> list[int]:
        """Return at most `number` tokens that most often follow the longest end of `tokens`.

        Of tokens that follow equally often it is the one that stands first in the texts.
        """
        places = self._find(tokens)
        known, draft = self._tokens, list[int]()
        while len(places) > 1 and len(draft) < number:
            following = [known[place] for place in places]
            counts = Counter(token for token in following if token != _BETWEEN)
            if not counts:
                return draft
            [(best, _)] = counts.most_common(1)
            draft.append(best)
            pairs = zip(places, following, strict=True)
            places = [place + 1 for place, token in pairs if token == best]
        if places:
            [place] = places[:1]
            rest = known[place : place + number - len(draft)].tolist()
            draft += rest[: rest.index(_BETWEEN)] if _BETWEEN in rest else rest
        return draft

    def branches(self, tokens: Sequence[int], num_branches: int, length: int) -> list[list[int]]:
        """Return the likeliest that follows the longest end of `tokens`, as branches of a tree."""
        known = self._tokens

        def followers(places: list[int]) -> list[tuple[float, int, list[int]]]:
            following = [known[place] for place in places]
            counts = Counter(token for token in following if token != _BETWEEN)
            pairs = [*zip(places, following, strict=True)]
            return [
                (num / len(places), token, [place + 1 for place, own in pairs if own == token])
                for token, num in counts.most_common(num_branches)
            ]

        return likeliest_branches(self._find(tokens), num_branches, length, followers)

    def _find(self, tokens: Sequence[int]) -> list[int]:
        """Return places, ascending, that have the longest end of `tokens` before them."""
        known, places = self._tokens, self._places
        low, high = 0, len(places)
        is_found = False
        for back, token in enumerate(reversed(tokens[-LONGEST:]), 1):

            def before(place: int, back: int = back) -> int:
                return known[place - back]

            first = bisect_left(places, token, low, high, key=before)
            last = bisect_right(places, token, first, high, key=before)
            if first == last:
                break
            low, high, is_found = first, last, True
        if not is_found:
            return []
        return sorted(places[low : high : -(-(high - low) // _MAX_PLACES)].tolist())


def _by_what_is_before(tokens: NDArray[np.int32]) -> NDArray[np.int64]:
    """Return all places [tokens] in the order of the LONGEST tokens before each, the last first.

    Places of the same tokens stay in order.  Ranks by so many tokens and the ranks as many tokens
    further back make ranks by twice as many (Manber and Myers, section 3).
    """
    ranks = np.zeros(len(tokens), np.int64)
    ranks[1:] = tokens[:-1].astype(np.int64) - _BETWEEN
    length = 1
    while length < LONGEST:
        pairs = ranks * (int(ranks.max()) + 1)
        pairs[length:] += ranks[:-length]
        ranks = np.unique(pairs, return_inverse=True)[1].astype(np.int64)
        length *= 2
    return np.argsort(ranks, kind="stable")
