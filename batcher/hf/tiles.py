"""A model of transformers in tiles: computations of a fixed number of tokens, captured once.

Prompt tokens and decoding rows share a tile; what is missing is padding. A tile reads its tokens
from tensors that stay where they are. So a GPU records its kernels once, as a CUDA graph, and one
launch replays them all. On a CPU the same code runs kernel by kernel, as do models whose shapes
depend on their tokens.

In an exact model no bit of a token depends on other tokens:

- Products have one number of rows. A larger tile computes several products of that size.
- Attention adds the keys of a token in an order that depends on their number alone.
- In each layer the keys and values of a tile are written before they are read. So tokens of one
  sequence can share a tile, each with a length of its own.
"""

import gc
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.nn.functional import rms_norm
from torch.utils._python_dispatch import TorchDispatchMode

from batcher.errors import BatchdecodeError, ModelError, describe
from batcher.hf.model import (
    AttentionCall,
    ModelParts,
    PackedLinear,
    Recorder,
    Sizes,
    body_output,
    fix_factors,
    head_output,
    pack_linears,
)
from batcher.transformer.layers import FloatArray, IntArray
from batcher.transformer.step import CacheSize, attention_groups, num_kv_layers

# Tokens of tiles, ascending. Exact ones are tried in turn. Their products have as many rows as the
# first tile: reading the weights takes longer.
_EXACT_SIZES: dict[str, tuple[tuple[int, ...], ...]] = {
    "cpu": ((16,),),
    "cuda": ((128, 256), (128,)),
}
_BY_TOKEN = (1,)
_FAST_SIZES = {"cpu": (1, 4, 16, 64, 256), "cuda": (8, 64, 256, 1024)}
_NUM_GATHERED = 4096  # keys that are read at once on a CPU, which fit into its cache
_NUM_TRIED = 12  # tokens
_FIELDS = 4  # of a token: id, position, slot and length; behind them its cell in each group
_SHARE = 0.5  # of the free memory of a device, for rows without a limit


class TileError(BatchdecodeError):
    """The reason why the kernels of a tile cannot be captured."""


