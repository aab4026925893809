"""Writes files of a training so that there is always a whole one: the old, or the new."""

from pathlib import Path

from batcher.whole_files import WholeFile

STATE = "training.pt"  # what another process goes on by


def write_whole(path: Path, content: bytes) -> None:
    """Write a file that is there, on the disk, when this returns; until then the old one is.

    Raises:
        OSError: there is no room, or no permission.
    """
    try:
        with WholeFile(str(path)) as file:
            rest = memoryview(content)
            while rest:
                rest = rest[file.raw.write(rest) :]
            file.put()
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error
