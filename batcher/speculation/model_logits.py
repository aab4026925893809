"""What a model gives at each position of rows, token by token or all at once."""

from collections.abc import Sequence

import numpy as np
from msgspec import Struct

from batcher.decoding.sampling.bad_words import Vocabulary
from batcher.decoding.sampling.logprobs import Floats
from batcher.errors import ModelError
from batcher.models.base import Batch, Chunk, FloatArray, Model, eos_token_ids_of
from batcher.request import Request
from batcher.speculation.processing import Processing

_SLOT = 0


class Row(Struct, frozen=True):
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

    def __init__(self, model: Model, rows: Sequence[Row]) -> None:
        self._rows, self._row_logits = rows, RowLogits(model)
        self._vocabulary = Vocabulary(model.tokenizer.token_bytes, model.vocab_size or 0)
        self._eos = eos_token_ids_of(model)
        self.logits = [
            self._row_logits.step_by_step([*row.prompt, *row.output], len(row.prompt))
            for row in rows
        ]

    def probabilities(
        self, requests: Sequence[Request], places: Sequence[tuple[int, int]], scale: float = 1.0
    ) -> list[Floats]:
        """Return the probabilities [vocab] at each of `places`: row, and position in its output.

        requests: of each row, how it is drawn from.  scale: what logits are multiplied by.
        """
        processings = [self._processing(request) for request in requests]
        return [
            processings[number].probabilities(
                self.logits[number][place] * np.float32(scale),
                self._rows[number].prompt,
                self._rows[number].output[:place],
            )
            for number, place in places
        ]

    def recomputed(self, number: int, request: Request, places: Sequence[int]) -> list[Floats]:
        """Return the same at positions of a row, without what the model has in its cache."""
        row, processing = self._rows[number], self._processing(request)
        return [
            processing.probabilities(
                self._row_logits.at_once([*row.prompt, *row.output[:place]]),
                row.prompt,
                row.output[:place],
            )
            for place in places
        ]

    def _processing(self, request: Request) -> Processing:
        stop = request.stop_token
        stops = [] if stop is None else [stop] if isinstance(stop, int) else stop
        eos = () if request.ignore_eos else self._eos
        return Processing(request, self._vocabulary, [*stops, *eos])
