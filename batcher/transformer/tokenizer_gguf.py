"""Makes the tokenizer that a GGUF file describes in its metadata.

That is byte-level BPE, or a vocabulary of sentencepiece: there, of the pairs of neighbours that are
a token together the one whose token has the highest score is merged first.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import chain, repeat
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec import Struct, field

from batcher.errors import BatchdecodeError
from batcher.foreign import calling
from batcher.transformer.chat_template import ChatTemplate
from batcher.transformer.config import TokenId
from batcher.transformer.files import about
from batcher.transformer.tokenizer import (
    SPACE,
    TransformerTokenizer,
    byte_level_bytes,
    sentencepiece_bytes,
    tokenizer_of,
)

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from tokenizers.pre_tokenizers import PreTokenizer

BEGINNING_WITH_BOS = {"llama-bpe"}
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6  # of tokenizer.ggml.token_type
GEMMA = "gemma3"
MAX_PIECE = 256  # characters of a token that others are merged to
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
    scores: list[float] = field(name="tokenizer.ggml.scores", default_factory=list)
    adds_space: bool = field(name="tokenizer.ggml.add_space_prefix", default=True)
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
        BatchdecodeError: it is of another kind, splits text in an unknown way, or is damaged.
    """
    with about(path):
        fields = msgspec.convert(metadata, _Fields)
        if fields.model not in BYTES_OF:
            raise BatchdecodeError(
                f"a tokenizer of kind {fields.model!r} is not supported, known: "
                f"{', '.join(BYTES_OF)}; the folder it was converted from, with its "
                "tokenizer.json, may be"
            )
        template = None
        if fields.chat_template is not None:
            template = ChatTemplate(fields.chat_template, _special_texts(fields))
        is_gemma = metadata.get("general.architecture") == GEMMA
        inner = _byte_level(fields) if fields.model == "gpt2" else _sentencepiece(fields, is_gemma)
        return tokenizer_of(inner, BYTES_OF[fields.model], _prefix_of(fields), template)


def _prefix_of(fields: _Fields) -> list[int]:
    """Return BOS if texts begin with it; where a file does not say so, llama.cpp knows by kind."""
    begins = fields.adds_bos
    if begins is None:
        begins = fields.model == "llama" or fields.pre in BEGINNING_WITH_BOS
    return [fields.bos] if begins and fields.bos is not None else []


def _special_texts(fields: _Fields) -> dict[str, str]:
    """Return what a chat template may call by name."""
    ids = {"bos": fields.bos, "eos": fields.eos, "unk": fields.unk, "pad": fields.pad}
    return {
        f"{name}_token": fields.tokens[token_id]
        for name, token_id in ids.items()
        if token_id is not None and token_id < len(fields.tokens)
    }


def _byte_level(fields: _Fields) -> "Tokenizer":
    """Return the encoder of byte-level BPE with these tokens and merges.

    Raises:
        BatchdecodeError: they do not go together, or it is not known how a text is cut.
    """
    from tokenizers import Tokenizer, models, normalizers  # noqa: PLC0415 - optional

    if fields.pre not in SPLITS:
        raise BatchdecodeError(
            f"tokenizer.ggml.pre {fields.pre!r} is not supported, known: {', '.join(SPLITS)}"
        )
    vocabulary = _ids_of(fields.tokens)
    pairs = []
    for merge in fields.merges:
        left, _, right = merge.partition(" ")
        pairs.append((left, right))
    with calling("its tokenizer cannot be used:"):
        encoder = Tokenizer(models.BPE(vocabulary, pairs, ignore_merges=fields.pre == "llama-bpe"))
        encoder.pre_tokenizer = SPLITS[fields.pre]()
        if fields.pre == "qwen2":
            encoder.normalizer = normalizers.NFC()
        _add_whole(encoder, fields, fields.tokens)
    return encoder


def _sentencepiece(fields: _Fields, is_gemma: bool) -> "Tokenizer":  # noqa: FBT001 - reads best
    """Return the encoder of a vocabulary of sentencepiece, which falls back to bytes.

    Gemma's is in the order in which its tokens are merged, whatever their scores are; and it has
    runs of spaces as they are, where others write them as sentencepiece does.

    Raises:
        BatchdecodeError: there is not a score for each token, or a token stands there twice.
    """
    from tokenizers import Tokenizer, models, normalizers  # noqa: PLC0415 - optional

    tokens, ranks = fields.tokens, [-score for score in fields.scores]
    if is_gemma:
        tokens = [SPACE * len(token) if {*token} == {" "} else token for token in tokens]
        ranks = [*range(len(tokens))]
    if len(ranks) != len(tokens):
        raise BatchdecodeError(f"its tokenizer has {len(tokens)} tokens and {len(ranks)} scores")
    vocabulary = _ids_of(tokens)
    unknown = fields.unk is not None and fields.unk < len(tokens)
    steps = [normalizers.Prepend(SPACE)] if fields.adds_space else []
    with calling("its tokenizer cannot be used:"):
        encoder = Tokenizer(
            models.BPE(
                vocabulary,
                _merges_of(tokens, ranks, fields.token_types),
                unk_token=tokens[fields.unk or 0] if unknown else None,
                fuse_unk=True,
                byte_fallback=True,
            )
        )
        encoder.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", SPACE)])
        _add_whole(encoder, fields, tokens)
    return encoder


def _merges_of(
    tokens: list[str], ranks: Sequence[float], token_types: list[int]
) -> list[tuple[str, str]]:
    """Return all pairs of tokens that are one together, those of the lowest rank first.

    Of the pairs that make the same token, the one with the longest first part goes first.
    """
    kinds = chain(token_types, repeat(NORMAL))
    rank_of = {
        token: rank
        for token, rank, kind in zip(tokens, ranks, kinds, strict=False)
        if kind not in {UNKNOWN, CONTROL, BYTE}
    }
    found = [
        (rank, -size, token)
        for token, rank in rank_of.items()
        for size in range(1, len(token) if len(token) <= MAX_PIECE else 0)
        if token[:size] in rank_of and token[size:] in rank_of
    ]
    found.sort(key=itemgetter(0, 1))
    return [(token[:-minus], token[-minus:]) for _, minus, token in found]


def _ids_of(tokens: list[str]) -> dict[str, int]:
    """Return the id of each token.

    Raises:
        BatchdecodeError: one stands there twice.
    """
    vocabulary = {token: token_id for token_id, token in enumerate(tokens)}
    if len(vocabulary) < len(tokens):
        raise BatchdecodeError("its tokenizer has the same token twice")
    return vocabulary


def _add_whole(encoder: "Tokenizer", fields: _Fields, tokens: list[str]) -> None:
    """Let an encoder know the tokens that are found whole in a text.

    tokens: those of `fields`, as the encoder writes them.
    """
    from tokenizers import AddedToken  # noqa: PLC0415 - optional

    encoder.add_tokens(
        [
            AddedToken(token, special=kind != USER_DEFINED, normalized=False)
            for token, given, kind in zip(tokens, fields.tokens, fields.token_types, strict=False)
            if kind in {UNKNOWN, CONTROL, USER_DEFINED} and token == given
        ]
    )


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

BYTES_OF: dict[str, Callable[[str], bytes]] = {
    "gpt2": byte_level_bytes,
    "llama": sentencepiece_bytes,
}
"""What a token stands for, by the kind of tokenizer that tokenizer.ggml.model names."""
