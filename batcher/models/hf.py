"""From the name of a model of transformers to its Model, with what a resumed run must repeat."""

import re
from importlib.util import find_spec
from pathlib import Path

from msgspec import to_builtins

from batcher.errors import BatchdecodeError
from batcher.hf.settings import PREFIX, HFSettings
from batcher.models.base import Tokenizer
from batcher.models.transformer import SlotModel, TransformerModel

_NEEDED_MODULES = ("torch", "transformers", "jinja2")
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
    if any(find_spec(module) is None for module in _NEEDED_MODULES):
        raise BatchdecodeError(
            "models of transformers need torch and transformers: "
            "install them with `pip install 'batchdecode[hf]'`"
        )
    from batcher.hf.hub import is_offline  # noqa: PLC0415 - an extra

    is_local = is_folder or is_offline(source)  # which is known before torch is imported
    from batcher.hf import attention, loading, model  # noqa: PLC0415 - with it comes torch

    with loading.quietly():
        whole, sizes, own_tokenizer, digest = loading.load(source, settings, is_local=is_local)
        limit = sizes.max_position_embeddings
        if settings.max_context is not None and settings.max_context > limit:
            raise BatchdecodeError(
                f"--max-context {settings.max_context} is above the {limit} of {source}"
            )
        sizes = sizes._replace(max_position_embeddings=settings.max_context or limit)
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
