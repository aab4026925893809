"""A model of transformers as it is: one sequence at a time, in a cache of transformers' own."""

from copy import deepcopy
from inspect import signature
from typing import Any, NamedTuple

import torch

from batcher.errors import BatchdecodeError, describe
from batcher.hf.decoder import Sizes
from batcher.hf.long_rope import LongRopeError, switch_of
from batcher.hf.parts import is_close
from batcher.transformer.layers import FloatArray

_NUM_TRIED = 8  # tokens
_NUM_APART = 2  # of them, which may go to other experts for the sake of a last bit

# Names of the cache, as an argument and in the output; `cache` since transformers 5.24, for most
# models.
_CACHE_NAMES = ("cache", "past_key_values", "cache_params", "state")


class _Row(NamedTuple):
    """A sequence of which `num_tokens` are in `cache`."""

    num_tokens: int = 0
    cache: Any = None


class WholeDecoder:
    """Computes the next tokens of one sequence after another.

    is_exact: whether each token is computed by itself, so that it does not show in what parts a
    prompt came.

    Raises:
        LongRopeError: its factors may switch.
        BatchdecodeError: it cannot use a cache, or computes something else with it.
    """

    def __init__(self, model: Any, sizes: Sizes, *, is_exact: bool) -> None:
        switch = switch_of(model)
        if switch is not None and switch < sizes.max_position_embeddings:
            raise LongRopeError(switch)
        self.config = sizes
        self._model, self._kind = model, type(model).__name__
        self._known = signature(model.forward).parameters
        found = [name for name in _CACHE_NAMES if name in self._known]
        if not found:
            raise BatchdecodeError(f"{self._kind} takes no cache")
        self._cache_name = found[0]
        self._is_exact, self._continues_by_one = is_exact, False
        self._check_cache()

    @torch.inference_mode()
    def forward(
        self, token_ids: list[int], cache: _Row | None, *, is_scored: bool = False
    ) -> tuple[FloatArray, _Row]:
        """Return the logits after tokens, and the cache of them all; see SequenceDecoder."""
        logits, row = self._continued(token_ids, cache or _Row(), is_scored=is_scored)
        found: FloatArray = logits.float().cpu().numpy()
        return found, row

    def copy(self, cache: _Row) -> _Row:
        """Return a cache that holds the same."""
        return deepcopy(cache)

    def _continued(
        self, token_ids: list[int], row: _Row, *, is_scored: bool = True
    ) -> tuple[torch.Tensor, _Row]:
        """Return what `forward` does, with the arguments that `generate` passes to the model.

        It passes no attention mask for a sequence alone.
        """
        by_one = self._is_exact or (row.num_tokens > 0 and self._continues_by_one)
        device, logits = self._model.device, []
        for part in torch.tensor(token_ids).split(1 if by_one else len(token_ids)):
            num_tokens = row.num_tokens + len(part)
            given = {
                "position_ids": torch.arange(row.num_tokens, num_tokens, device=device)[None],
                "logits_to_keep": 0 if is_scored else 1,
                self._cache_name: row.cache,
            }
            known = {name: value for name, value in given.items() if name in self._known}
            output = self._model(input_ids=part[None].to(device), use_cache=True, **known)
            if (cache := output.get(self._cache_name)) is None:
                raise BatchdecodeError(f"{self._kind} returns no cache")
            logits.append(output.logits[0])
            row = _Row(num_tokens, cache)
        return torch.cat(logits), row

    @torch.inference_mode()
    def _check_cache(self) -> None:
        """Compare a few tokens with and without cache, and find how tokens may follow others.

        Raises:
            BatchdecodeError: the model cannot use a cache, or computes something else with it.
        """
        ids = [token % self.config.vocab_size for token in range(_NUM_TRIED)]
        given = {"use_cache": False} if "use_cache" in self._known else {}
        tried = torch.tensor([ids], device=self._model.device)
        expected = self._model(input_ids=tried, **given).logits[0]
        problem = "computes other logits with its cache than without"
        for self._continues_by_one in (False, True):  # some continue by one token only
            try:
                if is_close(self._in_parts(ids), expected, _NUM_APART):
                    return
            except BatchdecodeError:
                raise
            except Exception as error:  # noqa: BLE001 - somebody else's code
                problem = f"cannot continue from its cache: {describe(error)}"
        raise BatchdecodeError(f"{self._kind} {problem}")

    def _in_parts(self, ids: list[int]) -> torch.Tensor:
        """Return the logits after tokens, with another sequence in between.

        It shows in models that keep their states outside the cache.
        """
        begin, row = self._continued(ids[:4], _Row())
        self._continued(ids[:1:-1], _Row())
        one, row = self._continued(ids[4:5], row)
        return torch.cat([begin, one, self._continued(ids[5:], row)[0]])
