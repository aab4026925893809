"""A model of transformers as a Decoder: one ragged forward over all tokens that a step computes.

The bits of a row depend on what is beside it: torch adds up products in another order for another
number of rows.  An exact decoder computes tokens in tiles of one size, and their attention token by
token; whether what else is in a tile shows, as it does of experts, is tried when it is made.
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import nn

from batcher.errors import BatchdecodeError
from batcher.hf.long_rope import LongRope, LongRopeError, switch_of
from batcher.hf.parts import body_output, parts_of
from batcher.hf.step import NUM_GATHERED, UNBOUNDED, RaggedStep
from batcher.hf.tensor_store import TensorStore
from batcher.transformer.cache_groups import attention_groups, num_kv_layers
from batcher.transformer.cache_size import CacheSize
from batcher.transformer.kv_store import PADDING, KVStore
from batcher.transformer.layers import FloatArray
from batcher.transformer.recurrent_states import RecurrentStates
from batcher.transformer.span import Span

_TILES = (16, 1)  # tokens: as many as it takes for products to be fast, or each by itself
_NUM_TRIED = 24  # tokens
_NUM_ROWS = 16  # for which weights are arranged; products may have any number


class Sizes(NamedTuple):
    """What is to be known of a model beside its weights; see ModelSizes."""

    vocab_size: int
    max_position_embeddings: int
    eos_token_ids: tuple[int, ...]


class HFDecoder:
    """A Decoder of a causal language model of transformers.

    model: taken apart; it is of no use for anything else afterwards.
    is_exact: whether no bit of a row may depend on what is beside it.
    tile: how many tokens are computed at a time; None for all of a step.

    Raises:
        WholeError: it cannot be taken apart.
        LongRopeError: layers have windows, and factors that may switch.
        BatchdecodeError: even tokens by themselves are not computed alike.
    """

    def __init__(self, model: Any, sizes: Sizes, *, is_exact: bool = False) -> None:
        self.config = sizes
        self.tile: int | None = None
        self._parts = parts_of(model)
        pack_linears(self._parts.body)
        pack_linears(self._parts.head)
        calls = self._parts.calls
        self._call = calls[0]
        windows = {layer: call.window for layer, call in calls.items()}
        self.cache_groups = attention_groups(windows, sizes.max_position_embeddings)
        self._long_rope: LongRope | None = None
        switch = switch_of(self._parts.body)
        if switch is not None and switch < sizes.max_position_embeddings:
            if self.cache_groups[0].window is not None or len(self.cache_groups) > 1:
                raise LongRopeError(switch)
            self._long_rope = LongRope(model, self._parts.body, switch)
        kept = (self._call.key, self._call.value)
        self._num_kept = num_kv_layers(self.cache_groups)  # layers that a block has room for
        cell = self._num_kept * sum(part[0].numel() * part.element_size() for part in kept)
        cell *= 1 if self._long_rope is None else 2
        self.cache_size = CacheSize(len(self.cache_groups) * cell, cell, 0)
        self._num_gathered = NUM_GATHERED if kept[0].device.type == "cpu" else UNBOUNDED
        if is_exact:
            self.tile = next((tile for tile in _TILES if self._is_exact_in(tile)), None)
            if self.tile is None:
                raise BatchdecodeError("--exact: torch computes the same token in several ways")

    def _is_exact_in(self, tile: int) -> bool:
        """Return whether tokens come to the same bits wherever they are in tiles, and with whom."""
        self.tile, store, num_groups = tile, self.new_store(), len(self.cache_groups)
        store.make_room(2 * _NUM_TRIED)
        ids = np.arange(_NUM_TRIED) % self.config.vocab_size
        cells = np.array(store.cells([0, 1], _NUM_TRIED, 2 * _NUM_TRIED))
        own, others = np.split(cells, 2)
        span = Span(ids.tolist(), 0, [own] * num_groups)
        beside = Span(ids[:5:-3].tolist(), 0, [others[: len(ids[:5:-3])]] * num_groups)
        alone, together = self.forward([span], store), self.forward([beside, span], store)
        return bool(torch.equal(alone, together[len(beside.token_ids) :]))

    def new_store(self) -> TensorStore:
        """Return room for the keys and values of tokens."""
        has_versions = self._long_rope is not None
        return TensorStore(
            self._num_kept, self._call.key[0], self._call.value[0], has_versions=has_versions
        )

    def new_states(self) -> None:
        """Return None: no layer is recurrent."""

    @torch.inference_mode()
    def forward(
        self,
        spans: Sequence[Span],
        store: KVStore,
        _states: RecurrentStates | None = None,
    ) -> Any:
        """Return the hidden states [tokens, hidden_size] of all tokens of `spans`, a tensor."""
        if self._long_rope is None:
            return self._computed(spans, store)
        hidden: list[torch.Tensor] = []
        group: list[Span] = []
        for span, is_new in self._long_rope.versions(spans, cast(TensorStore, store)):
            group.append(span)
            if not is_new:  # a forward has one of these at most, because they may be long
                hidden.append(self._computed(group, store)[: -len(span.token_ids)])
                group = []
        return torch.cat([*hidden, self._computed(group, store)])

    def _computed(self, spans: Sequence[Span], store: KVStore) -> torch.Tensor:
        num_tokens = sum(len(span.token_ids) for span in spans)
        tiles = [spans] if self.tile is None else [*_tiles(spans, self.tile)]
        return torch.cat([self._hidden(tile, store) for tile in tiles])[:num_tokens]

    def _hidden(self, spans: Sequence[Span], store: KVStore) -> torch.Tensor:
        own = cast(TensorStore, store)  # see new_store
        num_gathered = self._num_gathered if self.tile is None else 0
        step = RaggedStep(spans, own, self.cache_groups, num_gathered)
        if self._long_rope is not None:
            self._long_rope.choose(spans, step.positions)
        return body_output(self._parts.body, step.token_ids, step.positions, step)[0]

    @torch.inference_mode()
    def logits(self, hidden: Any) -> FloatArray:
        """Return the logits [rows, vocab_size] after tokens with these hidden states."""
        num_rows = len(hidden)
        if self.tile is not None:
            missing = hidden.new_zeros(-num_rows % self.tile, hidden.shape[1])
            hidden = torch.cat([hidden, missing])
        parts = hidden.split(self.tile or num_rows)
        logits = torch.cat([self._head_output(part) for part in parts])[:num_rows]
        found: FloatArray = logits.float().cpu().numpy()
        return found

    def _head_output(self, hidden: torch.Tensor) -> torch.Tensor:
        self._parts.given.hidden = hidden[None]
        ids = torch.zeros(1, len(hidden), dtype=torch.long, device=hidden.device)
        logits: torch.Tensor = self._parts.head(input_ids=ids, use_cache=False).logits
        return logits[0]


def _tiles(spans: Sequence[Span], size: int) -> Iterator[list[Span]]:
    """Yield spans of `size` tokens in all at a time, the last of them with padding."""
    tile: list[Span] = []
    room = size
    for span in spans:
        begin = 0
        while begin < len(span.token_ids):
            end = min(begin + room, len(span.token_ids))
            cells = [own[: span.start + end] for own in span.cells]
            ids, start = span.token_ids[begin:end], span.start + begin
            tile.append(Span(ids, start, cells, num_prompt=span.num_prompt))
            room -= end - begin
            begin = end
            if room == 0:
                yield tile
                tile, room = [], size
    if tile:
        nowhere = [np.array([PADDING]) for _ in tile[0].cells]
        yield tile + [Span([0], 0, nowhere)] * room


class PackedLinear(nn.Module):
    """An nn.Linear on a processor, whose weight lies as oneDNN multiplies it.

    torch hands a product of float32 to BLAS, which arranges the weight anew in every call; arranged
    once, 16 rows take half the time, and no number of rows takes longer.

    weight: of no size, with the dtype and the device that others ask it for.
    """

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        weight = linear.weight.detach()
        self.weight = nn.Parameter(weight.new_empty(0), requires_grad=False)
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight, _NUM_ROWS)  # noqa: SLF001 - torch has no other name for it
        self._bias = None if linear.bias is None else linear.bias.detach()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the product [..., out] of x [..., in]."""
        product: torch.Tensor = torch.ops.mkldnn._linear_pointwise(  # noqa: SLF001 - as above
            x, self._packed, self._bias, "none", [], ""
        )
        return product


@torch.inference_mode()
def pack_linears(module: nn.Module) -> None:
    """Replace the linear layers in a module, and forget their weights, where that is of use."""
    for name, child in module.named_children():
        if type(child) is nn.Linear and _can_pack(child.weight):
            setattr(module, name, PackedLinear(child))
        else:
            pack_linears(child)


def _can_pack(weight: torch.Tensor) -> bool:
    """Return whether this torch, on this processor, multiplies such a weight arranged."""
    is_there = torch.backends.mkldnn.is_available() and hasattr(
        torch.ops.mkldnn, "_reorder_linear_weight"
    )
    return is_there and weight.device.type == "cpu" and weight.dtype == torch.float32
