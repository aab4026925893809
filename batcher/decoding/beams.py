"""Beam search over the rows of one request, with the semantics of Hugging Face's `generate`.

A *place* is the slot of a beam. The best child of a beam stays in its parent's place. Other
children go to places without children, so that only a real fork copies a cache. Of two equal
candidates the one of the better beam comes first, then the lower token id.

Sums and scores are float32, as in `generate`, so that both cut at the same candidates.
"""

from collections.abc import Callable
from typing import Literal, NamedTuple

import numpy as np

from batcher.decoding.filters import LOWEST, top_candidates
from batcher.models.base import FloatArray

# Divisors keep to this range, so that no length penalty makes a score infinite or NaN.
_MIN_DIVISOR, _MAX_DIVISOR = 1e-30, 1e30

_Path = tuple["_Path", int] | None  # a beam's tokens, last one outside; forks share the rest


class Hypothesis(NamedTuple):
    """A sequence that the search found.

    score: sum of its log probs / (number of its tokens)^length_penalty.
    has_ended: an EOS or a stop completed; False if it was cut short.
    """

    tokens: list[int]
    score: float
    has_ended: bool


class BeamStep(NamedTuple):
    """The next token of every place: the row of `parents[place]` continues with `tokens[place]`.

    tokens, parents: [num_beams]. A place p with parents[p] != p is never a parent itself. An unused
    place repeats the best beam, so that its row can always be computed.
    """

    tokens: list[int]
    parents: list[int]


class _Beam(NamedTuple):
    place: int
    path: _Path
    total: np.float32  # the sum of its log probs


class BeamSearch:
    """Chooses step by step how the beams of one request continue; holds no model and no cache.

    The search is that of transformers 5 (`GenerationMixin._beam_search`), without the candidates at
    -1e9 or -inf that only fill a tensor. So there may be fewer beams than places, and fewer results
    than requested. One beam decodes greedily.

    has_failed: every token of every beam became impossible before any beam finished.
    """

    def __init__(
        self,
        *,
        num_beams: int,
        num_results: int,
        length_penalty: float,
        early_stopping: bool | Literal["never"],
        max_tokens: int,
        num_eos: int,
    ) -> None:
        self.has_failed = False
        self._num_beams = num_beams
        self._num_results = num_results
        self._length_penalty = length_penalty
        self._is_enough_when_full = early_stopping is True or num_beams == 1
        self._hopes_for_length = early_stopping == "never" and length_penalty > 0
        self._max_tokens = max_tokens
        # enough for num_beams to continue even if each of them may end with any EOS
        self._num_candidates = max(2, 1 + num_eos) * num_beams
        self._num_tokens = 0  # of every running beam
        self._running = [_Beam(0, None, np.float32(0))]  # best first
        self._finished: list[Hypothesis] = []  # best first

    def advance(self, log_probs: FloatArray, ends: Callable[[int, int], bool]) -> BeamStep | None:
        """Return the next step of every place, or None if the search is done.

        log_probs: [num_beams, vocab] float32 by place, after the processors, without NaN; -inf is
        an impossible token. The first step needs [1, vocab] only.
        ends: whether a token chosen at a place ends that hypothesis.
        """
        totals = np.array([beam.total for beam in self._running], np.float32)
        sums = log_probs[[beam.place for beam in self._running]]
        with np.errstate(over="ignore"):  # to -inf, which is impossible too
            sums += totals[:, None]
        vocab_size, flat = sums.shape[1], sums.reshape(-1)
        [(_, [indices], [values])] = top_candidates(flat[None], self._num_candidates)
        best = indices[np.argsort(-values, kind="stable")][: np.isfinite(values).sum()]
        candidates = [
            (self._running[index // vocab_size], index % vocab_size, flat[index])
            for index in best[: self._num_candidates].tolist()
        ]
        if not candidates:
            self.has_failed = not self._finished
            if self._finished:
                self._running = []
            return None
        self._num_tokens += 1
        num_beams, num_tokens = self._num_beams, self._num_tokens
        is_last_step = num_tokens >= self._max_tokens
        has_ended = [ends(beam.place, token) for beam, token, _ in candidates]
        # those of the best candidates that end here are kept, if they are among the best so far
        best = zip(candidates[:num_beams], has_ended[:num_beams], strict=True)
        self._finished += [
            Hypothesis(_tokens((beam.path, token)), self._score(total, num_tokens), is_over)
            for (beam, token, total), is_over in best
            if is_over or is_last_step
        ]
        self._finished.sort(key=lambda finished: -finished.score)  # stable: the older one first
        del self._finished[num_beams:]
        going_on = [c for c, is_over in zip(candidates, has_ended, strict=True) if not is_over]
        is_done = not going_on or is_last_step
        if not is_done and len(self._finished) >= num_beams:
            # As `generate` expects, the best beam's sum stays as it is, and its length does too,
            # unless early_stopping is "never" and longer is better.
            length = self._max_tokens if self._hopes_for_length else num_tokens
            is_hopeless = self._score(going_on[0][2], length) <= self._finished[-1].score
            is_done = is_hopeless or self._is_enough_when_full
        if is_done:
            self._running = []
            return None
        # each candidate gets a place, and every place that is left over the best one's double
        going_on = going_on[:num_beams]
        first_ranks: dict[int, int] = {}  # of the children of each place
        for rank, (beam, _, _) in enumerate(going_on):
            first_ranks.setdefault(beam.place, rank)
        free = iter([place for place in range(num_beams) if place not in first_ranks])
        places = [
            beam.place if first_ranks[beam.place] == rank else next(free)
            for rank, (beam, _, _) in enumerate(going_on)
        ]
        at_place = dict(zip(places, going_on, strict=True))
        self._running = [
            _Beam(place, (beam.path, token), total)
            for place, (beam, token, total) in at_place.items()
        ]
        chosen = [at_place.get(place, going_on[0]) for place in range(num_beams)]
        return BeamStep([token for _, token, _ in chosen], [beam.place for beam, _, _ in chosen])

    def running_tokens(self) -> list[list[int]]:
        """Return the tokens of each running beam, by place; one empty list without any."""
        if not self._num_tokens or not self._running:
            return [[]]
        best = self._running[0].path
        paths = {beam.place: beam.path for beam in self._running}
        return [_tokens(paths.get(place, best)) for place in range(self._num_beams)]

    def results(self) -> list[Hypothesis]:
        """Return the `num_results` best hypotheses, best first, or as many as there are.

        After an aborted or failed search, unfinished beams come last.
        """
        length = max(1, self._num_tokens)
        cut = [
            Hypothesis(_tokens(beam.path), self._score(beam.total, length), has_ended=False)
            for beam in self._running
        ]
        return [*self._finished, *cut][: self._num_results]

    def _score(self, total: np.float32, num_tokens: int) -> float:
        with np.errstate(over="ignore", under="ignore"):
            power = np.float64(num_tokens) ** self._length_penalty
            divisor = np.float32(np.clip(power, _MIN_DIVISOR, _MAX_DIVISOR))
            return float(max(total / divisor, LOWEST))


def _tokens(path: _Path) -> list[int]:
    tokens = []
    while path is not None:
        path, token = path
        tokens.append(token)
    return tokens[::-1]