class _FixedShapes(TorchDispatchMode):
    """Raises a TileError where a shape or a branch depends on numbers in tensors."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        tags = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
        if tags.intersection(func.tags):
            raise TileError(f"its shapes depend on its tokens: it calls {func}")
        return func(*args, **(kwargs or {}))


class TileDecoder:
    """The weights of a model that is computed in tiles.

    is_exact: whether to try exact tiles first, and at last whether they are exact.
    is_slow: whether these may have one token, which works for experts, too.
    sizes: tokens of a tile, ascending. num_rows: of an exact product; None if not exact.
    uncaptured: the reason why it is computed kernel by kernel, or None.
    inexact: the reason why it has no exact tiles, if it has none.
    """

    def __init__(
        self, parts: ModelParts, sizes: Sizes, *, is_exact: bool, is_slow: bool = False
    ) -> None:
        self.config, self.parts, self.call = sizes, parts, parts.calls[0]
        self.device = device = self.call.query.device
        fix_factors(parts.body, sizes.max_position_embeddings)
        self.hidden, self.logits = self._compute_some()
        self._exact_sizes = [*_EXACT_SIZES[device.type]] if is_exact else []
        self.uncaptured: str | None = None
        self.inexact = "torch computes the same token in several ways"
        try:
            with _FixedShapes():
                self._compute_some()
        except TileError as reason:
            self.uncaptured = self.inexact = str(reason)
            self._exact_sizes = []  # the products of experts have other rows in each tile
        if is_slow:
            self._exact_sizes.append(_BY_TOKEN)
        windows = {layer: call.window for layer, call in parts.calls.items()}
        self.cache_groups = attention_groups(windows, sizes.max_position_embeddings)
        self.num_kept = num_kv_layers(self.cache_groups)  # layers that a block has room for
        kept = (self.call.key[0], self.call.value[0])
        cell = self.num_kept * sum(part.numel() * part.element_size() for part in kept)
        self.cache_size = CacheSize(len(self.cache_groups) * cell, cell, 0)
        self.attend: Callable[..., torch.Tensor] = reference_attention
        if device.type != "cpu":
            try:
                from batcher.hf.attention import paged_attention  # noqa: PLC0415 - needs Triton

                self.attend = paged_attention
            except ImportError:
                self.uncaptured = "Triton is not installed"
        _fuse_norms(parts.body)
        for part in (parts.body, parts.head):
            pack_linears(part)
            _compute_in_pieces(part, self)
        self.choose_sizes()

    @torch.no_grad()  # in inference mode _FixedShapes would not see every call
    def _compute_some(self) -> tuple[torch.Tensor, torch.Tensor]:
        positions = torch.arange(_NUM_TRIED, device=self.device)
        ids = positions % self.config.vocab_size
        hidden = body_output(self.parts.body, ids, positions, Recorder(positions))[0]
        return hidden, head_output(self.parts, hidden)

    def choose_sizes(self) -> None:
        """Compute in the next exact tiles; after the last of them, in fast ones."""
        self.is_exact = bool(self._exact_sizes)
        fast_sizes = _FAST_SIZES[self.device.type]
        self.sizes = self._exact_sizes.pop(0) if self.is_exact else fast_sizes
        self.num_rows = self.sizes[0] if self.is_exact else None

    def sizes_of(self, num_tokens: int) -> Iterator[int]:
        """Yield the sizes of tiles for a number of tokens; the last one may be padded."""
        while num_tokens > 0:
            size = next((size for size in self.sizes if size >= num_tokens), self.sizes[-1])
            yield size
            num_tokens -= size

    def num_free_bytes(self) -> int | None:
        """Return the free memory of the device; None for a CPU."""
        if self.device.type == "cpu":
            return None
        gc.collect()  # memory of models that are not used any more
        torch.cuda.empty_cache()
        return int(torch.cuda.mem_get_info(self.device)[0])

    def new_cache(self, num_slots: int, num_blocks: int | None, block_size: int) -> "TileCache":
        """Return an empty cache.

        num_blocks: None for as many as the rows may need: a cache on a CPU grows, and one on
        another device takes some of the free memory.

        Raises:
            BatchdecodeError: they do not fit into the memory of the device.
        """
        try:
            return self._new_cache(num_slots, num_blocks, block_size)
        except TileError as reason:
            if self.uncaptured is not None:
                if self.attend is reference_attention:
                    raise
                self.attend = reference_attention  # the kernels of Triton fail, too
            self.uncaptured = str(reason)
        return self.new_cache(num_slots, num_blocks, block_size)

    def _new_cache(self, num_slots: int, num_blocks: int | None, block_size: int) -> "TileCache":
        if num_slots == 0 or self.device.type == "cpu":
            return TileCache(self, num_slots, 0, block_size)
        block_bytes, free = self.cache_size.of_block(block_size), self.num_free_bytes() or 0
        if not num_blocks:
            num_blocks = -(-self.config.max_position_embeddings // block_size)
            num_blocks *= num_slots * len(self.cache_groups)
            num_blocks = min(num_blocks, int(_SHARE * free) // block_bytes)
        try:
            return TileCache(self, num_slots, num_blocks, block_size)
        except torch.OutOfMemoryError:
            asked, fitting = num_blocks * block_bytes, int(0.9 * free) // block_bytes
        raise BatchdecodeError(
            f"{num_blocks:,} KV blocks of {block_size} tokens take {asked / 2**30:.1f} GiB, but "
            f"{self.device} has {free / 2**30:.1f} GiB free: at most {fitting:,} blocks fit"
        )


@torch.no_grad()
def _fuse_norms(module: nn.Module) -> None:
    """Compute each plain RMSNorm in one kernel; transformers launches eight."""
    for child in module.modules():
        weight = getattr(child, "weight", None)
        if weight is not None and type(child).__name__.endswith("RMSNorm"):
            eps = getattr(child, "variance_epsilon", getattr(child, "eps", None))
            fused = partial(rms_norm, normalized_shape=weight.shape, weight=weight, eps=eps)
            x = torch.linspace(-3, 3, weight.numel(), device=weight.device).to(weight.dtype)[None]
            tolerance = torch.finfo(weight.dtype).eps * 8
            if torch.allclose(fused(x), child(x), tolerance, tolerance):  # not Gemma's
                setattr(child, "forward", fused)  # noqa: B010 - for mypy, forward is a method


def _compute_in_pieces(module: nn.Module, decoder: TileDecoder) -> None:
    """Let linear layers compute products of `num_rows` rows each."""

    def in_pieces(forward: Callable[..., torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        num_rows = decoder.num_rows
        if num_rows is None or x.shape[-2] <= num_rows:
            return forward(x)
        return torch.cat([forward(part) for part in x.split(num_rows, -2)], -2)

    for child in module.modules():
        if isinstance(child, nn.Linear | PackedLinear):
            setattr(child, "forward", partial(in_pieces, child.forward))  # noqa: B010 - as above


class _Reads(NamedTuple):
    """What some tokens read: cells [tokens, keys], of which `mask` is visible, or all."""

    tokens: torch.Tensor
    cells: torch.Tensor
    mask: torch.Tensor | None


class Where(NamedTuple):
    """The keys of the tokens in a tile, in one group of layers.

    tables: [blocks of a row, num_slots] int32. slots, lengths, own_cells: [tokens] int64, the slot
    of each token, the number of keys up to its own, and the cell of its own, whose block may be
    missing in the table. first_cell: of block 0.
    """

    tables: torch.Tensor
    slots: torch.Tensor
    lengths: torch.Tensor
    own_cells: torch.Tensor
    first_cell: int
    block_size: int

    def reads(self, window: int | None, num_gathered: int) -> list[_Reads]:
        """Return what the tokens read, without padding.

        num_gathered: cells that several tokens read at once; 0 for each token alone.
        """
        tables, size, device = self.tables.cpu().numpy(), self.block_size, self.slots.device
        slots, lengths, own_cells = (part.cpu().numpy() for part in self[1:4])
        num_read = np.minimum(lengths, window or lengths)
        tokens, found = [*np.argsort(num_read, kind="stable")[(num_read == 0).sum() :]], []
        while tokens:
            num = 1
            while num < len(tokens) and (num + 1) * num_read[tokens[num]] <= num_gathered:
                num += 1
            own, tokens = np.array(tokens[:num]), tokens[num:]
            widest = num_read[own[-1]]
            at = lengths[own, None] - widest + np.arange(widest)
            blocks = tables[np.maximum(at[:, :-1], 0) // size, slots[own, None]].astype(np.int64)
            cells = self.first_cell + blocks * size + at[:, :-1] % size
            cells = np.concatenate([cells, own_cells[own, None]], 1)
            is_read = at >= (lengths - num_read)[own, None]
            cells[~is_read] = 0
            mask = None if is_read.all() else torch.from_numpy(is_read).to(device)[:, None, None]
            at_tokens, at_cells = (torch.from_numpy(part).to(device) for part in (own, cells))
            found.append(_Reads(at_tokens, at_cells, mask))
        return found


def reference_attention(
    call: AttentionCall, keys: torch.Tensor, values: torch.Tensor, reads: Sequence[_Reads]
) -> torch.Tensor:
    """Return the same as `paged_attention`; zeros for padding."""
    output = call.query.new_zeros(*call.query.shape[:2], values.shape[2])
    for tokens, cells, mask in reads:
        query = call.query[tokens][:, None]
        own_keys, own_values = (  # faster than an index
            part.index_select(0, cells.flatten()).view(*cells.shape, *part.shape[1:])
            for part in (keys, values)
        )
        output[tokens] = call.of(query, own_keys, own_values, mask)[:, 0]
    return output


class TileCache:
    """Keys and values of rows in blocks, and the tiles that read and write them.

    Cell 0 is written by padding. Then each group of layers has a spare cell for each slot, for a
    token that is computed ahead and whose block is not known yet. Then come the blocks.

    made_for: slots, blocks and tokens in a block that were asked for.
    num_blocks: how many there are. max_blocks: there can be, None on a CPU. first_cell: of block 0.
    keys, values: [layers of a group, cells, kv_heads, features].
    tables: for each group of layers [blocks of a row, num_slots] int32, as in Pages.
    """

    def __init__(
        self, decoder: TileDecoder, num_slots: int, num_blocks: int, block_size: int
    ) -> None:
        self.made_for = num_slots, num_blocks, block_size
        self.num_slots, self.num_blocks, self.block_size = num_slots, 0, block_size
        self.decoder, self._device = decoder, decoder.device
        self.first_cell = 1 + len(decoder.cache_groups) * num_slots
        self._tables = np.zeros((len(decoder.cache_groups), 0, num_slots), np.int32)
        self._width = 0  # of the longest table
        self._grow(num_blocks)
        self._tiles: dict[int, _Tile] = {}
        self._heads: dict[int, _Head] = {}
        if num_slots:
            pool = None if self._device.type == "cpu" else torch.cuda.graph_pool_handle()
            self._tiles = {size: _Tile(self, size, pool) for size in reversed(decoder.sizes)}
            sizes = (decoder.num_rows,) if decoder.num_rows else decoder.sizes[:3]
            self._heads = {size: _Head(decoder, size, pool) for size in sizes}

    def _grow(self, num_blocks: int) -> None:
        decoder, num_cells = self.decoder, self.first_cell + num_blocks * self.block_size
        stores = []
        for name, example in (("keys", decoder.call.key), ("values", decoder.call.value)):
            store = example.new_zeros(decoder.num_kept, num_cells, *example.shape[1:])
            if self.num_blocks:
                old = getattr(self, name)
                store[:, : old.shape[1]] = old
            stores.append(store)
        self.keys, self.values = stores
        longest = -(-decoder.config.max_position_embeddings // self.block_size)
        shape = (len(decoder.cache_groups), min(longest, num_blocks), self.num_slots)
        tables = np.zeros(shape, np.int32)
        tables[:, : self._tables.shape[1]] = self._tables
        self._tables, self.num_blocks = tables, num_blocks
        self.max_blocks = None if self._device.type == "cpu" else num_blocks
        self.tables = torch.from_numpy(tables).to(self._device, copy=True)

    def make_room(self, num_blocks: int) -> None:
        """Have at least `num_blocks` blocks.

        Raises:
            ModelError: there are fewer on a device, where a cache does not grow.
        """
        if num_blocks <= self.num_blocks:
            return
        if self._device.type != "cpu":
            raise ModelError(
                f"{self._device} has only {self.num_blocks:,} KV blocks: "
                "set --kv-memory auto, or a smaller --batch"
            )
        self._grow(max(num_blocks, 2 * self.num_blocks))

    def copy(self, copies: Sequence[tuple[int, int]]) -> None:
        """Copy blocks in order: pairs (source, target)."""
        for pair in copies:
            starts = (self.first_cell + block * self.block_size for block in pair)
            first, second = (slice(start, start + self.block_size) for start in starts)
            for store in (self.keys, self.values):
                store[:, second] = store[:, first]

    def move(self, moves: Sequence[tuple[int, int]]) -> None:
        """Copy cells to others, all at once: pairs (source, target), counted from block 0."""
        self._move(*(np.array(moves).T + self.first_cell))

    def _move(self, *cells: IntArray) -> None:
        sources, targets = (_sent(each, self._device) for each in cells)
        for store in (self.keys, self.values):
            store[:, targets] = store[:, sources]

    def fill_blocks(self, slots: IntArray, positions: IntArray) -> None:
        """Move tokens that were computed ahead from spare cells into their blocks."""
        spares = [self._spare_cells(group, slots) for group in range(len(self._tables))]
        cells = [self._cells(own, slots, positions) for own in self._tables]
        self._move(np.concatenate(spares), np.concatenate(cells))

    def _spare_cells(self, group: int, slots: IntArray) -> IntArray:
        return 1 + group * self.num_slots + slots

    def _cells(self, table: Any, slots: IntArray, positions: IntArray) -> IntArray:
        at = np.minimum(positions // self.block_size, len(table) - 1)  # a next block is not there
        cells: IntArray = table[at, slots].astype(np.int64) * self.block_size
        return self.first_cell + cells + positions % self.block_size

    def set_tables(self, tables: dict[int, Sequence[Sequence[int]]]) -> None:
        """Set the block tables of some slots, by group."""
        for slot, by_group in tables.items():
            for own, table in zip(self._tables, by_group, strict=True):
                num = min(len(table), len(own))
                own[:num, slot] = table[:num]
                self._width = max(self._width, num)
        for target, own in zip(self.tables, self._tables, strict=True):
            target[: self._width].copy_(_sent(own[: self._width], self._device))

    @torch.inference_mode()
    def compute(
        self,
        token_ids: IntArray | torch.Tensor,
        positions: IntArray,
        slots: IntArray,
        wanted: IntArray,
        *,
        is_ahead: bool = False,
    ) -> torch.Tensor:
        """Compute tokens; return the hidden states [wanted, hidden_size] of some of them.

        token_ids, positions, slots: [tokens]. wanted: ascending indices of tokens.
        is_ahead: write tokens that begin a block into spare cells.
        """
        num_tokens = len(token_ids)
        sizes = [*self.decoder.sizes_of(num_tokens)]
        fields = np.zeros((_FIELDS + len(self._tables), sum(sizes)), np.int64)
        if not isinstance(token_ids, torch.Tensor):
            fields[0, :num_tokens] = token_ids
        fields[1:_FIELDS, :num_tokens] = positions, slots, positions + 1
        for group, table in enumerate(self._tables):
            cells = self._cells(table, slots, positions)
            if is_ahead:
                spares = self._spare_cells(group, slots)
                cells = np.where(positions % self.block_size, cells, spares)
            fields[_FIELDS + group, :num_tokens] = cells
        inputs = _sent(fields, self._device)
        if isinstance(token_ids, torch.Tensor):
            inputs[0, :num_tokens] = token_ids
        begin, hidden = 0, []
        for size in sizes:
            tile = self._tiles[size]
            tile.inputs.copy_(inputs[:, begin : begin + size])
            tile.run()
            first, last = np.searchsorted(wanted, [begin, begin + size])
            if first < last:
                hidden.append(tile.hidden[_sent(wanted[first:last] - begin, self._device)])
            begin += size
        return torch.cat(hidden) if hidden else self.decoder.hidden[:0]

    def look_ahead(
        self, token_ids: IntArray | torch.Tensor, positions: IntArray, slots: IntArray
    ) -> torch.Tensor:
        """Compute one token of each row; return the likeliest next ones, without waiting."""
        all_rows = np.arange(len(slots))
        hidden = self.compute(token_ids, positions, slots, all_rows, is_ahead=True)
        return torch.cat([head.tokens[:num].clone() for head, num, _ in self._heads_of(hidden)])

    def fetch(
        self, tokens: torch.Tensor, rows: IntArray
    ) -> tuple[torch.Tensor, Callable[[], IntArray]]:
        """Return some of `tokens`, and a function that waits for them and returns them."""
        if len(rows) < len(tokens):
            tokens = tokens[_sent(rows, self._device)]
        on_host = self._to_host(tokens)
        if self._device.type == "cpu":
            return tokens, on_host.numpy
        event = torch.cuda.current_stream(self._device).record_event()

        def wait() -> IntArray:
            event.synchronize()
            found: IntArray = on_host.numpy()
            return found

        return tokens, wait

    @torch.inference_mode()
    def _heads_of(self, hidden: torch.Tensor) -> Iterator[tuple["_Head", int, int]]:
        """Compute rows of logits in turn; yield what has them, their number and the first row."""
        begin = 0
        while begin < len(hidden):
            left = len(hidden) - begin
            size = next((size for size in self._heads if size >= left), max(self._heads))
            head, piece = self._heads[size], hidden[begin : begin + size]
            head.hidden[: len(piece)].copy_(piece)
            head.run()
            yield head, len(piece), begin
            begin += size

    @torch.inference_mode()
    def choose(
        self,
        hidden: torch.Tensor,
        rows: IntArray,
        top_rows: IntArray,
        num_top: int,
        edits: Any = None,
    ) -> tuple[IntArray, FloatArray, tuple[Any, ...]]:
        """Return the likeliest token after each of `hidden`, and logits of some rows.

        rows: ascending indices in `hidden` of rows whose logits leave the device, as float32.
        top_rows: the same of rows of which only `num_top` leave it, as in TopLogits.
        edits: LogitEdits of these rows, numbered as in `hidden`, or None.
        """
        tokens, logits = [], []
        tops: list[tuple[torch.Tensor, ...]] = []
        for head, num_rows, begin in self._heads_of(hidden):
            tokens.append(head.tokens[:num_rows].clone())
            own, own_top = (
                _sent(each[first:last] - begin, self._device)
                for each in (rows, top_rows)
                for first, last in [np.searchsorted(each, [begin, begin + num_rows])]
            )
            if len(own):
                logits.append(self._to_host(head.logits[own]))
            if len(own_top):
                raw = head.logits[own_top]
                raw_sums = head.logits.double().logsumexp(-1)[own_top]  # of a fixed number of rows
                if edits is None:
                    tops.append((raw, *_largest(raw, num_top), raw_sums))
                else:
                    places = np.arange(len(hidden)) - begin
                    places[(places < 0) | (places >= num_rows)] = -1
                    edited = _edited(head.logits, edits.at(places))
                    sums = edited.double().logsumexp(-1)[own_top]
                    ids, values = _largest(edited[own_top], num_top)
                    tops.append((raw, ids, values, sums, raw.gather(1, ids).float(), raw_sums))
        of_tops = [torch.cat(parts) for parts in zip(*tops, strict=True)]
        on_host = [self._to_host(part) for part in of_tops[1:]]
        chosen: IntArray = torch.cat(tokens).cpu().numpy()  # it waits for the copies, too
        found = [part.float().numpy() for part in logits]
        none = np.zeros((0, self.decoder.config.vocab_size), np.float32)

        def whole(indices: IntArray) -> FloatArray:
            lines = of_tops[0][_sent(indices, self._device)]
            all_logits: FloatArray = lines.float().cpu().numpy()
            return all_logits

        top: tuple[Any, ...] = ()
        if on_host:
            ids, *values_and_sums = (part.numpy() for part in on_host)
            repeated = values_and_sums if edits is None else ()  # they are the raw ones
            top = (ids, *values_and_sums, *repeated, whole)
        return chosen, np.concatenate(found) if found else none, top

    def _to_host(self, numbers: torch.Tensor) -> torch.Tensor:
        is_pinned = self._device.type != "cpu"  # otherwise the copy takes four times as long
        host = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=is_pinned)
        return host.copy_(numbers, non_blocking=True)


def _sent(numbers: NDArray[Any], device: torch.device) -> torch.Tensor:
    """Return numbers on a device, which reads them from pinned memory: so nothing waits for it."""
    tensor = torch.from_numpy(numbers)
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)


def _edited(logits: torch.Tensor, edits: Any) -> torch.Tensor:
    """Return edited logits as float32, to the bit as LogitEdits.apply does."""
    device, vocab_size = logits.device, logits.shape[1]
    packed = np.packbits(edits.allowed, axis=1, bitorder="little")
    eights = [edits.mask_rows, *edits[2:6], *edits[7:]]  # bytes of a number: first, to be aligned
    parts: list[NDArray[Any]] = [*eights, edits.bias, packed]
    every_byte = [np.ascontiguousarray(part).reshape(-1).view(np.uint8) for part in parts]
    edited = logits.to(torch.float32, copy=True)
    sent = _sent(np.concatenate(every_byte), device)
    if not len(sent):
        return edited
    on_device, begin = [], 0
    for part in parts:
        own = sent[begin : begin + part.nbytes]
        on_device.append(own.view(torch.from_numpy(part).dtype).view(part.shape))
        begin += part.nbytes
    mask_rows, *of_refused, bias_rows, bias_ids = on_device[:5]
    rows, ids, repetition, reduction, bias, bits = on_device[5:]
    is_allowed = bits[:, :, None] >> torch.arange(8, dtype=torch.uint8, device=device) & 1
    is_refused = is_allowed.flatten(1)[:, :vocab_size] == 0
    edited[mask_rows] = edited[mask_rows].masked_fill(is_refused, -torch.inf)
    edited[tuple(of_refused)] = -torch.inf
    edited[bias_rows, bias_ids] += bias
    values = edited[rows, ids].double()
    values = torch.where(values < 0, values * repetition, values / repetition) - reduction
    edited[rows, ids] = values.clamp(max=torch.finfo(torch.float32).max).float()
    return edited


def _largest(logits: torch.Tensor, num: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the ids of the largest logits of each row, ascending, and these logits.

    Of equal ones the lower ids come first: floats become integers of the same order, and the id
    their last bits.
    """
    bits = (logits.float() + 0.0).view(torch.int32).long()  # -0.0 becomes 0.0
    ordered = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits) << 32
    behind = 2**32 - 1 - torch.arange(logits.shape[1], device=logits.device)
    largest = (ordered | behind).topk(min(num, logits.shape[1])).values
    ids = (2**32 - 1 - (largest & (2**32 - 1))).sort().values
    return ids, logits.gather(1, ids).float()


