"""Load a model of transformers from a folder or the Hub.

A folder is read without a network. Python code of a model runs only if the settings allow it; the
weights are data.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer

from batcher.errors import BatchdecodeError, EncodingError
from batcher.foreign import calling
from batcher.hf.model import Sizes
from batcher.transformer.config import MAX_CONTEXT, HFSettings
from batcher.transformer.tokenizer import ChatTemplate, TransformerTokenizer, decoding_of, prefix_of

# A tokenizer of transformers as ours, with the bytes of every token and its chat template.


def as_tokenizer(tokenizer: Any) -> TransformerTokenizer:
    """Return a tokenizer of transformers as a TransformerTokenizer."""
    inner = getattr(tokenizer, "backend_tokenizer", None)
    if inner is None:
        raise BatchdecodeError(f"{type(tokenizer).__name__} is not made by `tokenizers`")
    source, template = tokenizer.chat_template, None
    if isinstance(source, dict):
        source = source.get("default")
    if source is not None:
        template = ChatTemplate(source, tokenizer.special_tokens_map)
    return TransformerTokenizer(inner, decoding_of(inner.to_str()), prefix_of(inner), template)


class NoTokenizer:
    """The tokenizer of a model that has none: prompts are token ids."""

    def __init__(self, vocab_size: int) -> None:
        self.token_bytes = [b""] * vocab_size

    def encode(self, _text: str) -> list[int]:
        raise EncodingError("invalid-value", "this model has no tokenizer: give token ids")


_TOKENIZERS = (  # files of which one is there where a folder has a tokenizer
    *("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "spiece.model"),
    *("vocab.json", "vocab.txt", "tekken.json"),
)
_DEVICE = re.compile(r"cpu|(?P<cuda>cuda)(:(?P<number>\d{1,3}))?", re.ASCII)
_DIGESTED = 64  # numbers of each weight
_LONGEST = 300  # characters of what transformers says


def load(
    source: str, settings: HFSettings, *, is_local: bool
) -> tuple[Any, Sizes, TransformerTokenizer | None, str]:
    """Return a model from a folder or the Hub, its sizes, its tokenizer or None, and a digest.

    is_local: do not ask the Hub.

    Raises:
        BatchdecodeError: it does not exist or cannot be read, or the device does not exist.
    """
    is_folder = Path(source).is_dir()
    named = _DEVICE.fullmatch(settings.device)
    if named is None:
        raise BatchdecodeError(f"--device {settings.device}: give cpu, cuda or cuda:N")
    num_devices = torch.cuda.device_count()
    if named["cuda"] and int(named["number"] or 0) >= num_devices:
        raise BatchdecodeError(
            f"--device {settings.device}: torch finds {num_devices} such devices here"
        )
    given = {"local_files_only": is_local, "trust_remote_code": settings.trust_remote_code}
    with reading(source):
        model, report = AutoModelForCausalLM.from_pretrained(
            source, dtype=settings.dtype, output_loading_info=True, **given
        )
        if missing := report["missing_keys"]:  # transformers would initialise them at random
            first = min(missing)
            raise BatchdecodeError(f"{len(missing)} weights are missing, such as {first}")
        model = _moved(model.eval().requires_grad_(requires_grad=False), settings.device)
        tokenizer = None
        if not is_folder or any((Path(source) / name).is_file() for name in _TOKENIZERS):
            tokenizer = as_tokenizer(AutoTokenizer.from_pretrained(source, **given))
        config = model.config.get_text_config()
        ends = getattr(model.generation_config, "eos_token_id", None)
        ends = getattr(config, "eos_token_id", None) if ends is None else ends
        ends = [] if ends is None else ends if isinstance(ends, list) else [ends]
        if not all(isinstance(end, int) for end in ends):
            raise BatchdecodeError(f"eos_token_id is {ends}, not token ids")
        context = getattr(config, "max_position_embeddings", None) or MAX_CONTEXT
        sizes = Sizes(
            config.vocab_size, context, tuple(end for end in ends if end < config.vocab_size)
        )
    found = sha256(model.config.to_json_string().encode())
    for name, weight in sorted(model.state_dict().items()):
        begin = weight.flatten()[:_DIGESTED].to("cpu", torch.float64)
        found.update(f"{name} {weight.dtype} {[*weight.shape]}".encode())
        found.update(begin.numpy().tobytes())
    return model, sizes, tokenizer, f"sha256:{found.hexdigest()[:16]}"


def _moved(model: Any, device: str) -> Any:
    """Return `model` on `device`."""
    try:
        return model.to(device)
    except torch.OutOfMemoryError:
        size = sum(weight.numel() * weight.element_size() for weight in model.parameters())
    free = torch.cuda.mem_get_info(device)[0]
    raise BatchdecodeError(
        f"its weights take {size / 2**30:.1f} GiB, and {device} has {free / 2**30:.1f} GiB free: "
        "use a smaller model, or --dtype bfloat16 if it is float32"
    )


@contextmanager
def quietly() -> Iterator[None]:
    """Silence transformers while it loads and first computes."""
    logging = transformers.utils.logging
    verbosity, has_bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if has_bars:
            logging.enable_progress_bar()


@contextmanager
def reading(source: str) -> Iterator[None]:
    """Turn exceptions of transformers into errors of one line."""
    try:
        with calling(source):
            yield
    except BatchdecodeError as error:
        cause = error.__cause__ or error
        said = " ".join(str(cause).split())
        if "trust_remote_code" in said:
            said = "it contains Python code: use --trust-remote-code to run it"
        short = said if len(said) <= _LONGEST else f"{said[:_LONGEST]}..."
        raise BatchdecodeError(f"{source}: it cannot be loaded: {short}") from error
