"""Writes files so that there is always a whole one: the old, or the new."""

import os
from pathlib import Path

STATE = "training.pt"  # what another process goes on by


def write_whole(path: Path, content: bytes) -> None:
    """Write a file aside, make sure that it is on the disk, and give it its name.

    Whenever the process is killed, or the disk is full, what was there before is there.

    Raises:
        OSError: there is no room, or no permission.
    """
    aside = path.with_name(f"{path.name}.new")
    try:
        with aside.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        aside.replace(path)
    except OSError as error:
        aside.unlink(missing_ok=True)
        raise OSError(error.errno, error.strerror, str(path)) from error
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)  # so that the name is on the disk, too
    finally:
        os.close(folder)
