"""The tokens that one forward computes: where they stand, where they are kept, what they see.

Tokens that come alone, as those of rows that decode, are computed together: the keys and values of
several sequences are gathered, filled up to the longest of them.  Those on end of one sequence are
computed sequence by sequence.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch

from batcher.hf.attention import AttentionCall
from batcher.hf.tensor_store import TensorStore
from batcher.transformer.attention import NOWHERE
from batcher.transformer.cache_groups import CacheGroup
from batcher.transformer.layers import IntArray
from batcher.transformer.span import Span

NUM_GATHERED = 4096  # keys of several rows, at once: so that a processor's cache holds them
UNBOUNDED = 2**62


class _Alone(NamedTuple):
    """Single tokens of several sequences: their places, and the cells that each of them sees.

    cells: [rows, longest].  mask: [rows, 1, 1, longest] which of them are there; None for all.
    """

    places: torch.Tensor
    cells: torch.Tensor
    mask: torch.Tensor | None


class _OnEnd(NamedTuple):
    """Tokens on end of one sequence, and the cells that they see.

    mask: [tokens, cells] who sees which; None if none looks ahead and the first is that of the row.
    """

    places: slice
    cells: torch.Tensor
    mask: torch.Tensor | None


class RaggedStep:
    """Spans of several sequences, one after the other.

    groups: which layers read the same.  num_gathered: how many keys of several rows are computed
    together; 0 computes every token alone, so that nothing beside it shows in what it comes to.
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
        ends = np.cumsum(sizes).tolist()
        self.token_ids = self._tensor(np.concatenate([span.token_ids for span in spans]))
        self.positions = self._tensor(
            np.concatenate(
                [np.arange(span.start, span.start + len(span.token_ids)) for span in spans]
            )
        )
        self._own: list[torch.Tensor] = []
        self._parts: list[list[_Alone | _OnEnd]] = []
        self._group_of: dict[int, tuple[int, int]] = {}
        for number, group in enumerate(groups):
            self._group_of |= {layer: (number, at) for at, layer in enumerate(group.layers)}
            own = [span.cells[number][span.start :] for span in spans]
            self._own.append(self._tensor(np.concatenate(own)))
            seen = [
                _Seen(end - size, span.start, size, span.cells[number])
                for span, size, end in zip(spans, sizes, ends, strict=True)
            ]
            if num_gathered == 0:
                seen = [token for part in seen for token in part.tokens()]
            self._parts.append([*self._on_end(seen, group.window)])
            self._parts[-1] += self._alone(seen, group.window, num_gathered)

    def _tensor(self, numbers: IntArray) -> torch.Tensor:
        return torch.from_numpy(np.asarray(numbers, np.int64)).to(self._device)

    def _on_end(self, seen: Sequence["_Seen"], window: int | None) -> Iterator[_OnEnd]:
        for part in seen:
            if part.num_tokens > 1:
                first = part.first_seen(window)
                places = slice(part.place, part.place + part.num_tokens)
                positions = torch.arange(part.start, part.stop, device=self._device)[:, None]
                keys = torch.arange(first, part.stop, device=self._device)
                mask = None
                if part.start or (window is not None and part.stop > window):
                    mask = keys <= positions
                    if window is not None:
                        mask &= keys > positions - window
                yield _OnEnd(places, self._tensor(part.cells[first:]), mask)

    def _alone(
        self, seen: Sequence["_Seen"], window: int | None, num_gathered: int
    ) -> Iterator[_Alone]:
        """Yield tokens that are alone in their sequence, those that see about as many together."""
        rows = [
            (part.place, part.cells[part.first_seen(window) :])
            for part in seen
            if part.num_tokens == 1
        ]
        rows.sort(key=lambda row: len(row[1]))
        while rows:
            num_rows = 1
            while num_rows < len(rows) and (num_rows + 1) * len(rows[num_rows][1]) <= num_gathered:
                num_rows += 1
            yield self._together(rows[:num_rows])
            del rows[:num_rows]

    def _together(self, rows: Sequence[tuple[int, IntArray]]) -> _Alone:
        lengths = np.array([len(cells) for _, cells in rows])
        longest = int(lengths[-1])
        cells = np.full((len(rows), longest), NOWHERE)
        is_there = np.arange(longest) < lengths[:, None]
        cells[is_there] = np.concatenate([cells for _, cells in rows])
        mask = (
            None if is_there.all() else torch.from_numpy(is_there).to(self._device)[:, None, None]
        )
        places = self._tensor(np.array([place for place, _ in rows]))
        return _Alone(places, self._tensor(cells), mask)

    def attend(self, layer: int, call: AttentionCall) -> torch.Tensor:
        """Return the output [tokens, heads, value features] of all queries of a layer."""
        group, at = self._group_of[layer]
        kept = self._store.keys[at], self._store.values[at]
        keys, values = (part.view(-1, *part.shape[-2:]) for part in kept)  # or two in each cell
        keys[self._own[group]] = call.key
        values[self._own[group]] = call.value
        output = call.query.new_empty(*call.query.shape[:2], values.shape[-1])
        for part in self._parts[group]:
            match part:
                case _Alone(places, cells, mask):
                    query, own_keys, own_values = (
                        call.query[places, None],
                        keys[cells],
                        values[cells],
                    )
                    output[places] = call.of(query, own_keys, own_values, mask)[:, 0]
                case _OnEnd(places, cells, mask):
                    query, own_keys, own_values = call.query[places], keys[cells], values[cells]
                    is_causal = mask is None
                    output[places] = call.of(
                        query[None], own_keys[None], own_values[None], mask, is_causal=is_causal
                    )[0]
        return output


class _Seen(NamedTuple):
    """Tokens on end of one sequence: the place of the first among all, and its position.

    cells: [start + num_tokens] of all tokens up to the last of them.
    """

    place: int
    start: int
    num_tokens: int
    cells: IntArray

    @property
    def stop(self) -> int:
        """The position behind the last."""
        return self.start + self.num_tokens

    def first_seen(self, window: int | None) -> int:
        """Return the first position that the first of them sees."""
        return 0 if window is None else max(self.start + 1 - window, 0)

    def tokens(self) -> "Iterator[_Seen]":
        """Yield each of them by itself."""
        for number in range(self.num_tokens):
            position = self.start + number
            yield _Seen(self.place + number, position, 1, self.cells[: position + 1])
