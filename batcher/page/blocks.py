"""Tables packed for a page: blocks of columns, each an array of one type, as base64 of one gzip.

A block is the length of its header (4 bytes, the least first), the header in JSON and the bytes of
its columns, one after the other.  Those of numbers are put by their places, the least first of all,
which packs better.  assets/unpack.js reads it.

Rule: a block is written as soon as it is made, so what is in memory does not grow with the rows.
"""

import base64
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice
from typing import Any, Generic, Literal, NamedTuple, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

ROWS_OF_BLOCK = 2**14
_MAX_WHOLE = 2**32 - 1
_WIDTHS = ((1, 2**8), (2, 2**16), (4, 2**32))
_BYTES_OF_GROUP = 3  # that base64 makes four characters of

Row = TypeVar("Row")
Kind = Literal["number", "ascending", "text"]


class TableColumn(NamedTuple, Generic[Row]):
    """A column: what is in it, and how to find that in a row.

    number: a whole one or a float.  ascending: whole ones of which most are a little more than the
    one before.
    """

    kind: Kind
    of: Callable[[Row], Any]


class _Packed(NamedTuple):
    """The bytes of a column, and what the header of its block says of them."""

    content: bytes
    said: dict[str, Any]


def table(
    name: str, columns: Mapping[str, TableColumn[Row]], rows: Iterable[Row]
) -> Iterator[bytes]:
    """Yield the blocks of a table; one without rows has none."""
    remaining = iter(rows)
    while block := list(islice(remaining, ROWS_OF_BLOCK)):
        packed = [
            (title, _pack(column.kind, [column.of(row) for row in block]))
            for title, column in columns.items()
        ]
        header = {
            "table": name,
            "rows": len(block),
            "columns": [{"name": title} | column.said for title, column in packed],
        }
        yield _block(header, b"".join(column.content for _, column in packed))


def value(name: str, content: object) -> bytes:
    """Return the block that is one value, as JSON."""
    return _block({"value": name}, msgspec.json.encode(content))


def packed_lines(blocks: Iterable[bytes]) -> Iterator[bytes]:
    """Yield `blocks`, packed, as lines of base64; equal blocks give equal lines."""
    compressor, rest = zlib.compressobj(wbits=31), b""
    for block in blocks:
        rest += compressor.compress(block)
        whole = len(rest) // _BYTES_OF_GROUP * _BYTES_OF_GROUP
        if whole:
            yield base64.b64encode(rest[:whole]) + b"\n"
            rest = rest[whole:]
    yield base64.b64encode(rest + compressor.flush()) + b"\n"


def _block(header: Mapping[str, Any], body: bytes) -> bytes:
    encoded = msgspec.json.encode(dict(header, bytes=len(body)))
    return len(encoded).to_bytes(4, "little") + encoded + body


def _pack(kind: Kind, values: list[Any]) -> _Packed:
    if kind == "text":
        return _pack_texts(values)
    numbers = np.array(values, dtype=np.float64)
    is_whole = bool((numbers == np.floor(numbers)).all())
    is_whole = is_whole and numbers.min() >= 0 and numbers.max() <= _MAX_WHOLE
    if kind == "ascending" and is_whole:
        steps = np.diff(numbers, prepend=0.0)
        folded = np.where(steps < 0, -2 * steps - 1, 2 * steps)  # 0, -1, 1, -2 as 0, 1, 2, 3
        if folded.max() <= _MAX_WHOLE:
            return _pack_numbers(folded, "ascending")
    if is_whole:
        return _pack_numbers(numbers, "whole")
    return _Packed(_by_place(numbers), {"as": "float", "width": 8})


def _pack_numbers(numbers: NDArray[np.float64], how: str) -> _Packed:
    width = next(width for width, limit in _WIDTHS if numbers.max() < limit)
    return _Packed(_by_place(numbers.astype(f"<u{width}")), {"as": how, "width": width})


def _by_place(numbers: NDArray[Any]) -> bytes:
    """Return the lowest bytes of all `numbers`, then the next ones, and so on."""
    in_order = numbers.astype(numbers.dtype.newbyteorder("<"))
    return in_order.view(np.uint8).reshape(len(in_order), -1).T.tobytes()


def _pack_texts(texts: list[str]) -> _Packed:
    """Return texts as their lengths in JavaScript, which counts in UTF-16, and all in UTF-8."""
    lengths = [
        len(text) if text.isascii() else len(text.encode("utf-16-le")) // 2 for text in texts
    ]
    packed = _pack("number", lengths)
    joined = "".join(texts).encode()
    said = {"as": "text", "width": packed.said["width"], "bytes": len(joined)}
    return _Packed(packed.content + joined, said)
