"""The first layers of a checkpoint as a model of its own, with its final norm and head: a draft.

It shares what the whole model has: weights, and the cells of keys and values.  What these layers
make of a token is the same in both, so what the one has computed of a row, the other need not; what
this one computes of drafts, the whole model writes over with the same bits.  See Zhang et al.,
"Draft & Verify" (2023), and Elhoushi et al., "LayerSkip" (2024).
"""

from collections.abc import Sequence
from typing import Self

from batcher.errors import BatchdecodeError, InvariantError
from batcher.models.base import Batch, ModelOutput
from batcher.models.transformer import TransformerModel
from batcher.transformer.config import TransformerConfig
from batcher.transformer.kv_store import KVStore
from batcher.transformer.layers import FloatArray
from batcher.transformer.recurrent_states import RecurrentStates
from batcher.transformer.span import Span
from batcher.transformer.transformer import CausalModel


class FirstLayersModel(TransformerModel):
    """The first layers of `whole`, which computes rows in the pages of that.

    It needs no `allocate_pages`, but that of the whole model.  What its batch says is to be copied
    or moved is so for both: only one of the two should be told.

    num_layers: how many; fewer than the whole model has, none of them recurrent.

    Raises:
        BatchdecodeError: it has not.
    """

    def __init__(self, whole: TransformerModel, num_layers: int) -> None:
        _check(whole, num_layers)
        self._whole, self._num_layers = whole, num_layers
        super().__init__(
            _FirstLayers(whole, num_layers),
            whole.tokenizer,
            f"layers:{num_layers}",
            {},
            whole.max_context,
            whole.layout,
        )

    def twin(self) -> Self:
        """Return one of the same whole model."""
        return type(self)(self._whole, self._num_layers)

    def forward(self, batch: Batch) -> ModelOutput:
        """Compute the new tokens of all rows, whose past either model has computed.

        Raises:
            InvariantError: the batch has no pages.
        """
        if batch.pages is None:
            raise InvariantError("the first layers of a model have no cache of their own")
        if self._store is not self._whole.store or len(self._lengths) != len(batch.tokens):
            self.allocate_pages(len(batch.tokens), None, batch.pages.block_size)
        return super().forward(batch)


def _check(whole: TransformerModel, num_layers: int) -> None:
    """Raise a BatchdecodeError if so many layers cannot draft."""
    config = whole.decoder.config
    if not isinstance(config, TransformerConfig):
        raise BatchdecodeError(f"layers:{num_layers}: the layers of {whole.name} run only together")
    if not 1 <= num_layers < config.num_layers:
        allowed = f"1 to {config.num_layers - 1}" if config.num_layers > 1 else "none"
        raise BatchdecodeError(
            f"layers:{num_layers}: {whole.name} has {config.num_layers} layers, of which "
            f"{allowed} can draft"
        )
    first = config.delta_net.layers[0] if config.delta_net is not None else num_layers
    if first < num_layers:
        raise BatchdecodeError(
            f"layers:{num_layers}: layer {first} of {whole.name} is recurrent, so drafts would be "
            "in the states that it goes on from"
        )


class _FirstLayers:
    """A CausalModel of the first layers of a model, in its cells."""

    def __init__(self, whole: TransformerModel, num_layers: int) -> None:
        self.config = whole.decoder.config
        self.cache_groups = whole.decoder.cache_groups
        self.cache_size = whole.decoder.cache_size
        self._whole, self._num_layers = whole, num_layers
        self._decoder: CausalModel = whole.decoder

    def new_store(self) -> KVStore:
        """Return the keys and values of the whole model."""
        return self._whole.store

    def new_states(self) -> None:
        """Return None: none of the layers is recurrent."""

    def forward(
        self,
        spans: Sequence[Span],
        store: KVStore,
        states: RecurrentStates | None = None,
        num_layers: int | None = None,
    ) -> FloatArray:
        """Return the hidden states [tokens, hidden_size] of all tokens of `spans`, in order."""
        num_layers = self._num_layers if num_layers is None else num_layers
        return self._decoder.forward(spans, store, states, num_layers)

    def logits(self, hidden: FloatArray) -> FloatArray:
        """Return the logits [rows, vocab_size] after tokens with these hidden states."""
        return self._decoder.logits(hidden)
