"""Reads a corpus: texts, of each of which a piece is held out to judge the model by."""

from hashlib import sha256
from pathlib import Path
from typing import NamedTuple

from batcher.errors import BatchdecodeError
from batcher.transformer.files import about, read_file

MAX_CORPUS = 2**28  # bytes: its tokens are kept in memory


class CorpusPiece(NamedTuple):
    """Some lines of a text; is_end: whether the text ends with them."""

    text: str
    is_end: bool


class Corpus(NamedTuple):
    """What is trained on, and what is not; digest: tells this corpus from others."""

    training: list[CorpusPiece]
    held_out: list[CorpusPiece]
    digest: str


def read_corpus(path: Path, holdout: float) -> Corpus:
    """Return the text of a file, or the texts of all files in a folder that end in .txt.

    holdout: the share of each text, of whole lines in its middle, that is held out.

    Raises:
        BatchdecodeError: there is none, it is no text in UTF-8, or too large.
    """
    texts = [text for file in _files_of(path) if (text := _read(file)).strip()]
    if not texts:
        raise BatchdecodeError(f"{path}: it is empty")
    if sum(map(len, texts)) > MAX_CORPUS:
        raise BatchdecodeError(f"{path}: it has more than {MAX_CORPUS:,} characters")
    corpus = Corpus([], [], _digest_of(texts))
    for text in texts:
        before, middle, after = split_text(text, holdout)
        corpus.training.extend([CorpusPiece(before, is_end=False), CorpusPiece(after, is_end=True)])
        corpus.held_out.append(CorpusPiece(middle, is_end=False))
    return corpus


def split_text(text: str, holdout: float) -> tuple[str, str, str]:
    """Return a text in three: what comes before the lines that are held out, they, and the rest.

    They are in the middle, so that beginnings and ends are learnt, and a little more than was asked
    for; none of a text that is too short for it.
    """
    begin = text.find("\n", round(len(text) * (1 - holdout) / 2)) + 1
    end = text.find("\n", begin + round(len(text) * holdout)) + 1
    if not (begin and end):
        return text, "", ""
    return text[:begin], text[begin:end], text[end:]


def _files_of(path: Path) -> list[Path]:
    """Return the files of a corpus, in the order of their names."""
    if not path.is_dir():
        return [path]
    files = sorted(path.glob("*.txt"))
    if not files:
        raise BatchdecodeError(f"{path}: there is no file in it that ends in .txt")
    return files


def _read(path: Path) -> str:
    with about(path):
        text = read_file(path).decode("utf-8-sig")
        if "\0" in text:
            raise BatchdecodeError("it holds NUL: it is no text")
        return text


def _digest_of(texts: list[str]) -> str:
    found = sha256()
    for text in texts:
        found.update(f"{len(text)} {text}".encode())
    return f"sha256:{found.hexdigest()[:16]}"
