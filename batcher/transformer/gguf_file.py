"""Reads what a GGUF file holds: its metadata, and where its tensors lie.

The package `gguf` has a reader as well.  It takes two seconds for a vocabulary of 49,152, and
trusts the counts in a file; here each is compared with the bytes that are left.
https://github.com/ggml-org/ggml/blob/master/docs/gguf.md is the format.
"""

from collections.abc import Iterator
from pathlib import Path
from struct import Struct as Layout
from typing import Any

import numpy as np
from msgspec import Struct

from batcher.errors import BatchdecodeError
from batcher.transformer.files import check_not_pointer
from batcher.transformer.stored import Bytes, StoredTensor, stored_size

MAGIC = b"GGUF"
VERSIONS = (2, 3)
MAX_HEADER = 64 * 2**20  # a vocabulary of 262,144 with its merges takes 15 MiB
MAX_DIMENSIONS = 4
MAX_ALIGNMENT = 2**20
STRING, ARRAY = 8, 9
SCALARS = {
    0: "<u1",
    1: "<i1",
    2: "<u2",
    3: "<i2",
    4: "<u4",
    5: "<i4",
    6: "<f4",
    7: "?",
    10: "<u8",
    11: "<i8",
    12: "<f8",
}
_U32, _U64 = Layout("<I"), Layout("<Q")


class GgufFile(Struct, frozen=True):
    """What a file holds; tensors: by their names there."""

    metadata: dict[str, Any]
    tensors: dict[str, StoredTensor]


def read_gguf(path: Path) -> GgufFile:
    """Return what the file at `path` holds; its tensors stay where they are.

    Raises:
        BatchdecodeError: it is no GGUF file, is damaged, or has tensors of an unknown kind.
        OSError: it cannot be read.
    """
    check_not_pointer(path)
    if path.stat().st_size < len(MAGIC):
        raise BatchdecodeError("it is no GGUF file: it does not begin with GGUF")
    data: Bytes = np.memmap(path, np.uint8, mode="r")
    header = _Header(data)
    header.check_start()
    num_tensors, num_fields = header.u64(), header.u64()
    metadata: dict[str, Any] = {}
    for _ in header.counted(num_fields, least=13):  # a name's length, a kind, a byte
        name = header.text()
        if name in metadata:
            raise BatchdecodeError(f"{name!r} stands twice in its metadata")
        metadata[name] = header.value(header.u32())
    if metadata.get("split.count", 1) != 1:
        raise BatchdecodeError("it is one part of several; llama-gguf-split --merge joins them")
    places = list(_places(header, num_tensors))
    alignment = metadata.get("general.alignment", 32)
    if alignment not in [2**power for power in range(MAX_ALIGNMENT.bit_length())]:
        raise BatchdecodeError(f"general.alignment {alignment!r} is no power of two")
    body = data[-(-header.offset // alignment) * alignment :]
    tensors: dict[str, StoredTensor] = {}
    for place in places:
        if place.name in tensors:
            raise BatchdecodeError(f"it has two tensors {place.name!r}")
        tensors[place.name] = _tensor_at(place, body)
    if sum(len(tensor.data) for tensor in tensors.values()) > len(body):
        raise BatchdecodeError("its tensors take more bytes than it has: some of them overlap")
    return GgufFile(metadata, tensors)


class _Place(Struct, frozen=True):
    name: str
    kind: int
    shape: tuple[int, ...]
    offset: int


class _Header:
    """A position in the first bytes of a file, which moves over what is read.

    Every method raises a BatchdecodeError if the file ends before that does.
    """

    def __init__(self, data: Bytes) -> None:
        self.offset = 0
        self._bytes = memoryview(data[:MAX_HEADER])  # type: ignore[arg-type] # numpy's stubs lack it

    def check_start(self) -> None:
        """Read the magic bytes and the version."""
        if bytes(self._take(len(MAGIC))) != MAGIC:
            raise BatchdecodeError("it is no GGUF file: it does not begin with GGUF")
        version = self.u32()
        if version not in VERSIONS:
            known = ", ".join(map(str, VERSIONS))
            raise BatchdecodeError(
                f"GGUF version {version} is not supported, known: {known}, little-endian"
            )

    def u32(self) -> int:
        """Read a number of four bytes."""
        number: int = _U32.unpack(self._take(4))[0]
        return number

    def u64(self) -> int:
        """Read a number of eight bytes."""
        number: int = _U64.unpack(self._take(8))[0]
        return number

    def text(self) -> str:
        """Read a string."""
        try:
            return str(self._take(self.u64()), "utf-8")
        except UnicodeDecodeError:
            raise BatchdecodeError("a string in its header is not UTF-8") from None

    def counted(self, count: int, least: int) -> range:
        """Return the indices of `count` things to read, each of at least `least` bytes."""
        if count * least > len(self._bytes) - self.offset:
            raise self._cut_off()
        return range(count)

    def value(self, kind: int) -> Any:
        """Read a value; an array is a list."""
        if kind == STRING:
            return self.text()
        if kind != ARRAY:
            return self._scalars(kind, 1)[0]
        kind, count = self.u32(), self.u64()
        if kind == STRING:
            return [self.text() for _ in self.counted(count, least=8)]
        return self._scalars(kind, count)

    def _scalars(self, kind: int, count: int) -> list[Any]:
        if kind not in SCALARS:
            raise BatchdecodeError(f"its metadata has values of kind {kind}, which is unknown")
        dtype = np.dtype(SCALARS[kind])
        numbers: list[Any] = np.frombuffer(self._take(count * dtype.itemsize), dtype).tolist()
        return numbers

    def _take(self, size: int) -> memoryview:
        begin, self.offset = self.offset, self.offset + size
        if self.offset > len(self._bytes):
            raise self._cut_off()
        return self._bytes[begin : self.offset]

    def _cut_off(self) -> BatchdecodeError:
        if len(self._bytes) == MAX_HEADER:
            return BatchdecodeError(f"its header is longer than {MAX_HEADER:,} bytes")
        return BatchdecodeError("it is cut off or damaged: it ends within its header")


def _places(header: _Header, num_tensors: int) -> Iterator[_Place]:
    """Yield where each tensor is; sizes are in GGUF's order, columns first."""
    for _ in header.counted(num_tensors, least=24):  # lengths, a size, a kind, an offset
        name, num_dimensions = header.text(), header.u32()
        if not 1 <= num_dimensions <= MAX_DIMENSIONS:
            raise BatchdecodeError(f"{name!r} has {num_dimensions} dimensions")
        shape = tuple(header.u64() for _ in range(num_dimensions))[::-1]
        yield _Place(name, header.u32(), shape, header.u64())


def _tensor_at(place: _Place, body: Bytes) -> StoredTensor:
    try:
        kind = _kind_name(place.kind)
        end = place.offset + stored_size(kind, place.shape)
        return StoredTensor(kind, place.shape, body[place.offset : end])
    except BatchdecodeError as error:
        raise BatchdecodeError(f"{place.name!r}: {error}") from None


def _kind_name(kind: int) -> str:
    """Return what GGUF calls the kind of a tensor."""
    from gguf import GGMLQuantizationType  # noqa: PLC0415 - optional

    try:
        return str(GGMLQuantizationType(kind).name)
    except ValueError:
        return f"kind {kind}"
