"""A model of transformers taken apart: its body, with attention of ours, and its head.

A few tokens are computed, by the model as it is and by its parts.  Where these do not come to the
same, or where attention is only a part of what mixes tokens, it is left whole.
"""

from typing import Any, NamedTuple

import torch
from torch import nn

from batcher.hf.attention import ATTENTION, AttentionCall, LayerStep

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
        """Return that, in what the head takes it from."""
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
        """Return the output [tokens, heads, value features] of all queries of a layer."""
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
        _check_order(body, ids[0], given.hidden[0], recorder)
        setattr(model, model.base_model_prefix, given)
        logits = model(input_ids=ids, use_cache=False).logits
        _check(recorder.calls, config, expected, logits)
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


def _check_order(
    body: nn.Module, ids: torch.Tensor, hidden: torch.Tensor, recorder: _Recorder
) -> None:
    """Raise a WholeError unless tokens come to the same in any order, but for attention."""
    order = recorder.positions = _ORDER.to(ids.device)
    again = body_output(body, ids[order], order, recorder)[0]
    if not is_close(again, hidden[order], num_apart=1):  # as experts may be chosen by a last bit
        raise WholeError("its tokens depend on each other outside attention")


def _check(
    calls: dict[int, AttentionCall], config: Any, expected: torch.Tensor, logits: torch.Tensor
) -> None:
    """Raise a WholeError unless the layers brought all there is, and it came to what was expected.

    expected, logits: [1, tokens, vocab_size], of the whole model and of its parts.
    """
    if sorted(calls) != [*range(config.num_hidden_layers)]:
        raise WholeError(f"attention was asked for by {len(calls)} of its layers")
    if len({(call.key.shape, call.value.shape) for call in calls.values()}) > 1:
        raise WholeError("its layers keep keys and values of different sizes")
    kinds = getattr(config, "layer_types", None) or ()
    for layer, kind in enumerate(kinds):
        if (kind == "sliding_attention") != (calls[layer].window is not None):
            raise WholeError(f"layer {layer} is {kind}, and has window {calls[layer].window}")
    if not is_close(logits[0], expected[0]):
        raise WholeError("with attention from elsewhere it comes to something else")


def is_close(found: torch.Tensor, expected: torch.Tensor, num_apart: int = 0) -> bool:
    """Return whether all tokens but `num_apart` come to the same numbers [tokens, numbers]."""
    tolerance = _TOLERANCES.get(found.dtype, _TOLERANCE) * expected.abs().max()
    is_same = (found - expected).abs().amax(1) <= tolerance  # which NaN never is
    return bool(is_same.sum() >= len(is_same) - num_apart)
