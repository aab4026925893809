"""Attention of transformers' models over keys and values in cells: a function of our own.

The models ask for the function `ATTENTION` by its name, as they do for those of transformers; in
`step` it is handed what this call of the model computes, and where all of that is kept.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from inspect import unwrap
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import nn
from torch.nn.functional import pad, scaled_dot_product_attention
from transformers import AttentionInterface

from batcher.errors import BatchdecodeError
from batcher.transformer.kv_store import NUM_FIXED, KVStore
from batcher.transformer.step import Span

# The keys and values of tokens, in cells that are tensors.


class TensorStore(KVStore):
    """A KVStore on a device, in a dtype.

    key, value: [heads, features] of a token in any layer; what is kept is like these.
    has_versions: whether a cell keeps two, [cells, 2, heads, features]; behind the keys of layers
    are then [cells, 2] integers, zeros at first, on the processor; see LongRope.
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
    """What a layer's attention is asked of."""

    def attend(self, layer: int, call: "AttentionCall") -> torch.Tensor:
        """Return the output [tokens, heads, value features] of all queries of a layer."""


@dataclass(frozen=True, slots=True, eq=False)
class AttentionCall:
    """What a layer brings: queries, keys and values of all tokens, and how they are scored.

    query, key, value: [tokens, heads, features]; of keys and values there may be fewer heads.
    window: how many tokens, its own included, a query sees; None for all before it.
    softcap: between which bounds scores are kept; None if they are not.
    sinks: [heads] a score of nothing that takes its share; None without one.
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

        query: [rows, queries, heads, features].  keys, values: [rows, keys, kv_heads, features].
        mask: which keys are seen, fits [rows, heads, queries, keys]; None for all.
        is_causal: whether there are as many queries as keys, and none looks ahead.
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
    """Return the output [1, tokens, heads, features] of a layer; parameters as transformers'."""
    query, key, value = (part[0].transpose(0, 1) for part in (query, key, value))
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    call = AttentionCall(query, key, value, scale, sliding_window, softcap, s_aux)
    return step.attend(module.layer_idx, call)[None], None


AttentionInterface.register(ATTENTION, _attend)


# A model of transformers taken apart: its body, with attention of ours, and its head.
#
# A few tokens are computed, by the model as it is and by its parts. Where these do not come to the
# same, or where attention is only a part of what mixes tokens, it is left whole.

_PROBE = torch.arange(12)  # tokens; of a smaller vocabulary, some of them again
_ORDER = torch.tensor([7, 2, 11, 0])  # of these, once more, as tokens of several rows come
_TOLERANCES = {torch.float32: 1e-3}  # parts of the largest number
_TOLERANCE = 0.05  # of any other dtype
_PAGED = {"full_attention", "sliding_attention"}  # kinds of layers


class WholeError(Exception):
    """Why a model cannot be taken apart."""


class GivenBody(nn.Module):
    """Stands for the body of a model: gives what the body is known to have come to.

    hidden: [1, tokens, hidden_size].
    """

    hidden: torch.Tensor

    def forward(self, *_: object, **__: object) -> "_Output":
        return _Output(self.hidden)


class _Output:
    """An output of a body of any kind, of which nothing is there but the hidden states."""

    def __init__(self, hidden: torch.Tensor) -> None:
        self.last_hidden_state = hidden

    def __getattr__(self, _name: str) -> None:
        return None

    def __getitem__(self, _index: int) -> torch.Tensor:
        return self.last_hidden_state


class ModelParts(NamedTuple):
    """A model without its body: `given` stands there, so what it comes to is what the head makes.

    calls: what each layer brings to attention, of some tokens.
    """

    body: nn.Module
    head: nn.Module
    given: GivenBody
    calls: dict[int, AttentionCall]


class _Recorder:
    """Steps of one sequence; keeps what each layer brings in the first, which has all tokens.

    positions: [tokens] those that the next step computes.
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
    """Return the parts of a model, which is of no use as a whole from then on.

    Raises:
        WholeError: its attention cannot be replaced; it is as it was.
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
    body, given, recorder = model.base_model, GivenBody(), _Recorder(positions)
    try:
        model.set_attn_implementation(ATTENTION)
        given.hidden = body_output(body, ids[0], positions, recorder)
        order = recorder.positions = _ORDER.to(ids.device)
        again = body_output(body, ids[0][order], order, recorder)[0]
        # But for attention, tokens come to the same in any order; experts may turn on a last bit.
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


