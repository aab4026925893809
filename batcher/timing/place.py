"""Where something stands in a YAML file, as messages have it: the file, the line, and what it is.

Rule: the line is looked for when it is told, since that takes reading the file again.
"""

from typing import Any

import yaml

from batcher.plain_yaml import read_text


class Place:
    """What `keys` lead to in a file: names in mappings, numbers in lists.  As text, a place.

    what: as messages call it.
    """

    def __init__(self, path: str, what: str, *keys: str | int) -> None:
        self._path, self._what, self._keys = path, what, keys

    def __str__(self) -> str:
        line = _line_of(self._path, self._keys)
        where = self._path if line is None else f"{self._path}:{line}"
        return f"{where}: {self._what}"

    def at(self, key: str | int) -> "Place":
        """Return where something within it stands, which is called the same."""
        return Place(self._path, self._what, *self._keys, key)


def _line_of(path: str, keys: tuple[str | int, ...]) -> int | None:
    """Return the line of what `keys` lead to, or of what comes nearest; None if nothing does."""
    try:
        part: Any = yaml.compose(read_text(path), Loader=yaml.SafeLoader)
    except (OSError, ValueError, yaml.YAMLError, RecursionError):  # it was another file before
        return None
    line = None
    for key in keys:
        found = None if part is None else _child(part, key)
        if found is None:
            break
        line, part = found
    return line


def _child(part: Any, key: str | int) -> tuple[int, Any] | None:
    """Return the line of what stands under `key`, and that; None if nothing does."""
    if part.id == "mapping":
        for name, value in part.value:
            if name.value == str(key):
                return name.start_mark.line + 1, value
    elif part.id == "sequence" and isinstance(key, int) and key < len(part.value):
        return part.value[key].start_mark.line + 1, part.value[key]
    return None
