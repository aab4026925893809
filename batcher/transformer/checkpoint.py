"""Opens checkpoints: a .gguf file, or a folder with config.json and safetensors.

Nothing of a tensor is read before it is asked for; what is opened has all tensors of its model, in
their shapes.  Both formats are data alone: nothing in them is run.
"""

from collections.abc import Callable, Mapping
from functools import cached_property, partial
from hashlib import sha256
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from batcher.errors import BatchdecodeError
from batcher.transformer.config import (
    Eos,
    TransformerConfig,
    TransformerSettings,
    config_from_json,
    eos_token_ids,
    is_ignored,
    tensor_shapes,
)
from batcher.transformer.layers import FloatArray, IntArray
from batcher.transformer.linear import WholeLinears
from batcher.transformer.stored import (
    StoredTensor,
    about,
    config_from_gguf,
    from_gguf_names,
    read_folder,
    read_gguf,
    read_json,
    read_json_if_there,
)
from batcher.transformer.tokenizer import (
    TransformerTokenizer,
    tokenizer_from_folder,
    tokenizer_from_gguf,
)
from batcher.transformer.transformer import EMBEDDING, CausalModel, ReadWeight, Transformer, Watch

if TYPE_CHECKING:  # what is for several processes is loaded where there are several
    from batcher.transformer.ranks import RankGroup

_NEEDED_MODULES = ("gguf", "jinja2", "safetensors", "tokenizers")
CONFIG = "config.json"
GENERATION = "generation_config.json"
_DIGESTED = 256  # bytes of each tensor


class _Generation(Struct):
    eos_token_id: Eos = None


class Checkpoint:
    """The weights of a transformer, mapped, with all there is to know of it.

    config: its sizes.
    names: of its tensors, as Hugging Face calls them: model.layers.0.self_attn.q_proj.weight.
    """

    def __init__(
        self,
        config: TransformerConfig,
        tensors: Mapping[str, StoredTensor],
        make_tokenizer: Callable[[], TransformerTokenizer],
    ) -> None:
        self.config, self._tensors, self._make_tokenizer = config, tensors, make_tokenizer
        names = []
        for name, shape in tensor_shapes(config):
            if name not in tensors:
                raise BatchdecodeError(f"the tensor {name} is missing")
            if tensors[name].shape != shape:
                given, wanted = list(tensors[name].shape), list(shape)
                raise BatchdecodeError(f"{name} is {given}, and the model's sizes make it {wanted}")
            names.append(name)
        unknown = [name for name in sorted(tensors.keys() - names) if not is_ignored(name)]
        if unknown:
            raise BatchdecodeError(
                f"{unknown[0]!r} is a tensor that no supported model of its kind has"
            )
        self.names = tuple(names)

    @cached_property
    def tokenizer(self) -> TransformerTokenizer:
        return self._make_tokenizer()

    def digest(self) -> str:
        """Return what tells this checkpoint from others, without reading all of it.

        It is of the sizes, of the vocabulary, and of how each tensor begins.
        """
        found = sha256(msgspec.json.encode(self.config))
        for name in sorted(self._tensors):
            tensor = self._tensors[name]
            found.update(f"{name} {tensor.kind} {tensor.shape}".encode())
            found.update(tensor.data[:_DIGESTED].tobytes())
        found.update(msgspec.msgpack.encode(self.tokenizer.token_bytes))
        found.update(msgspec.msgpack.encode(self.tokenizer.prefix_token_ids))
        return f"sha256:{found.hexdigest()[:16]}"

    def read(self, name: str) -> FloatArray:
        """Return one of `names` as float32, [out, in] of a weight; C-contiguous, perhaps read-only.

        Of GGUF's llama the rows of q and k are in the order of `config.rope.style`, interleaved.
        """
        return self._tensors[name].read()

    def read_rows(self, name: str, rows: IntArray) -> FloatArray:
        return self._tensors[name].read_rows(rows)


def open_checkpoint(path: Path) -> Checkpoint:
    """Open a .gguf file, or a folder with config.json and model.safetensors or its parts."""
    if any(find_spec(module) is None for module in _NEEDED_MODULES):
        raise BatchdecodeError(
            "checkpoints need gguf, safetensors, tokenizers and jinja2: "
            "install them with `pip install 'batchdecode[models]'`"
        )
    if not path.is_dir():
        with about(path):
            if not path.is_file():
                raise BatchdecodeError("there is no such file or folder")
            metadata, stored = read_gguf(path)
            config = config_from_gguf(metadata, stored)
            tensors = from_gguf_names(config, stored)
            return Checkpoint(config, tensors, lambda: tokenizer_from_gguf(path, metadata))
    with about(path / CONFIG):
        config = config_from_json(read_json(path / CONFIG, dict[str, Any]))
    generation = read_json_if_there(path / GENERATION, _Generation)
    if generation.eos_token_id is not None:  # it has the last word on what ends a text
        with about(path / GENERATION):
            config = replace(config, eos_token_ids=eos_token_ids(generation.eos_token_id))
    tensors = read_folder(path)
    with about(path):
        return Checkpoint(config, tensors, lambda: tokenizer_from_folder(path))


# From a checkpoint to what computes it: this process, or several, each with its columns.


def decoder_of(
    checkpoint: Checkpoint, path: Path, settings: TransformerSettings, watch: Watch
) -> CausalModel:
    """Return what computes a checkpoint, which was opened from `path`."""
    if settings.low_memory and settings.weights == "fp32":
        raise BatchdecodeError(
            "--low-memory keeps integers packed: give --weights int8-channel, too"
        )
    if settings.low_memory and settings.tensor_parallel > 1:
        raise BatchdecodeError(
            "--low-memory is for one process, and --tensor-parallel asks for more"
        )
    if settings.tensor_parallel == 1:
        table = partial(checkpoint.read_rows, EMBEDDING) if settings.low_memory else None
        linears = WholeLinears(settings.weights, is_fast=settings.fast_math, table=table)
        return Transformer(
            checkpoint.config, _reader(checkpoint, path, watch), linears, settings.layout
        )
    from batcher.transformer.ranks import RankProcesses  # noqa: PLC0415 - see above

    make = partial(make_rank, path, settings)
    return RankProcesses(checkpoint.config, make, settings.tensor_parallel, watch)


def make_rank(
    path: Path,
    settings: TransformerSettings,
    group: "RankGroup",
    watch: Watch,
) -> Transformer:
    from batcher.transformer.ranks import ColumnParallelLinears  # noqa: PLC0415 - as above

    checkpoint = open_checkpoint(path)
    linears = ColumnParallelLinears(settings.weights, group, is_fast=settings.fast_math)
    read = _reader(checkpoint, path, watch)
    return Transformer(checkpoint.config, read, linears, settings.layout)


def _reader(checkpoint: Checkpoint, path: Path, watch: Watch) -> ReadWeight:
    num_read = 0

    def read(name: str) -> FloatArray:
        nonlocal num_read
        watch(min(num_read, len(checkpoint.names) - 1), len(checkpoint.names))
        num_read += 1
        with np.errstate(all="ignore"):  # of which more is said below
            weight = checkpoint.read(name)
        if not np.isfinite(weight).all():
            raise BatchdecodeError(f"{path}: {name} is damaged: not all of it are numbers")
        return weight

    return read
