"""Models of transformers, with paged attention, or unchanged.

A model looks up the function `ATTENTION` by name, like those of transformers; the argument `step`
has the tokens and cells of the current call.
"""

from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass
from inspect import signature, unwrap
from typing import Any, NamedTuple, Protocol, cast

import numpy as np
import torch
from torch import nn
from torch.nn.functional import pad, scaled_dot_product_attention
from transformers import AttentionInterface

from batcher.errors import BatchdecodeError, describe
from batcher.transformer.layers import NOWHERE, FloatArray, IntArray
from batcher.transformer.step import (
    NUM_FIXED,
    PADDING,
    CacheGroup,
    CacheSize,
    KVStore,
    RecurrentStates,
    Span,
    attention_groups,
    num_kv_layers,
)


class TensorStore(KVStore):
    """A KVStore on a device, in a dtype.

    key, value: [heads, features] examples of each layer, for shape and dtype.
    has_versions: whether a cell keeps two, [cells, 2, heads, features]; behind the keys of layers
    are then [cells, 2] integers, zeros at first, on the CPU; see LongRope.
    """

    def __init__(
        self, num_layers: int, key: torch.Tensor, value: torch.Tensor, *, has_versions: bool
    ) -> None:
        self._num_cells = NUM_FIXED
        shape = (NUM_FIXED, 2) if has_versions else (NUM_FIXED,)
        self.keys: list[Any] = [key.new_zeros(*shape, *key.shape) for _ in range(num_layers)]
        self.values: list[Any] = [value.new_zeros(*shape, *value.shape) for _ in range(num_layers)]
        if has_versions:
            self.keys.append(torch.zeros(shape, dtype=torch.long))

    def _grown(self, old: Any, num_cells: int) -> Any:
        new = old.new_zeros(num_cells, *old.shape[1:])
        new[: len(old)] = old
        return new


ATTENTION = "batchdecode"


class LayerStep(Protocol):
    """The attention of one layer in a step."""

    def attend(self, layer: int, call: "AttentionCall") -> torch.Tensor:
        """Return the output [tokens, heads, value features] of all queries of a layer."""


@dataclass(frozen=True, slots=True, eq=False)
class AttentionCall:
    """The queries, keys and values of a layer, and its scoring.

    query, key, value: [tokens, heads, features]; keys and values may have fewer heads.
    window: keys that a query sees, its own included; None for all before it.
    softcap: limit of scores, or None.
    sinks: [heads] a score without a value, or None.
    """

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    scale: float
    window: int | None
    softcap: float | None
    sinks: torch.Tensor | None

    def of(
        self,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        mask: torch.Tensor | None,
        *,
        is_causal: bool = False,
    ) -> torch.Tensor:
        """Return the output [rows, queries, heads, value features] of queries of some sequences.

        query: [rows, queries, heads, features]. keys, values: [rows, keys, kv_heads, features].
        mask: visible keys, broadcast to [rows, heads, queries, keys]; None for all.
        is_causal: as many queries as keys, under a causal mask.
        """
        query, keys, values = (part.transpose(1, 2) for part in (query, keys, values))
        if self.softcap is None and self.sinks is None:
            output = scaled_dot_product_attention(
                query,
                keys,
                values,
                mask,
                is_causal=is_causal,
                scale=self.scale,
                enable_gqa=query.shape[1] != keys.shape[1],
            )
        else:
            if is_causal:
                mask = query.new_ones(query.shape[2], keys.shape[2], dtype=torch.bool).tril()
            num_each = query.shape[1] // keys.shape[1]
            keys, values = (part.repeat_interleave(num_each, 1) for part in (keys, values))
            scores = query @ keys.transpose(2, 3) * self.scale
            if self.softcap is not None:
                scores = self.softcap * torch.tanh(scores / self.softcap)
            if mask is not None:
                scores = scores.masked_fill(~mask, -torch.inf)
            if self.sinks is not None:
                sinks = self.sinks.view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
                scores = torch.cat([scores, sinks.to(scores.dtype)], -1)
            shares = scores.softmax(-1, torch.float32).to(values.dtype)
            output = shares[..., : keys.shape[2]] @ values
        return output.transpose(1, 2)


