"""What a run learns from: the corpus as token ids, by a tokenizer of its own or a target's."""

from pathlib import Path
from typing import NamedTuple

from batcher.errors import BatchdecodeError
from batcher.foreign import calling
from batcher.training.corpus import CorpusPiece, read_corpus
from batcher.training.settings import TrainingSettings
from batcher.training.tokenizer import END_ID, encode_pieces, train_tokenizer
from batcher.transformer.checkpoint import Checkpoint, open_checkpoint
from batcher.transformer.files import about, read_file
from batcher.transformer.tokenizer_json import TOKENIZER


class Material(NamedTuple):
    """What a run learns from, and is judged by.

    training, held_out: token ids of pieces of texts.  num_held_out_bytes: of their text.
    tokenizer: tokenizer.json.  end_id: the token that ends a text.
    digest: of the corpus.  target: what a draft is to speak like; None for the corpus itself.
    """

    training: list[list[int]]
    held_out: list[list[int]]
    num_held_out_bytes: int
    tokenizer: bytes
    vocab_size: int
    end_id: int
    digest: str
    target: Checkpoint | None


def read_material(path: Path, settings: TrainingSettings, target: Path | None) -> Material:
    """Return a corpus as a run needs it.

    target: a checkpoint, whose tokenizer is taken; None to make one.

    Raises:
        BatchdecodeError: the corpus or the checkpoint cannot be used.
    """
    from tokenizers import Tokenizer  # noqa: PLC0415 - optional

    corpus = read_corpus(path, settings.holdout)
    if target is None:
        texts = (piece.text for piece in corpus.training)
        tokenizer, checkpoint = train_tokenizer(texts, settings.vocab_size), None
        vocab_size, end_id = tokenizer.get_vocab_size(), END_ID
    else:
        checkpoint = open_checkpoint(target)
        with about(target):
            vocab_size, end_id = checkpoint.config.vocab_size, _end_of(checkpoint)
            if not target.is_dir():
                raise BatchdecodeError(f"it is no folder, whose {TOKENIZER} a draft needs, too")
            text = read_file(target / TOKENIZER)
            with calling("its tokenizer cannot be used:"):
                tokenizer = Tokenizer.from_buffer(text)

    def encoded(pieces: list[CorpusPiece]) -> list[list[int]]:
        return encode_pieces(tokenizer, pieces, end_id)

    return Material(
        training=encoded(corpus.training),
        held_out=encoded(corpus.held_out),
        num_held_out_bytes=sum(len(piece.text.encode()) for piece in corpus.held_out),
        tokenizer=tokenizer.to_str().encode(),
        vocab_size=vocab_size,
        end_id=end_id,
        digest=corpus.digest,
        target=checkpoint,
    )


def _end_of(checkpoint: Checkpoint) -> int:
    """Return the token by which a model ends a text."""
    if not checkpoint.config.eos_token_ids:
        raise BatchdecodeError("it has no token that ends a text (eos_token_id)")
    return checkpoint.config.eos_token_ids[0]
