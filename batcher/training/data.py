"""Settings, corpus, tokenizer and batches of a training run, and the folder it writes.

Texts are packed into rows of one length, without padding, in another order each epoch. A row may
hold the end of one text and the beginning of the next. No token attends to another text or is
predicted from one.
"""

from collections.abc import Iterable, Sequence
from hashlib import sha256
from math import cos, pi
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

import msgspec
import numpy as np
from msgspec import Meta, Struct
from numpy.typing import NDArray

from batcher.errors import BatchdecodeError
from batcher.foreign import calling
from batcher.models.checkpoints import CONFIG, Checkpoint, open_checkpoint
from batcher.transformer.config import TransformerConfig
from batcher.transformer.stored import ALONE, about, read_file
from batcher.transformer.tokenizer import TOKENIZER
from batcher.whole_files import WholeFile

if TYPE_CHECKING:
    from tokenizers import Tokenizer

# Settings. Together with the corpus and the target they decide every byte of the trained model.

Precision = Literal["fp32", "bf16", "fp16"]
MIN_VOCABULARY = 257  # all bytes, and the end of a text
Size = Annotated[int, Meta(ge=1, le=2**16)]
Count = Annotated[int, Meta(ge=1, le=2**31)]
Seed = Annotated[int, Meta(ge=0, le=2**31 - 1)]


class TrainingSettings(Struct, frozen=True, forbid_unknown_fields=True):
    """Settings of a run; see docs/guide/training.md."""

    vocab_size: Annotated[int, Meta(ge=MIN_VOCABULARY, le=2**16)] = 1024
    num_layers: Annotated[int, Meta(ge=1, le=64)] = 4
    hidden_size: Size = 128
    num_heads: Size = 4
    intermediate_size: Size = 352
    seq_length: Annotated[int, Meta(ge=2, le=2**14)] = 256
    batch_size: Annotated[int, Meta(ge=1, le=2**12)] = 16
    accumulate: Annotated[int, Meta(ge=1, le=2**12)] = 1
    precision: Precision = "fp32"
    steps: Count = 1000
    warmup_steps: Annotated[int, Meta(ge=0, le=2**31)] = 50
    learning_rate: Annotated[float, Meta(gt=0, le=1)] = 3e-3
    weight_decay: Annotated[float, Meta(ge=0, le=1)] = 0.1
    max_grad_norm: Annotated[float, Meta(gt=0, le=1e6)] = 1.0
    holdout: Annotated[float, Meta(gt=0, le=0.5)] = 0.05
    save_every: Count = 100
    seed: Seed = 0

    def __post_init__(self) -> None:
        if self.hidden_size % (2 * self.num_heads):
            raise BatchdecodeError(
                f"hidden_size {self.hidden_size} does not divide into {self.num_heads} heads of an "
                "even size; RoPE rotates pairs"
            )
        if self.warmup_steps >= self.steps:
            raise BatchdecodeError(
                f"warmup_steps {self.warmup_steps} is not below the {self.steps} steps"
            )


STATE = "training.pt"  # to resume from


def write_whole(path: Path, content: bytes) -> None:
    """Replace a file atomically; it is on the disk when this returns."""
    try:
        with WholeFile(str(path)) as file:
            rest = memoryview(content)
            while rest:
                rest = rest[file.raw.write(rest) :]
            file.put()
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error


# -- corpus -------------------------------------------------------------------------------------

MAX_CORPUS = 2**28  # bytes: its tokens are kept in memory


class CorpusPiece(NamedTuple):
    """Some lines of a text; is_end: whether they end it."""

    text: str
    is_end: bool


class Corpus(NamedTuple):
    """Training and held-out texts; digest: identifies the corpus."""

    training: list[CorpusPiece]
    held_out: list[CorpusPiece]
    digest: str


def read_corpus(path: Path, holdout: float) -> Corpus:
    """Return the text of a file, or of all .txt files in a folder.

    holdout: the share of each text, whole lines in its middle, that is held out.
    """
    files = sorted(path.glob("*.txt")) if path.is_dir() else [path]
    if not files:
        raise BatchdecodeError(f"{path} contains no .txt file")
    texts, digest = [], sha256()
    for file in files:
        with about(file):
            text = read_file(file).decode("utf-8-sig")
            if "\0" in text:
                raise BatchdecodeError("it contains NUL and is not text")
        if text.strip():
            texts.append(text)
            digest.update(f"{len(text)} {text}".encode())
    if not texts:
        raise BatchdecodeError(f"{path} is empty")
    if sum(map(len, texts)) > MAX_CORPUS:
        raise BatchdecodeError(f"{path} has more than {MAX_CORPUS:,} characters")
    corpus = Corpus([], [], f"sha256:{digest.hexdigest()[:16]}")
    for text in texts:
        before, middle, after = split_text(text, holdout)
        corpus.training.extend([CorpusPiece(before, is_end=False), CorpusPiece(after, is_end=True)])
        corpus.held_out.append(CorpusPiece(middle, is_end=False))
    return corpus