def _attend(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: object,  # noqa: ARG001 - what a step masks, it knows
    *,
    step: LayerStep,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **_others: object,
) -> tuple[torch.Tensor, None]:
    """Return the output [1, tokens, heads, features] of a layer; parameters as in transformers."""
    query, key, value = (part[0].transpose(0, 1) for part in (query, key, value))
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    call = AttentionCall(query, key, value, scale, sliding_window, softcap, s_aux)
    return step.attend(module.layer_idx, call)[None], None


AttentionInterface.register(ATTENTION, _attend)


# A model of transformers taken apart: its body, with attention of ours, and its head.
#
# A few tokens are computed by the whole model and by its parts. If the results differ, or tokens
# mix outside attention, the model stays whole.

_PROBE = torch.arange(12)  # tokens; of a smaller vocabulary, some of them again
_ORDER = torch.tensor([7, 2, 11, 0])  # of these, computed again as tokens of several rows
_TOLERANCES = {torch.float32: 1e-3}  # parts of the largest number
_TOLERANCE = 0.05  # of any other dtype
_PAGED = {"full_attention", "sliding_attention"}  # kinds of layers


class WholeError(Exception):
    """The reason why the attention of a model cannot be replaced."""


class GivenBody(nn.Module):
    """Replaces the body of a model; returns a given output."""

    hidden: torch.Tensor

    def forward(self, *_: object, **__: object) -> "_Output":
        return _Output(self.hidden)


class _Output:
    """The output of any body, with hidden states only."""

    def __init__(self, hidden: torch.Tensor) -> None:
        self.last_hidden_state = hidden

    def __getattr__(self, _name: str) -> None:
        return None

    def __getitem__(self, _index: int) -> torch.Tensor:
        return self.last_hidden_state


class ModelParts(NamedTuple):
    """A model without its body, replaced by `given`. calls: attention calls of its layers."""

    body: nn.Module
    head: nn.Module
    given: GivenBody
    calls: dict[int, AttentionCall]


class Recorder:
    """Steps of one sequence; records the attention calls of the first one, which has all tokens.

    positions: [tokens] of the next step.
    """

    def __init__(self, positions: torch.Tensor) -> None:
        self.calls: dict[int, AttentionCall] = {}
        self.positions = positions

    def attend(self, layer: int, call: AttentionCall) -> torch.Tensor:
        first = self.calls.setdefault(layer, call)
        keys, values = first.key.clone(), first.value.clone()
        keys[self.positions], values[self.positions] = call.key, call.value
        places, own = torch.arange(len(keys), device=keys.device), self.positions[:, None]
        mask = places <= own
        if call.window is not None:
            mask &= places > own - call.window
        return call.of(call.query[None], keys[None], values[None], mask)[0]


