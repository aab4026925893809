"""Restricted YAML for files that people write: scalars, lists and mappings of plain text.

Rule: a loader never meets a custom tag (PyYAML accepts or raises anything there), text that UTF-8
cannot encode, or endless nesting.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from batcher.errors import writable

MAX_DEPTH = 8
MAX_BYTES = 2**20  # of a file: PyYAML takes seconds for that many


def read_text(path: str) -> str:
    """Return the text of a settings file without its byte order mark.

    Raises:
        OSError: it cannot be read.
        ValueError: it is not UTF-8, or larger than a settings file can be.
    """
    with Path(path).open("rb") as file:
        content = file.read(MAX_BYTES + 1)  # a device such as /dev/zero has no end
    if len(content) > MAX_BYTES:
        raise ValueError(f"it is larger than {MAX_BYTES >> 20} MiB, and no file of settings is")
    return content.decode("utf-8-sig")


def plain_events(text: str) -> Iterator[yaml.Event]:
    """Yield the events of `text` up to the first that is not plain.

    Raises:
        yaml.MarkedYAMLError: the text is not YAML, or not plain.
    """
    depth = 0
    for event in yaml.parse(text, Loader=yaml.SafeLoader):
        if isinstance(event, yaml.ScalarEvent | yaml.CollectionStartEvent) and event.tag:
            raise _fault(event, f"no tags like {event.tag.rpartition(':')[2]}, write the value")
        if isinstance(event, yaml.ScalarEvent) and writable(event.value) != event.value:
            raise _fault(event, "a lone surrogate stands for no character")
        depth += isinstance(event, yaml.CollectionStartEvent)
        depth -= isinstance(event, yaml.CollectionEndEvent)
        if depth > MAX_DEPTH:
            raise _fault(event, "nested too deeply")
        yield event


def _fault(event: Any, problem: str) -> yaml.MarkedYAMLError:  # its mark is of either of two types
    return yaml.MarkedYAMLError(problem=problem, problem_mark=event.start_mark)