def split_text(text: str, holdout: float) -> tuple[str, str, str]:
    """Return a text in three parts, of which the second is held out.

    It is in the middle, so that beginnings and ends are trained on, and slightly larger than
    requested; empty if the text is too short.
    """
    begin = text.find("\n", round(len(text) * (1 - holdout) / 2)) + 1
    end = text.find("\n", begin + round(len(text) * holdout)) + 1
    if not (begin and end):
        return text, "", ""
    return text[:begin], text[begin:end], text[end:]


IntArray = NDArray[np.int64]
NO_TARGET = -100  # ignored by cross-entropy in torch


class PackedRows(Struct, frozen=True, eq=False):
    """Rows to train on, all [rows, seq_length]."""

    tokens: IntArray
    targets: IntArray
    documents: IntArray

    @property
    def num_targets(self) -> int:
        return int(np.count_nonzero(self.targets != NO_TARGET))

    def batches(self, batch_size: int) -> "list[PackedRows]":
        cuts = range(batch_size, len(self.tokens), batch_size)
        parts = (np.split(array, cuts) for array in (self.tokens, self.targets, self.documents))
        return [PackedRows(*part) for part in zip(*parts, strict=True)]


class Packing:
    """Concatenated texts, cut into rows."""

    def __init__(self, texts: Sequence[Sequence[int]], seq_length: int) -> None:
        self.num_tokens = sum(map(len, texts))
        self.num_rows = (self.num_tokens - seq_length) // seq_length
        if self.num_rows < 1:
            raise BatchdecodeError(
                f"{self.num_tokens:,} tokens are too few for rows of seq_length {seq_length}: "
                f"use at least {2 * seq_length:,}, or a smaller seq_length"
            )
        self._seq_length = seq_length
        self._steps_of_epoch: tuple[int, list[PackedRows]] | None = None
        self._tokens = np.concatenate([np.asarray(text, np.int64) for text in texts])
        self._documents = np.repeat(np.arange(len(texts)), [len(text) for text in texts])

    def in_order(self) -> PackedRows:
        return self._rows(np.arange(self.num_rows) * self._seq_length)

    def epoch(self, number: int, seed: int) -> PackedRows:
        """Return the rows of an epoch: cut at a random offset, and shuffled."""
        draw = np.random.default_rng([seed, number])
        first = draw.integers(self._seq_length)
        return self._rows(first + draw.permutation(self.num_rows) * self._seq_length)

    def of_step(self, step: int, settings: TrainingSettings) -> list[PackedRows]:
        """Return the batches of a step, from 0, whose gradients make one update.

        A step has `accumulate` batches. The last step of an epoch has the remaining batches, and
        the last batch the remaining rows.
        """
        per_step = settings.batch_size * settings.accumulate
        epoch, place = divmod(step, -(-self.num_rows // per_step))
        if self._steps_of_epoch is None or self._steps_of_epoch[0] != epoch:
            self._steps_of_epoch = epoch, self.epoch(epoch, settings.seed).batches(per_step)
        return self._steps_of_epoch[1][place].batches(settings.batch_size)

    def _rows(self, starts: IntArray) -> PackedRows:
        cells = starts[:, None] + np.arange(self._seq_length)
        tokens, documents = self._tokens[cells], self._documents[cells]
        is_same = self._documents[cells + 1] == documents
        return PackedRows(tokens, np.where(is_same, self._tokens[cells + 1], NO_TARGET), documents)


# -- material -----------------------------------------------------------------------------------


class Material(NamedTuple):
    """The training data of a run.

    training, held_out: token ids of pieces of texts. num_held_out_bytes: of their text.
    tokenizer: tokenizer.json. end_id: the token that ends a text.
    digest: of the corpus. target: the model that a draft imitates, or None.
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
    """Read and encode a corpus, with the target's tokenizer or a new one."""
    from tokenizers import Tokenizer  # noqa: PLC0415 - optional

    corpus = read_corpus(path, settings.holdout)
    if target is None:
        texts = (piece.text for piece in corpus.training)
        tokenizer, checkpoint = train_tokenizer(texts, settings.vocab_size), None
        vocab_size, end_id = tokenizer.get_vocab_size(), END_ID
    else:
        checkpoint = open_checkpoint(target)
        with about(target):
            vocab_size, ends = checkpoint.config.vocab_size, checkpoint.config.eos_token_ids
            if not ends:
                raise BatchdecodeError("it has no token that ends a text (eos_token_id)")
            end_id = ends[0]
            if not target.is_dir():
                raise BatchdecodeError(f"it is not a folder: a draft also needs its {TOKENIZER}")
            text = read_file(target / TOKENIZER)
            with calling("its tokenizer cannot be used:"):
                tokenizer = Tokenizer.from_buffer(text)

    def encoded(pieces: list[CorpusPiece]) -> list[list[int]]:
        return [
            tokenizer.encode(piece.text, add_special_tokens=False).ids + [end_id] * piece.is_end
            for piece in pieces
        ]

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


# The tokenizer: byte-level BPE (Sennrich et al., 2016).

END_OF_TEXT, END_ID = "<|endoftext|>", 0  # special tokens come first


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> "Tokenizer":
    """Return a tokenizer of at most `vocab_size` tokens: end of text, all bytes, and merges."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers  # noqa: PLC0415 - optional

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


def write_model(
    folder: Path, config: TransformerConfig, weights: dict[str, Any], tokenizer: bytes
) -> None:
    """Write config.json, tokenizer.json and, last, model.safetensors."""
    from safetensors.numpy import save  # noqa: PLC0415 - optional

    with np.errstate(over="ignore"):  # checked below
        halves = {name: weight.astype(np.float16) for name, weight in weights.items()}
    for name, weight in halves.items():
        if not np.isfinite(weight).all():
            raise BatchdecodeError(f"{name} has a weight that is too large for float16")
    fields = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "float16",
        "vocab_size": config.vocab_size,
        "num_hidden_layers": config.num_layers,
        "hidden_size": config.hidden_size,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "intermediate_size": config.intermediate_size,
        "max_position_embeddings": config.max_position_embeddings,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope.theta,
        "hidden_act": "silu",
        "tie_word_embeddings": config.ties_embeddings,
        "bos_token_id": None,
        "eos_token_id": config.eos_token_ids[0],
    }  # names of transformers
    encoded = msgspec.json.format(msgspec.json.encode(fields), indent=2)
    write_whole(folder / CONFIG, encoded + b"\n")
    write_whole(folder / TOKENIZER, tokenizer)
    write_whole(folder / ALONE, save(halves, {"format": "pt"}))


def learning_rate(step: int, settings: TrainingSettings) -> float:
    """Return the learning rate of a step, from 0 (Loshchilov and Hutter, 2017).

    It is never 0: the first step has a part of the warm-up, the last one of the cosine.
    """
    warmup = settings.warmup_steps
    if step < warmup:
        return settings.learning_rate * (step + 1) / (warmup + 1)
    progress = (step - warmup) / (settings.steps - warmup)
    return settings.learning_rate * (1 + cos(pi * progress)) / 2


class Evaluation(NamedTuple):
    """The quality of a model on held-out texts, in means over their tokens.

    loss: cross-entropy, in nats.
    divergence: KL(target, draft); acceptance: the sum of min(p, q) over the vocabulary, the
    acceptance rate of drafts at temperature 1 (Leviathan et al., 2023, section 3.2); agreement: how
    often the likeliest token is the same. None without a target.
    """

    loss: float
    divergence: float | None = None
    acceptance: float | None = None
    agreement: float | None = None

    @property
    def objective(self) -> float:
        return self.loss if self.divergence is None else self.divergence


class Losses(NamedTuple):
    """Losses so far; training: of each step. held_out: by number of steps."""

    training: list[float]
    held_out: dict[int, Evaluation]


# The losses of a run as SVG.

WIDTH, HEIGHT, MARGIN = 720, 360, 48
_MAX_POINTS = 600  # of a line: each is a mean of several steps
_TRAINING, _HELD_OUT = "#8da0cb", "#d95f02"


def loss_curve(losses: Losses) -> str:
    """Return the training loss, averaged over a few steps a point, and that of held-out text."""
    size = -(-len(losses.training) // _MAX_POINTS)
    parts = [
        losses.training[start : start + size] for start in range(0, len(losses.training), size)
    ]
    training = [(n * size + len(part), sum(part) / len(part)) for n, part in enumerate(parts)]
    held_out = [(step, found.objective) for step, found in losses.held_out.items()]
    values = [value for _, value in (*training, *held_out)]
    low, high, num_steps = min(values), max(values), len(losses.training)

    def line(points: Sequence[tuple[float, float]], color: str) -> str:
        xs = [MARGIN + (WIDTH - 2 * MARGIN) * step / num_steps for step, _ in points]
        scale = (HEIGHT - 2 * MARGIN) / ((high - low) or 1)
        ys = [MARGIN + scale * (high - loss) for _, loss in points]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in zip(xs, ys, strict=True))
        return f'<polyline fill="none" stroke="{color}" stroke-width="1.5" points="{path}"/>'

    def text(x: int, y: int, words: str, color: str = "#444") -> str:
        return f'<text x="{x}" y="{y}" fill="{color}">{words}</text>'

    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}"'
    picture = [
        f'{head} font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#fff"/>',
        text(4, MARGIN, f"{high:.2f}"),
        text(4, HEIGHT - MARGIN, f"{low:.2f}"),
        text(MARGIN, HEIGHT - MARGIN // 2, "step 0"),
        text(WIDTH - 2 * MARGIN, HEIGHT - MARGIN // 2, f"{num_steps:,}"),
        text(MARGIN, MARGIN // 2, "training loss", _TRAINING),
        text(MARGIN + 100, MARGIN // 2, "held out", _HELD_OUT),
        line(training, _TRAINING),
        line(held_out, _HELD_OUT),
        "</svg>",
    ]
    return "\n".join(picture) + "\n"