@torch.inference_mode()
def parts_of(model: Any) -> ModelParts:
    """Return the parts of a model, which cannot be used as a whole afterwards.

    Raises:
        WholeError: its attention cannot be replaced; the model is unchanged.
    """
    config = model.config.get_text_config()
    if not getattr(model, "_supports_attention_backend", False):
        raise WholeError(f"{type(model).__name__} takes no attention from elsewhere")
    others = {*(getattr(config, "layer_types", None) or ())} - _PAGED
    if others:
        raise WholeError(f"some of its layers are {min(others)}")
    ids = (_PROBE % config.vocab_size)[None].to(model.device)
    expected = model(input_ids=ids, use_cache=False).logits
    before = model.config._attn_implementation  # noqa: SLF001 - there is no other way to know
    positions = torch.arange(ids.shape[1], device=ids.device)
    body, given, recorder = model.base_model, GivenBody(), Recorder(positions)
    try:
        model.set_attn_implementation(ATTENTION)
        given.hidden = body_output(body, ids[0], positions, recorder)
        order = recorder.positions = _ORDER.to(ids.device)
        again = body_output(body, ids[0][order], order, recorder)[0]
        # Outside attention order does not matter, but the choice of experts may hang on a bit.
        if not is_close(again, given.hidden[0][order], num_apart=1):
            raise WholeError("its tokens depend on each other outside attention")  # noqa: TRY301
        setattr(model, model.base_model_prefix, given)
        logits = model(input_ids=ids, use_cache=False).logits
        _check(recorder.calls, config, expected[0], logits[0])
    except Exception as error:
        setattr(model, model.base_model_prefix, body)
        model.set_attn_implementation(before)
        if isinstance(error, WholeError):
            raise
        raise WholeError(f"its attention was not replaced: {error!r}") from error
    return ModelParts(body, model, given, recorder.calls)


def body_output(
    body: nn.Module, ids: torch.Tensor, positions: torch.Tensor, step: LayerStep
) -> torch.Tensor:
    """Return the hidden states [1, tokens, hidden_size] of tokens at these positions."""
    output = body(input_ids=ids[None], position_ids=positions[None], use_cache=False, step=step)
    hidden: torch.Tensor = output.last_hidden_state
    return hidden


def head_output(parts: ModelParts, hidden: torch.Tensor) -> torch.Tensor:
    """Return the logits [tokens, vocab] after hidden states [tokens, hidden_size]."""
    parts.given.hidden = hidden[None]
    ids = torch.zeros(1, len(hidden), dtype=torch.long, device=hidden.device)
    logits: torch.Tensor = parts.head(input_ids=ids, use_cache=False).logits
    return logits[0]


def _check(
    calls: dict[int, AttentionCall], config: Any, expected: torch.Tensor, logits: torch.Tensor
) -> None:
    """Raise a WholeError unless all layers called attention and logits are as expected."""
    if sorted(calls) != [*range(config.num_hidden_layers)]:
        raise WholeError(f"attention was asked for by {len(calls)} of its layers")
    if len({(call.key.shape, call.value.shape) for call in calls.values()}) > 1:
        raise WholeError("its layers keep keys and values of different sizes")
    kinds = getattr(config, "layer_types", None) or ()
    for layer, kind in enumerate(kinds):
        if (kind == "sliding_attention") != (calls[layer].window is not None):
            raise WholeError(f"layer {layer} is {kind}, and has window {calls[layer].window}")
    if not is_close(logits, expected):
        raise WholeError("its logits change when its attention is replaced")


def is_close(found: torch.Tensor, expected: torch.Tensor, num_apart: int = 0) -> bool:
    """Return whether all tokens except `num_apart` are close, [tokens, numbers]."""
    tolerance = _TOLERANCES.get(found.dtype, _TOLERANCE) * expected.abs().max()
    is_same = (found - expected).abs().amax(1) <= tolerance  # which NaN never is
    return bool(is_same.sum() >= len(is_same) - num_apart)


# LongRoPE: the length of a sequence selects short or long factors of its positions.
#
# transformers lets the longest sequence of a call choose the factors for all of them. Here each
# token has those that `generate` chooses for its row alone: long ones if the prompt has more than
# `switch` tokens, or at positions from `switch` on.
#
# When a row passes the switch, `generate` restarts Phi-3 and its relatives: it computes all tokens
# anew, as a prompt, with long factors. Other models keep the keys of their short prompts. So keys
# and values have two versions: as of tokens in a prompt longer than the switch, or not. Rows that
# share a block may need different ones. Each cell has room for both and knows its token. A version
# that a row lacks is computed in the forward that needs it.

_KIND = "longrope"
_SWITCH = "original_max_position_embeddings"


