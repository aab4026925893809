"""A store for tests, shelf://FOLDER: local files that fsspec reaches, and that can fail.

A command with this file as COMMAND_SETUP has the store.  SHELF_FAULT is `broken` or `hangs`, with
`@NAME` for files of that name only.
"""

import os
import time
from pathlib import Path

from fsspec import register_implementation
from fsspec.implementations.local import LocalFileSystem


class Shelf(LocalFileSystem):
    protocol = ("shelf",)

    @classmethod
    def _strip_protocol(cls, path):
        return super()._strip_protocol(str(path).removeprefix("shelf://").partition("?")[0])

    def put_file(self, lpath, rpath, **_):
        fault, _, name = os.environ.get("SHELF_FAULT", "").partition("@")
        is_faulty = name in {"", Path(rpath).name}
        if is_faulty and fault == "broken":
            raise OSError("503 Service Unavailable at shelf://me:hidden@host/a?signature=hidden")
        if is_faulty and fault == "hangs":
            time.sleep(1000)
        super().put_file(lpath, self._strip_protocol(rpath))


register_implementation("shelf", Shelf, clobber=True)