class _Tile:
    """The body of the model for `size` tokens.

    inputs: [fields, size] int64; zeros are padding. hidden: [size, hidden_size], the output.
    """

    def __init__(self, cache: TileCache, size: int, pool: Any) -> None:
        decoder = cache.decoder
        self._cache, self._body, self._attend = cache, decoder.parts.body, decoder.attend
        self._num_gathered = 0 if decoder.is_exact else _NUM_GATHERED
        self._where: dict[int, Any] = {}  # by group, the same for all its layers
        groups = decoder.cache_groups
        self._group_of = {
            layer: (number, at)
            for number, group in enumerate(groups)
            for at, layer in enumerate(group.layers)
        }
        num_fields = _FIELDS + len(groups)
        self.inputs = torch.zeros(num_fields, size, dtype=torch.long, device=decoder.device)
        self.hidden = decoder.hidden.new_zeros(size, decoder.hidden.shape[1])
        self.run = _captured(self._compute, decoder, pool)

    def _compute(self) -> None:
        self._where.clear()
        self.hidden.copy_(body_output(self._body, self.inputs[0], self.inputs[1], self)[0])

    def attend(self, layer: int, call: AttentionCall) -> torch.Tensor:
        group, at = self._group_of[layer]
        cache, own = self._cache, self.inputs[_FIELDS + group]
        keys, values = cache.keys[at], cache.values[at]
        keys.index_copy_(0, own, call.key)
        values.index_copy_(0, own, call.value)
        if group not in self._where:
            sizes = cache.first_cell, cache.block_size
            of_tokens = self.inputs[2], self.inputs[3], own
            where: Any = Where(cache.tables[group], *of_tokens, *sizes)
            if self._attend is reference_attention:
                where = where.reads(call.window, self._num_gathered)
            self._where[group] = where
        return self._attend(call, keys, values, self._where[group])