class LongRopeError(BatchdecodeError):
    """The factors of a model would have to switch."""

    def __init__(self, switch: int) -> None:
        super().__init__(
            "LongRoPE switches its factors only in models that run together, and without windows: "
            f"give --max-context {switch}, up to which it does not switch"
        )


def switch_of(body: nn.Module) -> int | None:
    """Return the longest sequence with short factors; None without LongRoPE."""
    switches = []
    for module in body.modules():
        if _has_long_rope(module):
            kinds = module.config.rope_parameters
            kinds = {"": kinds} if "rope_type" in kinds else kinds  # or by kinds of layers
            switches += [kind[_SWITCH] for kind in kinds.values() if kind["rope_type"] == _KIND]
    return min(switches, default=None)


def _has_long_rope(module: Any) -> bool:
    kinds = getattr(module, "rope_type", None)
    return _KIND in (kinds.values() if isinstance(kinds, dict) else [kinds])


class LongRope:
    """The LongRoPE factors of every token; it changes the body.

    switch: the longest sequence with short factors.
    """

    def __init__(self, model: Any, body: nn.Module, switch: int) -> None:
        self._switch = switch
        prepare = unwrap(type(model).prepare_inputs_for_generation)
        self._restarts = _SWITCH in prepare.__code__.co_names  # it drops the cache there
        self._is_long = torch.zeros(0, dtype=torch.bool)
        for module in body.modules():
            if _has_long_rope(module):
                module.forward = self._by_token(module.forward)

    def _by_token(self, forward: Callable[..., Any]) -> Callable[..., Any]:

        def turned(x: torch.Tensor, position_ids: torch.Tensor, **given: Any) -> Any:
            is_long = self._is_long
            short = forward(x, position_ids.masked_fill(is_long, 0), **given)
            beyond = pad(position_ids, (0, 1), value=self._switch)  # so that it chooses long ones
            long = [part[..., :-1, :] for part in forward(x, beyond, **given)]
            pairs = zip(long, short, strict=True)
            return tuple(torch.where(is_long[:, None], *pair) for pair in pairs)

        return turned

    def choose(self, spans: Sequence[Span], positions: torch.Tensor) -> None:
        """Set the factors of the tokens of the next forward, at `positions` [tokens]."""
        is_long = np.repeat(
            [span.num_prompt > self._switch for span in spans],
            [len(span.token_ids) for span in spans],
        )
        self._is_long = torch.from_numpy(is_long).to(positions.device)
        self._is_long |= positions >= self._switch

    def versions(self, spans: Sequence[Span], store: TensorStore) -> Iterator[tuple[Span, bool]]:
        """Yield the spans to compute, in the cells of their version, and whether they are new.

        Recomputed spans come before the tokens that read them.
        """
        tokens = store.keys[-1].numpy().reshape(-1)  # [2 * cells] token + 1 of each that is there
        for span in [part for whole in spans for part in self._split(whole)]:
            cells = 2 * span.cells[0] + (span.num_prompt > self._switch)
            past, own = cells[: span.start], cells[span.start :]
            is_there = tokens[past] > 0
            if not is_there.all():
                first = int(is_there.argmin())
                lacking = past[first:]
                tokens[lacking] = np.maximum(tokens[lacking], tokens[lacking ^ 1])
                yield Span(tokens[lacking] - 1, first, [past], num_prompt=span.num_prompt), False
            tokens[own], tokens[own ^ 1] = np.add(span.token_ids, 1), 0
            yield span._replace(cells=[cells]), True

    def _split(self, span: Span) -> Iterator[Span]:
        """Yield the parts of a span before and after a restart."""
        num_tokens, num_before = len(span.token_ids), self._switch - span.start
        if not self._restarts or span.num_prompt > self._switch or num_before >= num_tokens:
            yield span
            return
        if num_before > 0:
            cells = [span.cells[0][: self._switch]]
            yield span._replace(token_ids=span.token_ids[:num_before], cells=cells)
        begin = max(num_before, 0)
        yield span._replace(
            token_ids=span.token_ids[begin:], start=span.start + begin, num_prompt=self._switch + 1
        )


