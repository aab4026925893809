"""The probabilities that a request leaves of logits: what a draft and its target have in common."""

from collections import Counter
from collections.abc import Sequence

import numpy as np

from batcher.decoding.sampling import filters
from batcher.decoding.sampling.bad_words import BadWords, Vocabulary
from batcher.decoding.sampling.group import Group, GroupKey, sampling_params
from batcher.decoding.sampling.logprobs import Floats, log_softmax
from batcher.decoding.sampling.penalties import penalize
from batcher.models.base import FloatArray
from batcher.request import Request

_ROW = np.zeros(1, np.int64)


class Processing:
    """What the settings of a request make of logits, in the order of the sampler.

    stop_token_ids: what is held off until min_tokens.
    """

    def __init__(
        self, request: Request, vocabulary: Vocabulary, stop_token_ids: Sequence[int]
    ) -> None:
        self._params = params = sampling_params(request)
        self._bad_words = BadWords(params.bad_words, vocabulary) if params.bad_words else None
        key = GroupKey(params, is_beam=False, is_constrained=False)
        self._group = Group(key, vocabulary.size, self._bad_words)
        self._stop_token_ids = [token for token in stop_token_ids if token < vocabulary.size]

    def probabilities(
        self, logits: FloatArray, prompt: Sequence[int], output: Sequence[int]
    ) -> Floats:
        """Return the probabilities [vocab] of the token after `prompt` and `output`."""
        params, row = self._params, logits[None].astype(np.float32)
        self._group.ban(row, np.array([self._bad_word_state(output)]))
        if len(output) < params.min_tokens:
            row[0, self._stop_token_ids] = -np.inf
        self._group.add_bias(row)
        if params.has_penalties:
            counts = Counter(output)
            seen = np.array(list(dict.fromkeys([*prompt, *output])), np.int64)
            times = np.array([counts[token] for token in seen.tolist()], np.int64)
            penalize(row, (np.zeros_like(seen), seen, times), params)
        if params.is_greedy:
            likeliest: Floats = np.zeros(row.shape[1])
            likeliest[row.argmax()] = 1.0
            return likeliest
        scores = filters.temper(row.astype(np.float64), params.temperature)
        if params.top_k:
            filters.keep_top_k(scores, params.top_k)
        filters.keep_top_p(scores, params.top_p)
        filters.keep_min_p(scores, params.min_p)
        filters.keep_typical(scores, params.typical_p)
        probabilities: Floats = np.exp(log_softmax(scores))[0]
        return probabilities

    def _bad_word_state(self, output: Sequence[int]) -> int:
        state = 0
        if self._bad_words is not None:
            for token in output:
                state = self._bad_words.next_state(state, token)
        return state
