"""A tokenizer of transformers as ours, with the bytes of every token and its chat template."""

from typing import Any

from batcher.errors import BatchdecodeError, EncodingError
from batcher.transformer.chat_template import ChatTemplate
from batcher.transformer.tokenizer import TransformerTokenizer, tokenizer_of
from batcher.transformer.tokenizer_json import decoding_of, prefix_of

_DEFAULT = "default"  # of several templates


def as_tokenizer(tokenizer: Any) -> TransformerTokenizer:
    """Return a tokenizer of transformers as ours.

    Raises:
        BatchdecodeError: it is not one of the package `tokenizers`, or of an unknown kind.
    """
    inner = getattr(tokenizer, "backend_tokenizer", None)
    if inner is None:
        raise BatchdecodeError(f"{type(tokenizer).__name__} is not made by `tokenizers`")
    bytes_of = decoding_of(inner.to_str())
    return tokenizer_of(inner, bytes_of, prefix_of(inner), _template_of(tokenizer))


def _template_of(tokenizer: Any) -> ChatTemplate | None:
    """Return the chat template, of several the default one."""
    source = tokenizer.chat_template
    if isinstance(source, dict):
        source = source.get(_DEFAULT)
    return None if source is None else ChatTemplate(source, tokenizer.special_tokens_map)


class NoTokenizer:
    """Stands for the tokenizer of a model that has none: prompts are token ids.

    token_bytes: no token has a text.
    """

    def __init__(self, vocab_size: int) -> None:
        self.token_bytes = [b""] * vocab_size

    def encode(self, _text: str) -> list[int]:
        """Raise an EncodingError, whatever the text."""
        raise EncodingError("invalid-value", "this model has no tokenizer: give token ids")