NUM_GATHERED = 4096  # keys of several rows at once, which fit into the processor's cache
UNBOUNDED = 2**62


class _Part(NamedTuple):
    """Tokens whose attention is computed at once: single tokens of several sequences, or a span.

    places: of the tokens in the step. cells: [sequences, keys] that they see.
    mask: visible keys, broadcast to [sequences, 1, tokens, keys]; None if single tokens see all, or
    a span is plainly causal.
    """

    is_single: bool
    places: torch.Tensor | slice
    cells: torch.Tensor
    mask: torch.Tensor | None


class RaggedStep:
    """Spans of several sequences, concatenated.

    Single tokens, as of decoding rows, are computed together: the keys and values of several
    sequences are gathered and padded. Longer spans are computed one by one.

    groups: layers that read the same. num_gathered: keys of several rows computed together; 0
    computes every token alone, so that no bit depends on other rows.
    token_ids, positions: [tokens].
    """

    def __init__(
        self,
        spans: Sequence[Span],
        store: TensorStore,
        groups: Sequence[CacheGroup],
        num_gathered: int,
    ) -> None:
        self._store, self._device = store, store.keys[0].device
        sizes = [len(span.token_ids) for span in spans]
        starts = [(span.start, span.start + size) for span, size in zip(spans, sizes, strict=True)]
        self.token_ids = self._tensor(np.concatenate([span.token_ids for span in spans]))
        self.positions = self._tensor(np.concatenate([np.arange(*each) for each in starts]))
        self._own: list[torch.Tensor] = []
        self._parts: list[list[_Part]] = []
        self._group_of: dict[int, tuple[int, int]] = {}
        for number, group in enumerate(groups):
            self._group_of |= {layer: (number, at) for at, layer in enumerate(group.layers)}
            own = [span.cells[number][span.start :] for span in spans]
            self._own.append(self._tensor(np.concatenate(own)))
            seen: list[tuple[int, int, int, IntArray]] = []  # place, start, stop, cells up to it
            place = 0
            for span, (start, stop) in zip(spans, starts, strict=True):
                cells = span.cells[number]
                if num_gathered:
                    seen.append((place, start, stop, cells))
                else:
                    seen += [(place + at - start, at, at + 1, cells) for at in range(start, stop)]
                place += stop - start
            self._parts.append([*self._parts_of(seen, group.window, num_gathered)])

    def _tensor(self, numbers: IntArray) -> torch.Tensor:
        return torch.from_numpy(np.asarray(numbers, np.int64)).to(self._device)

    def _parts_of(
        self, seen: Sequence[tuple[int, int, int, IntArray]], window: int | None, num_gathered: int
    ) -> Iterator[_Part]:
        """Yield longer spans, then single tokens in groups that see about as many keys."""
        rows = []
        for place, start, stop, cells in seen:
            first = 0 if window is None else max(start + 1 - window, 0)
            if stop - start == 1:
                rows.append((place, cells[first:stop]))
                continue
            mask = None
            if start or (window is not None and stop > window):
                positions = torch.arange(start, stop, device=self._device)[:, None]
                keys = torch.arange(first, stop, device=self._device)
                mask = keys <= positions
                if window is not None:
                    mask &= keys > positions - window
            places = slice(place, place + stop - start)
            yield _Part(False, places, self._tensor(cells[None, first:stop]), mask)  # noqa: FBT003 - a field
        rows.sort(key=lambda row: len(row[1]))
        while rows:
            num_rows = 1
            while num_rows < len(rows) and (num_rows + 1) * len(rows[num_rows][1]) <= num_gathered:
                num_rows += 1
            lengths = np.array([len(cells) for _, cells in rows[:num_rows]])
            cells = np.full((num_rows, int(lengths[-1])), NOWHERE)
            is_there = np.arange(cells.shape[1]) < lengths[:, None]
            cells[is_there] = np.concatenate([cells for _, cells in rows[:num_rows]])
            mask = None
            if not is_there.all():
                mask = torch.from_numpy(is_there).to(self._device)[:, None, None]
            at = self._tensor(np.array([place for place, _ in rows[:num_rows]]))
            yield _Part(True, at, self._tensor(cells), mask)  # noqa: FBT003 - as above
            del rows[:num_rows]

    def attend(self, layer: int, call: AttentionCall) -> torch.Tensor:
        group, at = self._group_of[layer]
        kept = self._store.keys[at], self._store.values[at]
        keys, values = (part.view(-1, *part.shape[-2:]) for part in kept)  # or two in each cell
        keys[self._own[group]] = call.key
        values[self._own[group]] = call.value
        output = call.query.new_empty(*call.query.shape[:2], values.shape[-1])
        for is_single, places, cells, mask in self._parts[group]:
            query = call.query[places].unsqueeze(1 if is_single else 0)
            is_causal = mask is None and not is_single
            attended = call.of(query, keys[cells], values[cells], mask, is_causal=is_causal)
            output[places] = attended.flatten(0, 1)
        return output


