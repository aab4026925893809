"""What a model gives at each position of rows, token by token or all at once."""

from collections.abc import Iterable, Sequence
from itertools import groupby
from operator import itemgetter

import numpy as np
from msgspec import Struct

from batcher.decoding.filters import sampling_params
from batcher.decoding.logprobs import Floats
from batcher.decoding.sampling import Sampler, SamplingRow
from batcher.errors import ModelError
from batcher.models.base import Batch, Chunk, FloatArray, Model, eos_token_ids_of
from batcher.request import Request

_SLOT = 0
_NO_KEY = 0  # nothing is drawn


class TargetOutput(Struct, frozen=True):
    """A request, its prompt, and what the target wrote, of at least one token."""

    request: Request
    prompt: list[int]
    output: list[int]


class RowLogits:
    """Asks a model, which nobody else uses, about one row at a time."""

    def __init__(self, model: Model) -> None:
        self._model = model
        model.allocate(1)

    def step_by_step(self, tokens: Sequence[int], num_prompt: int) -> FloatArray:
        """Return the logits [tokens after the prompt, vocab] that each of them is chosen by.

        The prompt is computed at once, and then a token at a time, as when the row is decoded.

        Raises:
            ModelError: the model fails.
        """
        batch = self._begin(tokens[:num_prompt])
        rows = [self._forward(batch)]
        for token in tokens[num_prompt:-1]:
            batch.chunks = []
            batch.tokens[_SLOT] = token
            rows.append(self._forward(batch))
        self._model.release(_SLOT)
        return np.stack(rows)

    def at_once(self, tokens: Sequence[int]) -> FloatArray:
        """Return the logits [vocab] after `tokens`, none of which is in the cache.

        Raises:
            ModelError: the model fails.
        """
        logits = self._forward(self._begin(tokens))
        self._model.release(_SLOT)
        return logits

    def _begin(self, tokens: Sequence[int]) -> Batch:
        batch = Batch(1)
        batch.join(Chunk(_SLOT, list(tokens), 0))
        batch.logit_slots = np.array([_SLOT])
        return batch

    def _forward(self, batch: Batch) -> FloatArray:
        output = self._model.forward(batch)
        if output.failed or output.logits is None:
            why = output.failed.get(_SLOT, "it gives no logits")
            raise ModelError(f"{self._model.name}: {getattr(why, 'message', why)}")
        logits: FloatArray = output.logits[0].copy()
        return logits


class Side:
    """A model, its logits at each position of all rows, and the probabilities that they become."""

    def __init__(self, model: Model, rows: Sequence[TargetOutput]) -> None:
        self._rows, self._row_logits = rows, RowLogits(model)
        self._sampler = Sampler(1, model.vocab_size or 0, model.tokenizer)
        self._eos = eos_token_ids_of(model)
        self.logits = [
            self._row_logits.step_by_step([*row.prompt, *row.output], len(row.prompt))
            for row in rows
        ]

    def probabilities(
        self, requests: Sequence[Request], places: Sequence[tuple[int, int]], scale: float = 1.0
    ) -> list[Floats]:
        """Return the probabilities [vocab] at each of `places`: row, and position in its output.

        requests: of each row, how it is drawn from.  places: ascending.
        scale: what logits are multiplied by.
        """
        found: list[Floats] = []
        for number, of_row in groupby(places, itemgetter(0)):
            positions = [position for _, position in of_row]
            logits = self.logits[number][positions] * np.float32(scale)
            found += self._drawn_from(number, requests[number], positions, logits)
        return found

    def recomputed(self, number: int, request: Request, positions: Sequence[int]) -> list[Floats]:
        """Return the same at positions of a row, without what the model has in its cache."""
        row = self._rows[number]
        logits = (
            self._row_logits.at_once([*row.prompt, *row.output[:position]])
            for position in positions
        )
        return self._drawn_from(number, request, positions, logits)

    def _drawn_from(
        self,
        number: int,
        request: Request,
        positions: Sequence[int],
        logits: Iterable[FloatArray],
    ) -> list[Floats]:
        """Return what a row is drawn from at `positions` of its output, by the logits of each."""
        row, sampler, found, num_known = self._rows[number], self._sampler, [], 0
        stop = request.stop_token
        stops = [] if stop is None else [stop] if isinstance(stop, int) else stop
        eos = () if request.ignore_eos else self._eos
        params = sampling_params(request)
        sampler.open(_SLOT, SamplingRow(params, _NO_KEY, row.prompt, (*stops, *eos)))
        for position, own in zip(positions, logits, strict=True):
            sampler.extend({_SLOT: row.output[num_known:position]})
            num_known = position
            found.append(sampler.probabilities(_SLOT, own))
        sampler.close(_SLOT)
        return found
