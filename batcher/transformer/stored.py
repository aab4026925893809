"""A tensor as it lies in a file, in any of the formats that are read, and as float32."""

from collections.abc import Callable
from math import prod

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from batcher.errors import BatchdecodeError

Bytes = NDArray[np.uint8]
FloatArray = NDArray[np.float32]
IntArray = NDArray[np.int64]


class Kind(Struct, frozen=True):
    """A format of numbers: so many in a block of so many bytes."""

    block_size: int
    num_bytes: int


KINDS = {
    "F32": Kind(1, 4),
    "F16": Kind(1, 2),
    "BF16": Kind(1, 2),
    "Q8_0": Kind(32, 34),
    "Q4_0": Kind(32, 18),
    "Q4_1": Kind(32, 20),
    "Q5_0": Kind(32, 22),
    "Q5_1": Kind(32, 24),
    "Q2_K": Kind(256, 84),
    "Q3_K": Kind(256, 110),
    "Q4_K": Kind(256, 144),
    "Q5_K": Kind(256, 176),
    "Q6_K": Kind(256, 210),
}


class StoredTensor(Struct, frozen=True, eq=False):
    """A tensor in a file that is mapped: what is not read costs nothing.

    kind: one of KINDS; it is checked here, as is that the bytes are those of the shape.
    shape: rows first, as in numpy: [out, in] of a weight.
    data: [bytes] of the mapped file.
    """

    kind: str
    shape: tuple[int, ...]
    data: Bytes

    def __post_init__(self) -> None:
        size = stored_size(self.kind, self.shape)
        if len(self.data) != size:
            raise BatchdecodeError(
                f"{size:,} bytes are needed for {list(self.shape)} in {self.kind}, and "
                f"{len(self.data):,} are there: the file is cut off or damaged"
            )

    def read(self) -> FloatArray:
        """Return the numbers: a view of the file, read-only, if it has float32, else a copy."""
        decode = _DECODERS.get(self.kind)
        if decode is None:
            return self._dequantize()
        return np.require(decode(self.data).reshape(self.shape), np.float32, ["C", "A"])

    def read_rows(self, rows: IntArray) -> FloatArray:
        """Return some of the rows as they are in what `read` returns; nothing else is read."""
        data = self.data.reshape(self.shape[0], -1)[rows].reshape(-1)
        return StoredTensor(self.kind, (len(rows), *self.shape[1:]), data).read()

    def _dequantize(self) -> FloatArray:
        from gguf import GGMLQuantizationType, dequantize  # noqa: PLC0415 - optional

        kind = KINDS[self.kind]
        row_size = self.shape[-1] // kind.block_size * kind.num_bytes
        blocks = self.data.reshape(-1, row_size)
        numbers = dequantize(blocks, GGMLQuantizationType[self.kind]).reshape(self.shape)
        return np.ascontiguousarray(numbers, np.float32)


def stored_size(kind: str, shape: tuple[int, ...]) -> int:
    """Return how many bytes a tensor takes.

    Raises:
        BatchdecodeError: its kind is not read here, or it cannot have this shape.
    """
    if kind not in KINDS:
        raise BatchdecodeError(f"{kind} is not supported, known: {', '.join(KINDS)}")
    block_size = KINDS[kind].block_size
    if not shape or 0 in shape:
        raise BatchdecodeError(f"the shape {list(shape)} has a size of zero")
    if shape[-1] % block_size:
        raise BatchdecodeError(f"rows of {shape[-1]} are no blocks of {block_size}, as in {kind}")
    return prod(shape) // block_size * KINDS[kind].num_bytes


def _widened(data: Bytes) -> FloatArray:
    """Return bfloat16 as float32: its upper half."""
    return (data.view("<u2").astype(np.uint32) << 16).view(np.float32)


_DECODERS: dict[str, Callable[[Bytes], NDArray[np.floating]]] = {
    "F32": lambda data: data.view("<f4"),
    "F16": lambda data: data.view("<f2"),
    "BF16": _widened,
}