# A model of transformers as a CausalModel: one ragged forward over all tokens of a step.
#
# torch adds products in an order that depends on the number of rows. An exact decoder computes
# tokens in tiles of one size, and their attention token by token. It is tested when made whether
# other tokens in a tile change a bit, as with experts.

_TILES = (16, 1)  # tokens: enough for fast products, or one
_NUM_TRIED = 24  # tokens
_NUM_ROWS = 16  # rows for which weights are arranged; products may have any number


class Sizes(NamedTuple):
    """The sizes of a model; see ModelSizes."""

    vocab_size: int
    max_position_embeddings: int
    eos_token_ids: tuple[int, ...]


class HFDecoder:
    """A CausalModel of a causal language model of transformers.

    is_exact: no bit of a row may depend on other rows.
    tile: tokens computed at a time; None for all of a step.

    Raises:
        LongRopeError: layers have windows, and factors that may switch.
        BatchdecodeError: even single tokens are not reproducible.
    """

    def __init__(self, parts: ModelParts, sizes: Sizes, *, is_exact: bool = False) -> None:
        self.config = sizes
        self.tile: int | None = None
        self._parts = parts
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
            self._long_rope = LongRope(parts.head, parts.body, switch)
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
        self.tile, store, num_groups = tile, self.new_store(), len(self.cache_groups)
        store.make_room(2 * _NUM_TRIED)
        ids = np.arange(_NUM_TRIED) % self.config.vocab_size
        cells = np.array(store.cells([0, 1], _NUM_TRIED, 2 * _NUM_TRIED))
        own, others = np.split(cells, 2)
        span = Span(ids.tolist(), 0, [own] * num_groups)
        other = Span(ids[:5:-3].tolist(), 0, [others[: len(ids[:5:-3])]] * num_groups)
        alone, together = self.forward([span], store), self.forward([other, span], store)
        return bool(torch.equal(alone, together[len(other.token_ids) :]))

    def new_store(self) -> TensorStore:
        has_versions = self._long_rope is not None
        return TensorStore(
            self._num_kept, self._call.key[0], self._call.value[0], has_versions=has_versions
        )

    def new_states(self) -> None:
        """Return None: no layer is recurrent."""

    @torch.inference_mode()
    def forward(
        self, spans: Sequence[Span], store: KVStore, _states: RecurrentStates | None = None
    ) -> Any:
        """Return the hidden states [tokens, hidden_size] of all tokens of `spans`, a tensor."""
        if self._long_rope is None:
            return self._computed(spans, store)
        hidden: list[torch.Tensor] = []
        group: list[Span] = []
        for span, is_new in self._long_rope.versions(spans, cast(TensorStore, store)):
            group.append(span)
            if not is_new:  # at most one per forward, since they may be long
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
        num_rows = len(hidden)
        if self.tile is not None:
            missing = hidden.new_zeros(-num_rows % self.tile, hidden.shape[1])
            hidden = torch.cat([hidden, missing])
        parts = hidden.split(self.tile or num_rows)
        logits = torch.cat([head_output(self._parts, part) for part in parts])[:num_rows]
        found: FloatArray = logits.float().cpu().numpy()
        return found


