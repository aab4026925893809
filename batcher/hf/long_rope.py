"""LongRoPE: positions are turned by short or by long factors, as the length of a sequence asks.

transformers lets the longest sequence of a call choose the factors for all of them.  Here each
token has those that `generate` chooses for its row alone: long ones if the prompt has more than
`switch` tokens, or at positions from `switch` on.

When a row passes the switch, `generate` restarts Phi-3 and its relatives: it computes all tokens
anew, as a prompt, with long factors.  Other models keep the keys of their short prompts.  So keys
and values have two versions: as of tokens in a prompt longer than the switch, or not.  Rows that
share a block may need different ones.  Each cell has room for both and knows its token.  A version
that a row lacks is computed in the forward that needs it.
"""

from collections.abc import Callable, Iterator, Sequence
from inspect import unwrap
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.functional import pad

from batcher.errors import BatchdecodeError
from batcher.hf.tensor_store import TensorStore
from batcher.transformer.span import Span

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
        """Return the forward of a rotary embedding with the factors of each token."""

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
