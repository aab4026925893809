"""Tensors and configs in files, GGUF or safetensors."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from math import prod
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import msgspec
import numpy as np
from msgspec import Struct
from msgspec.structs import replace
from numpy.typing import NDArray

from batcher.errors import BatchdecodeError
from batcher.transformer.config import (
    GGUF_FIELDS,
    ROPE_FACTORS,
    UNSAID,
    Architecture,
    FrequencyFactors,
    RopeStyle,
    TransformerConfig,
    WeightKind,
    config_of,
    tensor_specs,
)
from batcher.transformer.layers import LARGEST, FloatArray, IntArray, quantize_weights_int8

LFS_POINTER = b"version https://git-lfs.github.com/spec/"
MAX_TEXT = 256 * 2**20  # the largest tokenizer.json has 35 MB
T = TypeVar("T")


@contextmanager
def about(what: Path | str) -> Iterator[None]:
    """Prefix errors with `what`, as a BatchdecodeError."""
    try:
        yield
    except RecursionError:
        raise BatchdecodeError(f"{what}: it is nested too deeply") from None
    except OSError as error:
        raise BatchdecodeError(f"{what}: cannot be read: {error.strerror or error}") from None
    except (BatchdecodeError, msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise BatchdecodeError(f"{what}: {error}") from None


def check_not_pointer(path: Path) -> None:
    with path.open("rb") as file:
        if file.read(len(LFS_POINTER)) == LFS_POINTER:
            raise BatchdecodeError("it is a Git LFS pointer, not the data: run `git lfs pull`")


def read_file(path: Path) -> bytes:
    if not path.is_file():
        raise BatchdecodeError("there is no such file")
    if path.stat().st_size > MAX_TEXT:
        raise BatchdecodeError(f"it has more than {MAX_TEXT:,} bytes")
    check_not_pointer(path)
    return path.read_bytes()


def read_json(path: Path, kind: type[T]) -> T:
    return msgspec.json.decode(read_file(path), type=kind)


def read_json_if_there(path: Path, kind: type[T]) -> T:
    if not path.is_file():
        return kind()
    with about(path):
        return read_json(path, kind)


Bytes = NDArray[np.uint8]


# Number formats: (numbers in a block, bytes of a block).
KINDS = {
    "F32": (1, 4),
    "F16": (1, 2),
    "BF16": (1, 2),
    "Q8_0": (32, 34),
    "Q4_0": (32, 18),
    "Q4_1": (32, 20),
    "Q5_0": (32, 22),
    "Q5_1": (32, 24),
    "Q2_K": (256, 84),
    "Q3_K": (256, 110),
    "Q4_K": (256, 144),
    "Q5_K": (256, 176),
    "Q6_K": (256, 210),
}


BLOCK = 32  # numbers with one scale
MIDDLE = 128  # of 8 bits; that of 4 bits is 8
FOUR_BITS = {"Q4_0", "Q4_1"}


class Blocks(NamedTuple):
    """A weight [out, in] as (integers - middle) * scales + offsets, by blocks of 32 inputs.

    packed: [out, blocks, 32 * bits / 8], the even number of a byte in its lower half.
    scales: [out, blocks]. offsets: [out, blocks], or [out, 0] where all are zero.
    """

    packed: Bytes
    scales: FloatArray
    offsets: FloatArray


class StoredTensor(Struct, frozen=True, eq=False):
    """A tensor in a mapped file; only parts that are used are read.

    kind: one of KINDS, checked with the number of bytes.
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
        """Return the tensor as float32: a read-only view of float32 in the file, else a copy."""
        data = self.data
        if self.kind == "F32":
            numbers: NDArray[np.floating] = data.view("<f4")
        elif self.kind == "F16":
            numbers = data.view("<f2")
        elif self.kind == "BF16":
            numbers = (data.view("<u2").astype(np.uint32) << 16).view(np.float32)
        else:
            from gguf import GGMLQuantizationType, dequantize  # noqa: PLC0415 - optional

            block_size, num_bytes = KINDS[self.kind]
            blocks = data.reshape(-1, self.shape[-1] // block_size * num_bytes)
            numbers = dequantize(blocks, GGMLQuantizationType[self.kind])
        return np.require(numbers.reshape(self.shape), np.float32, ["C", "A"])

    def read_rows(self, rows: IntArray) -> FloatArray:
        """Return some of its rows, without reading others."""
        data = self.data.reshape(self.shape[0], -1)[rows].reshape(-1)
        return StoredTensor(self.kind, (len(rows), *self.shape[1:]), data).read()

    def block_format(self, weights: WeightKind) -> tuple[int, bool]:
        """Return the bits of `blocks`, and whether there are offsets."""
        has_four = weights == "q4" and self.kind in FOUR_BITS
        return (4, self.kind == "Q4_1") if has_four else (8, False)

    def blocks(self, weights: WeightKind) -> Blocks:
        """Return a weight [out, in] in blocks, those of the file if they have the wanted format.

        weights: q8 for 8 bits, q4 for the file's blocks of 4 bits, where it has some.
        """
        num_out, num_in = self.shape
        none = np.empty((num_out, 0), np.float32)
        if self.kind != "Q8_0" and self.kind not in FOUR_BITS:
            padded = np.pad(self.read(), ((0, 0), (0, -num_in % BLOCK)))
            integers, scales = quantize_weights_int8(padded.reshape(-1, BLOCK), per_channel=True)
            packed = integers.view(np.uint8).reshape(num_out, -1, BLOCK) ^ np.uint8(MIDDLE)
            return Blocks(packed, scales.reshape(num_out, -1), none)
        stored = self.data.reshape(num_out, -1, KINDS[self.kind][1])
        scales = stored[..., :2].copy().view("<f2")[..., 0].astype(np.float32)
        if self.kind == "Q8_0":
            return Blocks(stored[..., 2:] ^ np.uint8(MIDDLE), scales, none)
        both = stored[..., -BLOCK // 2 :]  # a byte has the numbers i and i + 16
        numbers = np.concatenate([both & 15, both >> 4], -1)
        minimums = -8 * scales
        if self.kind == "Q4_1":
            minimums = stored[..., 2:4].copy().view("<f2")[..., 0].astype(np.float32)
        if weights == "q4":
            packed = numbers[..., 0::2] | numbers[..., 1::2] << 4
            return Blocks(packed, scales, minimums + 8 * scales if self.kind == "Q4_1" else none)
        ends = np.stack([numbers.min(-1), numbers.max(-1)]) * scales + minimums
        wide = np.abs(ends).max(0) / np.float32(LARGEST)  # scales of 8 bits
        wide[wide == 0] = 1
        shares = numbers * (scales / wide)[..., None]
        shares += (minimums / wide + MIDDLE)[..., None]
        return Blocks(np.rint(shares, out=shares).astype(np.uint8), wide, none)


def stored_size(kind: str, shape: tuple[int, ...]) -> int:
    if kind not in KINDS:
        raise BatchdecodeError(f"{kind} is not supported, known: {', '.join(KINDS)}")
    block_size, num_bytes = KINDS[kind]
    if not shape or 0 in shape:
        raise BatchdecodeError(f"the shape {list(shape)} has a size of zero")
    if shape[-1] % block_size:
        raise BatchdecodeError(
            f"rows of {shape[-1]} do not divide into blocks of {block_size} ({kind})"
        )
    return prod(shape) // block_size * num_bytes


# GGUF files: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md.
#
# The reader of the package `gguf` takes two seconds for a vocabulary of 49,152, and trusts the
# counts in a file; here each is compared with the remaining bytes.

MAGIC = b"GGUF"
VERSIONS = (2, 3)
MAX_HEADER = 64 * 2**20  # a vocabulary of 262,144 with its merges takes 15 MiB
MAX_DIMENSIONS = 4
MAX_ALIGNMENT = 2**20
STRING, ARRAY = 8, 9
SCALARS = dict(enumerate(("<u1", "<i1", "<u2", "<i2", "<u4", "<i4", "<f4", "?")))
SCALARS |= {10: "<u8", 11: "<i8", 12: "<f8"}
_U32, _U64 = 4, 8  # bytes of numbers


def read_gguf(path: Path) -> tuple[dict[str, Any], dict[str, StoredTensor]]:
    """Return the metadata of a file, and its tensors by name, mapped."""
    from gguf import GGMLQuantizationType  # noqa: PLC0415 - optional

    check_not_pointer(path)
    if path.stat().st_size < len(MAGIC):
        raise BatchdecodeError("it is not a GGUF file: it does not begin with GGUF")
    data: Bytes = np.memmap(path, np.uint8, mode="r")
    header = _Header(data)
    if bytes(header.take(len(MAGIC))) != MAGIC:
        raise BatchdecodeError("it is not a GGUF file: it does not begin with GGUF")
    version = header.number(_U32)
    if version not in VERSIONS:
        known = ", ".join(map(str, VERSIONS))
        raise BatchdecodeError(
            f"GGUF version {version} is not supported, known: {known}, little-endian"
        )
    num_tensors, num_fields = header.number(_U64), header.number(_U64)
    metadata: dict[str, Any] = {}
    for _ in header.counted(num_fields, least=13):  # a name's length, a kind, a byte
        name = header.text()
        if name in metadata:
            raise BatchdecodeError(f"{name!r} occurs twice in its metadata")
        metadata[name] = header.value(header.number(_U32))
    if metadata.get("split.count", 1) != 1:
        raise BatchdecodeError("it is one part of several; llama-gguf-split --merge joins them")
    places = []
    for _ in header.counted(num_tensors, least=24):  # lengths, a size, a kind, an offset
        name, num_dimensions = header.text(), header.number(_U32)
        if not 1 <= num_dimensions <= MAX_DIMENSIONS:
            raise BatchdecodeError(f"{name!r} has {num_dimensions} dimensions")
        shape = tuple(header.number(_U64) for _ in range(num_dimensions))[::-1]  # rows first
        places.append((name, header.number(_U32), shape, header.number(_U64)))
    alignment = metadata.get("general.alignment", 32)
    if alignment not in [2**power for power in range(MAX_ALIGNMENT.bit_length())]:
        raise BatchdecodeError(f"general.alignment {alignment!r} is not a power of two")
    body = data[-(-header.offset // alignment) * alignment :]
    tensors: dict[str, StoredTensor] = {}
    for name, number, shape, offset in places:
        if name in tensors:
            raise BatchdecodeError(f"it has two tensors {name!r}")
        with about(repr(name)):
            try:
                kind = str(GGMLQuantizationType(number).name)
            except ValueError:
                kind = f"kind {number}"
            end = offset + stored_size(kind, shape)
            tensors[name] = StoredTensor(kind, shape, body[offset:end])
    if sum(len(tensor.data) for tensor in tensors.values()) > len(body):
        raise BatchdecodeError("its tensors take more bytes than it has: some of them overlap")
    return metadata, tensors


class _Header:
    """A position in the header of a file."""

    def __init__(self, data: Bytes) -> None:
        self.offset = 0
        self._bytes = memoryview(data[:MAX_HEADER])  # type: ignore[arg-type] # numpy's stubs lack it

    def number(self, size: int) -> int:
        return int.from_bytes(self.take(size), "little")

    def text(self) -> str:
        try:
            return str(self.take(self.number(_U64)), "utf-8")
        except UnicodeDecodeError:
            raise BatchdecodeError("a string in its header is not UTF-8") from None

    def counted(self, count: int, least: int) -> range:
        """Return the indices of `count` items of at least `least` bytes each."""
        if count * least > len(self._bytes) - self.offset:
            raise self._cut_off()
        return range(count)

    def value(self, kind: int) -> Any:
        if kind == STRING:
            return self.text()
        if kind != ARRAY:
            return self._scalars(kind, 1)[0]
        kind, count = self.number(_U32), self.number(_U64)
        if kind == STRING:
            return [self.text() for _ in self.counted(count, least=8)]
        return self._scalars(kind, count)

    def _scalars(self, kind: int, count: int) -> list[Any]:
        if kind not in SCALARS:
            raise BatchdecodeError(f"its metadata has values of kind {kind}, which is unknown")
        dtype = np.dtype(SCALARS[kind])
        numbers: list[Any] = np.frombuffer(self.take(count * dtype.itemsize), dtype).tolist()
        return numbers

    def take(self, size: int) -> memoryview:
        begin, self.offset = self.offset, self.offset + size
        if self.offset > len(self._bytes):
            raise self._cut_off()
        return self._bytes[begin : self.offset]

    def _cut_off(self) -> BatchdecodeError:
        if len(self._bytes) == MAX_HEADER:
            return BatchdecodeError(f"its header is longer than {MAX_HEADER:,} bytes")
        return BatchdecodeError("it is cut off or damaged: it ends within its header")


def from_gguf_names(
    config: TransformerConfig, tensors: Mapping[str, StoredTensor]
) -> dict[str, StoredTensor]:
    """Return the tensors of a file by Hugging Face's names; an unknown one keeps its own."""
    named: dict[str, StoredTensor] = {}
    known: set[str] = set()
    for spec in tensor_specs(config):
        tensor = tensors.get(spec.gguf)
        if tensor is None:
            break
        known.add(spec.gguf)
        if spec.expert is not None and config.experts is not None:
            num_experts = config.experts.num_experts
            if len(tensor.shape) < 2 or tensor.shape[0] != num_experts:  # noqa: PLR2004 - of one or more
                raise BatchdecodeError(
                    f"{spec.gguf} is {list(tensor.shape)}, and the model has {num_experts} experts"
                )
            data = tensor.data.reshape(num_experts, -1)[spec.expert]
            tensor = StoredTensor(tensor.kind, tensor.shape[1:], data)
        named[spec.name] = tensor
    return named | {name: tensor for name, tensor in tensors.items() if name not in known}


# Folders of safetensors. The package `safetensors` validates a file; then its bytes are mapped,
# since numpy lacks bfloat16.

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
    """Return the tensors of the one file in `folder`, or of the shards in its index."""
    if not (folder / INDEX).is_file():
        if not (folder / ALONE).is_file():
            raise BatchdecodeError(
                f"{folder}: neither {ALONE} nor {INDEX} is there; other formats, such as "
                "pickles, are not read"
            )
        return _read_file(folder / ALONE)
    with about(folder / INDEX):
        shard_of = read_json(folder / INDEX, _Index).weight_map
        shards = sorted(set(shard_of.values()))
        for shard in shards:
            if Path(shard).name != shard or not shard.endswith(".safetensors"):
                raise BatchdecodeError(f"{shard!r} is not the name of a .safetensors file")
            if not (folder / shard).is_file():
                raise BatchdecodeError(f"{shard!r} is missing")
    parts = {shard: _read_file(folder / shard) for shard in shards}
    lost = next((name for name, shard in shard_of.items() if name not in parts[shard]), None)
    if lost is not None:
        raise BatchdecodeError(f"{folder / shard_of[lost]}: {lost!r} is missing")
    return {name: parts[shard][name] for name, shard in shard_of.items()}


def _read_file(path: Path) -> dict[str, StoredTensor]:
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


# The config of a GGUF file, in metadata such as llama.*.

KNOWN: dict[str, tuple[Architecture, RopeStyle]] = {
    # also Mistral's models; llama.cpp's conversion permutes their rows of q and k
    "llama": ("mistral", "interleaved"),
    "qwen2": ("qwen2", "half-split"),
    "qwen3": ("qwen3", "half-split"),
    "qwen3moe": ("qwen3_moe", "half-split"),
    "gemma3": ("gemma3", "half-split"),
}
MAX_FACTOR = 1e6
LARGEST_GEMMA = 62  # layers of Gemma 3 27B


def config_from_gguf(
    metadata: Mapping[str, Any], tensors: Mapping[str, StoredTensor]
) -> TransformerConfig:
    """Return the config in the metadata, completed by which tensors there are."""
    named = metadata.get("general.architecture")
    if named not in KNOWN:
        raise BatchdecodeError(
            f"architecture {named!r} is not supported, known: {', '.join(KNOWN)}; for others use "
            "hf:FOLDER, a folder of the same model for transformers"
        )
    architecture, style = KNOWN[named]
    prefix, is_gemma = f"{named}.", named == "gemma3"
    own = {
        name.removeprefix(prefix): value
        for name, value in metadata.items()
        if name.startswith(prefix)
    }
    embedding = tensors.get("token_embd.weight")
    if embedding is None:
        raise BatchdecodeError("token_embd.weight is missing")
    wide = own.get("feed_forward_length") or own.get("expert_feed_forward_length")
    if wide is None:
        raise BatchdecodeError(f"{prefix}feed_forward_length is missing")
    num_experts, num_chosen = own.get("expert_count", 0), own.get("expert_used_count", 0)
    is_chosen = isinstance(num_chosen, int) and isinstance(num_experts, int) and num_chosen > 0
    if num_experts and not (is_chosen and num_chosen <= num_experts):
        raise BatchdecodeError(f"expert_used_count is {num_chosen}, of {num_experts} experts")
    kind, kinds = own.get("rope.scaling.type", "linear"), ("none", "linear")
    if kind not in kinds:
        raise BatchdecodeError(
            f"RoPE scaled by {kind!r} is not supported, known: {', '.join(kinds)}"
        )
    factor = own.get("rope.scaling.factor") or own.get("rope.scale_linear")
    has_scaling = kind == "linear" and factor and ROPE_FACTORS not in tensors
    ends = [metadata.get(f"tokenizer.ggml.{end}_token_id") for end in ("eos", "eot", "eom")]
    given: dict[str, Any] = {
        "vocab_size": embedding.shape[0],
        "tie_word_embeddings": "output.weight" not in tensors,
        "eos_token_id": [end for end in ends if end is not None],
        "rope_scaling": {"type": "linear", "factor": factor} if has_scaling else None,
        "hidden_act": "gelu_pytorch_tanh" if is_gemma else "silu",
        "sliding_window_pattern": UNSAID["gemma3"]["sliding_window_pattern"],
        "use_sliding_window": True,  # in all layers, except in Gemma
        "max_window_layers": 0,
        "norm_topk_prob": True,
        "moe_intermediate_size": wide,
        **{ours: own[name] for name, ours in GGUF_FIELDS.items() if name in own},
        "intermediate_size": wide,
        "num_experts_per_tok": num_chosen or None,
    }
    try:
        config = config_of("mixtral" if named == "llama" and num_experts else architecture, given)
    except BatchdecodeError as error:
        message = str(error)
        for name, ours in GGUF_FIELDS.items():
            for place in ("`$.", "`"):
                message = message.replace(f"{place}{ours}`", f"{place}{name}`")
        raise BatchdecodeError(f"metadata: {message}" if "`" in message else message) from None
    for name in ("attention.value_length", "rope.dimension_count"):
        if own.get(name) not in (None, config.head_dim):
            raise BatchdecodeError(f"{name} {own[name]} is not supported, known: that of a head")
    rope, full_layers, attention_scale = replace(config.rope, style=style), config.full_layers, None
    if ROPE_FACTORS in tensors:  # of Llama 3
        if tensors[ROPE_FACTORS].shape != (config.head_dim // 2,):
            raise BatchdecodeError(f"{ROPE_FACTORS} is not one factor for each pair of a head")
        factors = tensors[ROPE_FACTORS].read().tolist()
        if not all(0 < factor < MAX_FACTOR for factor in factors):
            raise BatchdecodeError(f"{ROPE_FACTORS} has factors that no frequency is divided by")
        rope = replace(rope, scaling=FrequencyFactors(tuple(factors)))
    pattern, layers = own.get("attention.sliding_window_pattern"), range(config.num_layers)
    if pattern is not None and config.local_rope is not None:
        if isinstance(pattern, int) and pattern > 0:
            pattern = [(layer + 1) % pattern for layer in layers]
        if not isinstance(pattern, list) or len(pattern) < len(layers):
            raise BatchdecodeError(f"the sliding_window_pattern is not one of {len(layers)} layers")
        full_layers = tuple(layer for layer in layers if not pattern[layer])
    if is_gemma and config.num_layers == LARGEST_GEMMA:  # others use that of a head
        attention_scale = (config.hidden_size / config.num_heads) ** -0.5
    return replace(
        config,
        architecture="llama" if config.architecture == "mistral" else config.architecture,
        rope=rope,
        full_layers=full_layers,
        attention_scale=attention_scale,
        has_offset_norms=False,  # the conversion has added 1
    )
