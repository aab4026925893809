"""A store for tests, shelf://FOLDER: files of this machine that fsspec reaches, and that can fail.

A command whose COMMAND_SETUP it is has that store, adds parts of results often, and tries again
soon; as a program it is such a command.  SHELF_FAULTS names a file that holds a fault: `kind`,
`kind@NAME` for files of that name, or `kind N` for the next N that are put there.  SHELF_LOG names
one that takes the name of each.
"""

import errno
import os
import time
from pathlib import Path

from fsspec import register_implementation
from fsspec.implementations.local import LocalFileSystem

from cli.main import main
from cli.run import stored_results, urls


class Shelf(LocalFileSystem):
    protocol = ("shelf",)

    @classmethod
    def _strip_protocol(cls, path):
        return super()._strip_protocol(str(path).removeprefix("shelf://").partition("?")[0])

    def put_file(self, lpath, rpath, **_):
        _note(rpath)
        fault = _next_fault(Path(rpath).name)
        if fault == "denied":
            raise PermissionError("Access Denied")
        if fault == "gone":
            raise FileNotFoundError("The specified bucket does not exist")
        if fault == "full":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        if fault == "broken":
            raise OSError("503 Service Unavailable at shelf://me:hidden@host/a?signature=hidden")
        if fault == "hangs":
            time.sleep(1000)
        content = Path(lpath).read_bytes()
        kept = content[: len(content) // 2] if fault == "torn" else content
        self._write(rpath, kept)

    def _write(self, path, content):
        new = Path(self._strip_protocol(path))
        new.parent.mkdir(parents=True, exist_ok=True)
        new.with_name(f"{new.name}.new~").write_bytes(content)
        new.with_name(f"{new.name}.new~").replace(new)  # as a store does: whole, or not at all


def _note(path):
    if log := os.environ.get("SHELF_LOG"):
        with Path(log).open("a") as file:
            file.write(f"{Path(path).name}\n")


def _next_fault(name):
    path = Path(os.environ.get("SHELF_FAULTS", "/nonexistent"))
    if not path.exists() or not (text := path.read_text().strip()):
        return None
    kind, _, number = text.partition(" ")
    kind, _, only = kind.partition("@")
    if only not in {"", name}:
        return None
    if number:
        path.write_text(f"{kind} {int(number) - 1}" if int(number) > 1 else "")
    return kind


register_implementation("shelf", Shelf, clobber=True)
stored_results.PART_SECONDS, stored_results.LOOK_SECONDS, urls.FIRST_WAIT = 0.05, 0.02, 0.01

if __name__ == "__main__":
    main()