def _check(
    calls: dict[int, AttentionCall], config: Any, expected: torch.Tensor, logits: torch.Tensor
) -> None:
    """Raise a WholeError unless the layers brought all there is, and it came to what was expected.

    expected, logits: [tokens, vocab_size], of the whole model and of its parts.
    """
    if sorted(calls) != [*range(config.num_hidden_layers)]:
        raise WholeError(f"attention was asked for by {len(calls)} of its layers")
    if len({(call.key.shape, call.value.shape) for call in calls.values()}) > 1:
        raise WholeError("its layers keep keys and values of different sizes")
    kinds = getattr(config, "layer_types", None) or ()
    for layer, kind in enumerate(kinds):
        if (kind == "sliding_attention") != (calls[layer].window is not None):
            raise WholeError(f"layer {layer} is {kind}, and has window {calls[layer].window}")
    if not is_close(logits, expected):
        raise WholeError("with attention from elsewhere it comes to something else")


def is_close(found: torch.Tensor, expected: torch.Tensor, num_apart: int = 0) -> bool:
    """Return whether all tokens but `num_apart` come to the same numbers [tokens, numbers]."""
    tolerance = _TOLERANCES.get(found.dtype, _TOLERANCE) * expected.abs().max()
    is_same = (found - expected).abs().amax(1) <= tolerance  # which NaN never is
    return bool(is_same.sum() >= len(is_same) - num_apart)


# LongRoPE: positions are turned by short or by long factors, as the length of a sequence asks.
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
    """A model whose factors would have to switch cannot be computed."""

    def __init__(self, switch: int) -> None:
        super().__init__(
            "LongRoPE switches its factors only in models that run together, and without windows: "
            f"give --max-context {switch}, up to which it does not switch"
        )


def switch_of(body: nn.Module) -> int | None:
    """Return the longest sequence that has short factors; None without LongRoPE."""
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
    """The factors of every token, in a body of transformers that it changes.

    switch: the longest sequence that has short factors.
    """

    def __init__(self, model: Any, body: nn.Module, switch: int) -> None:
        self._switch = switch
        prepare = unwrap(type(model).prepare_inputs_for_generation)
        self._restarts = _SWITCH in prepare.__code__.co_names  # there it forgets the cache
        self._is_long = torch.zeros(0, dtype=torch.bool)
        for module in body.modules():
            if _has_long_rope(module):
                module.forward = self._by_token(module.forward)

    def _by_token(self, forward: Callable[..., Any]) -> Callable[..., Any]:

        def turned(x: torch.Tensor, position_ids: torch.Tensor, **given: Any) -> Any:
            is_long = self._is_long
            short = forward(x, position_ids.masked_fill(is_long, 0), **given)
            beyond = pad(position_ids, (0, 1), value=self._switch)  # so that it takes long ones
            long = [part[..., :-1, :] for part in forward(x, beyond, **given)]
            pairs = zip(long, short, strict=True)
            return tuple(torch.where(is_long[:, None], *pair) for pair in pairs)

        return turned

    def choose(self, spans: Sequence[Span], positions: torch.Tensor) -> None:
        """Choose the factors of the tokens of the next forward, at `positions` [tokens]."""
        is_long = np.repeat(
            [span.num_prompt > self._switch for span in spans],
            [len(span.token_ids) for span in spans],
        )
        self._is_long = torch.from_numpy(is_long).to(positions.device)
        self._is_long |= positions >= self._switch

    def versions(self, spans: Sequence[Span], store: TensorStore) -> Iterator[tuple[Span, bool]]:
        """Yield what to compute for spans: in the cells of its version, and whether it is new.

        Whatever is not new comes before the tokens that read it.
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
        """Yield the parts of a span before and behind a restart."""
        num_tokens, num_before = len(span.token_ids), self._switch - span.start
        if not self._restarts or span.num_prompt > self._switch or num_before >= num_tokens:
            yield span
            return
        if num_before > 0:
            cells = [span.cells[0][: self._switch]]
            yield span._replace(token_ids=span.token_ids[:num_before], cells=cells)
        begin = max(num_before, 0)
        yield span._replace(
            token_ids=span.token_ids[begin:],
            start=span.start + begin,
            num_prompt=self._switch + 1,
        )