class _Head:
    """The logits of `size` rows, and the likeliest tokens.

    hidden: [size, hidden_size], the input. logits: [size, vocab]. tokens: [size].
    """

    def __init__(self, decoder: TileDecoder, size: int, pool: Any) -> None:
        self._parts = decoder.parts
        self.hidden = decoder.hidden.new_zeros(size, decoder.hidden.shape[1])
        self.logits = decoder.logits.new_zeros(size, decoder.logits.shape[1])
        self.tokens = torch.zeros(size, dtype=torch.long, device=decoder.device)
        self.run = _captured(self._compute, decoder, pool)

    def _compute(self) -> None:
        self.logits.copy_(head_output(self._parts, self.hidden))
        self.tokens.copy_(self.logits.argmax(-1))


def _captured(compute: Callable[[], None], decoder: TileDecoder, pool: Any) -> Callable[[], None]:
    """Return a function that replays `compute`; `compute` itself if it cannot be captured.

    pool: of memory that several graphs share, since none runs while another does.

    Raises:
        TileError: a kernel cannot be compiled, or not be captured.
    """
    device = decoder.device
    if device.type == "cpu":
        return compute
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream(device)
    try:
        with torch.inference_mode(), torch.cuda.device(device):
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                for _ in range(2):  # libraries choose and load their kernels in the first calls
                    compute()
            torch.cuda.current_stream().wait_stream(stream)
            if decoder.uncaptured is not None:
                return compute
            with torch.cuda.graph(graph, pool=pool, stream=stream):
                compute()
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        raise TileError(f"its kernels were not captured: {describe(error)}") from error
    replay: Callable[[], None] = graph.replay
    return replay