def _tiles(spans: Sequence[Span], size: int) -> Iterator[list[Span]]:
    """Yield spans of `size` tokens in all at a time, the last of them padded."""
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
    """An nn.Linear on the CPU with its weight in the layout of oneDNN.

    For float32 torch calls BLAS, which rearranges the weight in every call; arranged once, 16 rows
    take half the time, and no number of rows takes longer.

    weight: empty, with the dtype and device that other code reads.
    """

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        weight = linear.weight.detach()
        self.weight = nn.Parameter(weight.new_empty(0), requires_grad=False)
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight, _NUM_ROWS)  # noqa: SLF001 - torch has no other name for it
        self._bias = None if linear.bias is None else linear.bias.detach()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        product: torch.Tensor = torch.ops.mkldnn._linear_pointwise(  # noqa: SLF001 - as above
            x, self._packed, self._bias, "none", [], ""
        )
        return product


@torch.inference_mode()
def pack_linears(module: nn.Module) -> None:
    """Replace linear layers in a module, where that is faster, and free their weights."""
    for name, child in module.named_children():
        if type(child) is nn.Linear and _can_pack(child.weight):
            setattr(module, name, PackedLinear(child))
        else:
            pack_linears(child)


def _can_pack(weight: torch.Tensor) -> bool:
    is_there = torch.backends.mkldnn.is_available() and hasattr(
        torch.ops.mkldnn, "_reorder_linear_weight"
    )
    return is_there and weight.device.type == "cpu" and weight.dtype == torch.float32


# A model of transformers as it is: one sequence at a time, in a cache of transformers' own.

_NUM_COMPARED = 8  # tokens
_NUM_APART = 2  # of them, which may use other experts because of a last bit

# Names of the cache, as an argument and in the output; `cache` since transformers 5.24, for most
# models.
_CACHE_NAMES = ("cache", "past_key_values", "cache_params", "state")


class _Row(NamedTuple):
    """A sequence with `num_tokens` in `cache`."""

    num_tokens: int = 0
    cache: Any = None


class WholeDecoder:
    """Computes one sequence after another in an unchanged model.

    is_exact: compute each token alone, so that no bit depends on the chunks of a prompt.

    Raises:
        LongRopeError: its factors may switch.
        BatchdecodeError: it has no cache, or its cache changes the logits.
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
        """Return the logits after tokens, and the cache; see SlotModel."""
        logits, row = self._continued(token_ids, cache or _Row(), is_scored=is_scored)
        found: FloatArray = logits.float().cpu().numpy()
        return found, row

    def copy(self, cache: _Row) -> _Row:
        return deepcopy(cache)

    def _continued(
        self, token_ids: list[int], row: _Row, *, is_scored: bool = True
    ) -> tuple[torch.Tensor, _Row]:
        """Return the result of `forward`, with the arguments that `generate` passes."""
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
        ids = [token % self.config.vocab_size for token in range(_NUM_COMPARED)]
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
            except Exception as error:  # noqa: BLE001 - user code
                problem = f"cannot continue from its cache: {describe(error)}"
        raise BatchdecodeError(f"{self._kind} {problem}")

    def _in_parts(self, ids: list[int]) -> torch.Tensor:
        """Return the logits after tokens, with another sequence in between.

        This detects models that keep states outside of the cache.
        """
        begin, row = self._continued(ids[:4], _Row())
        self._continued(ids[:1:-1], _Row())
        one, row = self._continued(ids[4:5], row)
        return torch.cat([begin, one, self._continued(ids[5:], row)[0]])
