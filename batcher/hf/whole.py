"""A model of transformers as it is: one sequence at a time, in a cache of transformers' own."""

from copy import deepcopy
from inspect import signature
from typing import Any

import numpy as np
import torch

from batcher.errors import BatchdecodeError
from batcher.hf.decoder import Sizes
from batcher.transformer.layers import FloatArray

_PROBE = torch.arange(8)  # tokens that any vocabulary has
_TOLERANCE = 0.05  # parts of the largest logit

# What the cache is called in a call, and in what comes of it: since transformers 5.24 `cache`.
_CACHE_NAMES = ("cache", "cache_params")


class WholeDecoder:
    """Computes the next tokens of one sequence after another.

    is_exact: whether each token is computed by itself, so that it does not show in what parts a
    prompt came.

    Raises:
        BatchdecodeError: it keeps no cache.
    """

    def __init__(self, model: Any, sizes: Sizes, *, is_exact: bool) -> None:
        self.config = sizes
        self._model = model
        known = signature(model.forward).parameters
        names = (name for name in _CACHE_NAMES if name in known)
        self._cache_name = next(names, "past_key_values")
        self._last_only = {"logits_to_keep": 1} if "logits_to_keep" in known else {}
        self._is_exact, self._goes_on_by_one = is_exact, False
        self._goes_on_by_one = not self._goes_on_by_several()

    @torch.inference_mode()
    def forward(
        self, token_ids: list[int], cache: Any | None, *, is_scored: bool = False
    ) -> tuple[FloatArray, Any]:
        """Return the logits after tokens, and the cache of them all; see SequenceDecoder."""
        given = {} if is_scored else self._last_only
        by_one = self._is_exact or (cache is not None and self._goes_on_by_one)
        parts = []
        for part in torch.tensor(token_ids).split(1 if by_one else len(token_ids)):
            ids = part[None].to(self._model.device)
            output = self._model(
                input_ids=ids, use_cache=True, **{self._cache_name: cache}, **given
            )
            cache = getattr(output, self._cache_name)
            parts.append(output.logits[0].float().cpu().numpy())
        logits: FloatArray = np.concatenate(parts)
        return logits, cache

    def copy(self, cache: Any) -> Any:
        """Return a cache that holds the same."""
        return deepcopy(cache)

    def _goes_on_by_several(self) -> bool:
        """Return whether several tokens may follow others: some models then forget their states."""
        ids = _PROBE.tolist()
        expected, _ = self.forward(ids, None, is_scored=True)
        _, cache = self.forward(ids[:4], None)
        if cache is None:
            raise BatchdecodeError(f"{type(self._model).__name__} keeps no cache")
        logits, _ = self.forward(ids[4:], cache, is_scored=True)
        return bool(abs(logits - expected[4:]).max() <= _TOLERANCE * abs(expected).max())
