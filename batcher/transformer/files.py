"""Small files of a checkpoint, and errors that say which file they are about."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import msgspec

from batcher.errors import BatchdecodeError

LFS_POINTER = b"version https://git-lfs.github.com/spec/"
MAX_TEXT = 256 * 2**20  # the largest tokenizer.json has 35 MB
T = TypeVar("T")


@contextmanager
def about(what: Path | str) -> Iterator[None]:
    """Let errors within say that they are about `what`, as a BatchdecodeError."""
    try:
        yield
    except RecursionError:
        raise BatchdecodeError(f"{what}: it is nested too deeply") from None
    except OSError as error:
        raise BatchdecodeError(f"{what}: cannot be read: {error.strerror or error}") from None
    except (BatchdecodeError, msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise BatchdecodeError(f"{what}: {error}") from None


def check_not_pointer(path: Path) -> None:
    """Raise a BatchdecodeError if a file is a pointer of Git LFS, in place of its data."""
    with path.open("rb") as file:
        if file.read(len(LFS_POINTER)) == LFS_POINTER:
            raise BatchdecodeError("it is a pointer of Git LFS, not the data: run `git lfs pull`")


def read_file(path: Path) -> bytes:
    """Return what a file holds, if it is one, and not too large for what it is.

    Raises:
        BatchdecodeError: it is not.
        OSError: it cannot be read.
    """
    if not path.is_file():
        raise BatchdecodeError("there is no such file")
    if path.stat().st_size > MAX_TEXT:
        raise BatchdecodeError(f"it has more than {MAX_TEXT:,} bytes")
    check_not_pointer(path)
    return path.read_bytes()


def read_json(path: Path, kind: type[T]) -> T:
    """Return what a JSON file holds.

    Raises:
        BatchdecodeError: there is no such file, or it is too large.
        MsgspecError: it holds something else.
        OSError: it cannot be read.
    """
    return msgspec.json.decode(read_file(path), type=kind)
