"""Makes the tokenizer that a GGUF file describes in its metadata: byte-level BPE."""

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec import Struct, field

from batcher.errors import BatchdecodeError
from batcher.foreign import calling
from batcher.transformer.chat_template import ChatTemplate
from batcher.transformer.config import TokenId
from batcher.transformer.files import about
from batcher.transformer.tokenizer import TransformerTokenizer, byte_level_bytes, tokenizer_of

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from tokenizers.pre_tokenizers import PreTokenizer

BEGINNING_WITH_BOS = {"llama-bpe"}
UNKNOWN, CONTROL, USER_DEFINED = 2, 3, 4  # of tokenizer.ggml.token_type
_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_LETTERS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_OTHERS = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
QWEN2 = rf"{_CONTRACTIONS}|{_LETTERS}|\p{{N}}|{_OTHERS}"
LLAMA3 = rf"{_CONTRACTIONS}|{_LETTERS}|\p{{N}}{{1,3}}|{_OTHERS}"


class _Fields(Struct):
    """The metadata of a tokenizer."""

    model: str = field(name="tokenizer.ggml.model")
    tokens: list[str] = field(name="tokenizer.ggml.tokens")
    pre: str = field(name="tokenizer.ggml.pre", default="default")
    merges: list[str] = field(name="tokenizer.ggml.merges", default_factory=list)
    token_types: list[int] = field(name="tokenizer.ggml.token_type", default_factory=list)
    bos: TokenId | None = field(name="tokenizer.ggml.bos_token_id", default=None)
    adds_bos: bool | None = field(name="tokenizer.ggml.add_bos_token", default=None)
    eos: TokenId | None = field(name="tokenizer.ggml.eos_token_id", default=None)
    unk: TokenId | None = field(name="tokenizer.ggml.unknown_token_id", default=None)
    pad: TokenId | None = field(name="tokenizer.ggml.padding_token_id", default=None)
    chat_template: str | None = field(name="tokenizer.chat_template", default=None)


def tokenizer_from_gguf(path: Path, metadata: Mapping[str, Any]) -> TransformerTokenizer:
    """Return the tokenizer that the metadata of the file at `path` describes.

    Raises:
        BatchdecodeError: it is not byte-level BPE, splits text in an unknown way, or is damaged.
    """
    with about(path):
        fields = msgspec.convert(metadata, _Fields)
        if fields.model != "gpt2":
            raise BatchdecodeError(
                f"a tokenizer of kind {fields.model!r} is not supported, known: gpt2, which is "
                "byte-level BPE; the folder it was converted from, with its tokenizer.json, may be"
            )
        if fields.pre not in SPLITS:
            raise BatchdecodeError(
                f"tokenizer.ggml.pre {fields.pre!r} is not supported, known: {', '.join(SPLITS)}"
            )
        template = None
        if fields.chat_template is not None:
            template = ChatTemplate(fields.chat_template, _special_texts(fields))
        inner = _byte_pair_encoder(fields)
        return tokenizer_of(inner, byte_level_bytes, _prefix_of(fields), template)


def _prefix_of(fields: _Fields) -> list[int]:
    """Return BOS if texts begin with it; where a file does not say so, llama.cpp knows by kind."""
    begins = fields.pre in BEGINNING_WITH_BOS if fields.adds_bos is None else fields.adds_bos
    return [fields.bos] if begins and fields.bos is not None else []


def _special_texts(fields: _Fields) -> dict[str, str]:
    """Return what a chat template may call by name."""
    ids = {"bos": fields.bos, "eos": fields.eos, "unk": fields.unk, "pad": fields.pad}
    return {
        f"{name}_token": fields.tokens[token_id]
        for name, token_id in ids.items()
        if token_id is not None and token_id < len(fields.tokens)
    }


def _byte_pair_encoder(fields: _Fields) -> "Tokenizer":
    """Return the encoder of these tokens and merges.

    Raises:
        BatchdecodeError: they do not go together.
    """
    from tokenizers import AddedToken, Tokenizer, models, normalizers  # noqa: PLC0415 - optional

    vocabulary = {token: token_id for token_id, token in enumerate(fields.tokens)}
    if len(vocabulary) < len(fields.tokens):
        raise BatchdecodeError("its tokenizer has the same token twice")
    pairs = []
    for merge in fields.merges:
        left, _, right = merge.partition(" ")
        pairs.append((left, right))
    added = [
        AddedToken(token, special=kind != USER_DEFINED, normalized=False)
        for token, kind in zip(fields.tokens, fields.token_types, strict=False)
        if kind in {UNKNOWN, CONTROL, USER_DEFINED}
    ]
    with calling("its tokenizer cannot be used:"):
        encoder = Tokenizer(models.BPE(vocabulary, pairs, ignore_merges=fields.pre == "llama-bpe"))
        encoder.pre_tokenizer = SPLITS[fields.pre]()
        if fields.pre == "qwen2":
            encoder.normalizer = normalizers.NFC()
        encoder.add_tokens(added)
    return encoder


def _gpt2() -> "PreTokenizer":
    from tokenizers.pre_tokenizers import ByteLevel  # noqa: PLC0415 - optional

    return ByteLevel(add_prefix_space=False)


def _smollm() -> "PreTokenizer":
    from tokenizers.pre_tokenizers import Digits, Sequence  # noqa: PLC0415 - optional

    return Sequence([Digits(individual_digits=True), _gpt2()])


def _split_by(regex: str) -> "PreTokenizer":
    from tokenizers import Regex  # noqa: PLC0415 - optional
    from tokenizers.pre_tokenizers import ByteLevel, Sequence, Split  # noqa: PLC0415 - as above

    split = Split(Regex(regex), "isolated")
    return Sequence([split, ByteLevel(add_prefix_space=False, use_regex=False)])


SPLITS: dict[str, Callable[[], "PreTokenizer"]] = {
    "gpt-2": _gpt2,
    "smollm": _smollm,
    "qwen2": partial(_split_by, QWEN2),
    "llama-bpe": partial(_split_by, LLAMA3),
}
"""How a text is cut before tokens are merged, by llama.cpp's names in tokenizer.ggml.pre."""
