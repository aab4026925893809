"""Models of transformers, with paged attention, or unchanged.

A model looks up the function `ATTENTION` by name, like those of transformers; the argument `step`
has the tokens and cells of the current call.
"""

from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from inspect import signature
from typing import Any, NamedTuple, Protocol

import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention
from torch.utils._pytree import tree_map
from transformers import AttentionInterface

from batcher.errors import BatchdecodeError, describe
from batcher.transformer.layers import FloatArray

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


# LongRoPE and dynamic RoPE: transformers lets the longest sequence of a call choose the factors of
# all positions. Here the context of the model chooses them, as in vLLM. So the factors of a token
# depend on no other token.

_SWITCH = "original_max_position_embeddings"


def _rope_types(module: Any) -> set[str]:
    kinds = getattr(module, "rope_type", None)
    return {*kinds.values()} if isinstance(kinds, dict) else {str(kinds)}  # or by kinds of layers


def fix_factors(body: nn.Module, context: int) -> None:
    """Let modules of LongRoPE and dynamic RoPE look up the factors of a whole context."""

    def factors_of(  # of positions [1, tokens]; found: those of all, by the kind of layers
        forward: Any, found: dict[Any, Any], x: Any, position_ids: Any, *kind: str, **named: str
    ) -> Any:
        key = (*kind, *named.values())
        if key not in found:
            found[key] = forward(x, torch.arange(context, device=x.device)[None], *kind, **named)
        return tree_map(lambda part: part.index_select(1, position_ids[0]), found[key])

    for module in body.modules():
        if _rope_types(module) & {"longrope", "dynamic"}:
            setattr(module, "forward", partial(factors_of, module.forward, {}))  # noqa: B010 - for mypy, forward is a method


class Sizes(NamedTuple):
    """The sizes of a model. eos_token_ids: all that end a text."""

    vocab_size: int
    max_position_embeddings: int
    eos_token_ids: tuple[int, ...]


_NUM_ROWS = 16  # rows for which weights are arranged; products may have any number


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
    if not torch.backends.mkldnn.is_available():
        return
    for name, child in module.named_children():
        weight = child.weight if type(child) is nn.Linear else None
        if weight is None or weight.device.type != "cpu" or weight.dtype != torch.float32:
            pack_linears(child)
        elif hasattr(torch.ops.mkldnn, "_reorder_linear_weight"):
            setattr(module, name, PackedLinear(child))


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
        BatchdecodeError: it has no cache, its cache changes the logits, or it would mix the factors
            of LongRoPE.
    """

    def __init__(self, model: Any, sizes: Sizes, *, is_exact: bool) -> None:
        for module in model.modules():
            if "longrope" in _rope_types(module):
                kinds = module.config.rope_parameters
                kinds = [kinds] if "rope_type" in kinds else kinds.values()
                switch = min(kind[_SWITCH] for kind in kinds if kind["rope_type"] == "longrope")
                if switch < sizes.max_position_embeddings:
                    raise BatchdecodeError(
                        "LongRoPE switches its factors, and a cache would mix them: give "
                        f"--max-context {switch}, up to which it does not switch"
                    )
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
