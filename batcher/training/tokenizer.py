"""Makes the tokenizer of a model: byte-level BPE (Sennrich et al., 2016), from the corpus."""

from collections.abc import Iterable
from typing import TYPE_CHECKING

from batcher.training.corpus import CorpusPiece

if TYPE_CHECKING:
    from tokenizers import Tokenizer

END_OF_TEXT, END_ID = "<|endoftext|>", 0  # special tokens come first


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> "Tokenizer":
    """Return a tokenizer of at most `vocab_size` tokens: the end of a text, all bytes, and merges.

    Any text can be encoded and comes back as it was; a small corpus makes fewer merges.
    """
    from tokenizers import (  # noqa: PLC0415 - optional
        Tokenizer,
        decoders,
        models,
        pre_tokenizers,
        trainers,
    )

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def encode_pieces(
    tokenizer: "Tokenizer", pieces: Iterable[CorpusPiece], end_id: int
) -> list[list[int]]:
    """Return the token ids of each piece of a text; where the text ends, so says a token."""
    return [
        tokenizer.encode(piece.text, add_special_tokens=False).ids + [end_id] * piece.is_end
        for piece in pieces
    ]
