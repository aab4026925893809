"""Reads where the tensors of a folder of safetensors lie.

The package `safetensors` checks a file, its header against its bytes; then its bytes are mapped as
they are, since numpy knows no bfloat16.
"""

from pathlib import Path

import msgspec
import numpy as np
from msgspec import Struct

from batcher.errors import BatchdecodeError
from batcher.transformer.files import about, check_not_pointer, read_json
from batcher.transformer.stored import StoredTensor

ALONE = "model.safetensors"
INDEX = "model.safetensors.index.json"
_LENGTH_SIZE = 8


class _Index(Struct):
    weight_map: dict[str, str]


class _Entry(Struct):
    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


def read_folder(folder: Path) -> dict[str, StoredTensor]:
    """Return the tensors of the one file in `folder`, or of the parts that its index lists.

    Raises:
        BatchdecodeError: one is missing, damaged, or not in the folder.
    """
    if not (folder / INDEX).is_file():
        if not (folder / ALONE).is_file():
            raise BatchdecodeError(
                f"{folder}: neither {ALONE} nor {INDEX} is there; other formats are not read, "
                "pickles least of all"
            )
        return _read_file(folder / ALONE)
    with about(folder / INDEX):
        shard_of = read_json(folder / INDEX, _Index).weight_map
        shards = sorted(set(shard_of.values()))
        for shard in shards:
            if Path(shard).name != shard or not shard.endswith(".safetensors"):
                raise BatchdecodeError(f"{shard!r} is no name of a .safetensors file beside it")
            if not (folder / shard).is_file():
                raise BatchdecodeError(f"{shard!r} is missing")
    parts = {shard: _read_file(folder / shard) for shard in shards}
    lost = next((name for name, shard in shard_of.items() if name not in parts[shard]), None)
    if lost is not None:
        raise BatchdecodeError(f"{folder / shard_of[lost]}: {lost!r} is missing")
    return {name: parts[shard][name] for name, shard in shard_of.items()}


def _read_file(path: Path) -> dict[str, StoredTensor]:
    """Return the tensors of one file.

    Raises:
        BatchdecodeError: it is damaged, or has tensors of an unknown kind.
    """
    from safetensors import SafetensorError, safe_open  # noqa: PLC0415 - optional

    with about(path):
        check_not_pointer(path)
        try:
            with safe_open(path, "np"):
                pass
        except SafetensorError as error:
            raise BatchdecodeError(f"it is cut off or damaged: {error}") from None
        data = np.memmap(path, np.uint8, mode="r")
        begin = _LENGTH_SIZE + int.from_bytes(data[:_LENGTH_SIZE].tobytes(), "little")
        header = msgspec.json.decode(
            data[_LENGTH_SIZE:begin].tobytes(), type=dict[str, msgspec.Raw]
        )
        header.pop("__metadata__", None)
        tensors = {}
        for name, raw in header.items():
            entry = msgspec.json.decode(raw, type=_Entry)
            first, last = (begin + offset for offset in entry.data_offsets)
            with about(name):
                tensors[name] = StoredTensor(entry.dtype, entry.shape, data[first:last])
        return tensors
