"""What a person names as the source of drafts, and as their shape, read into records."""

import re
from collections.abc import Callable
from typing import NamedTuple

from msgspec import Struct

from batcher.errors import BatchdecodeError
from batcher.hf.settings import is_hf
from batcher.request import MAX_DRAFT_TOKENS
from batcher.speculation.ngram import DEFAULT_LENGTH, MAX_LENGTH
from batcher.transformer.settings import is_checkpoint

FORMS = "ngram, ngram:N, lookup:FILE, suffix, layers:K or a MODEL"
MAX_LAYERS = 10_000  # more than any model has


class NgramDraft(Struct, frozen=True):
    """What followed the last n-gram of a row, of at most `max_length` tokens, before in the row."""

    max_length: int = DEFAULT_LENGTH


class LookupDraft(Struct, frozen=True):
    """What follows the end of a row in the texts of the file at `path`."""

    path: str


class SuffixDraft(Struct, frozen=True):
    """What followed the end of a row most often, in the row and in outputs before it."""


class LayersDraft(Struct, frozen=True):
    """What the first `num_layers` layers of the model itself would give."""

    num_layers: int


class ModelDraft(Struct, frozen=True):
    """What another model gives; name: as --model takes it."""

    name: str


TextDraft = NgramDraft | LookupDraft | SuffixDraft
"""A draft that needs no model: texts are all that it knows."""

Draft = TextDraft | LayersDraft | ModelDraft


class TreeShape(NamedTuple):
    """At most so many branches of drafts, each of at most `depth` tokens."""

    num_branches: int
    depth: int

    @property
    def size(self) -> int:
        """How many drafts there are at most."""
        return self.num_branches * self.depth


LINE = TreeShape(1, MAX_DRAFT_TOKENS)


def parse_tree(text: str) -> TreeShape:
    """Return the shape that `text` names as WxD.

    Raises:
        BatchdecodeError: it names none, or one of more drafts than a row may be given.
    """
    found = re.fullmatch(r"([1-9]\d?)x([1-9]\d?)", text, re.ASCII)
    shape = TreeShape(*map(int, found.groups())) if found else LINE
    if not found or shape.size > MAX_DRAFT_TOKENS:
        raise BatchdecodeError(
            f"--draft-tree {text}: expected WxD, such as 3x4: W branches of D drafts each, at "
            f"most {MAX_DRAFT_TOKENS} together"
        )
    return shape


def parse_draft(text: str) -> Draft:
    """Return the record of what `text` names, in one of FORMS.

    Raises:
        BatchdecodeError: it names nothing that drafts.
    """
    kind, colon, rest = text.partition(":")
    read = READERS.get(kind)
    if read is not None:
        return read(rest if colon else None)
    if kind and (kind == "simulated" or is_checkpoint(text) or is_hf(text) or _is_dotted(rest)):
        return ModelDraft(text)
    from difflib import get_close_matches  # noqa: PLC0415 - for a mistake only

    near = get_close_matches(kind, [*READERS, "simulated", "smollm2"], n=1)
    hint = f"; did you mean {near[0]}?" if near else ""
    raise BatchdecodeError(f"--draft {text!r} is nothing that drafts{hint} (give {FORMS})")


def _is_dotted(name: str) -> bool:
    return all(map(str.isidentifier, name.split(".")))


def _read_ngram(rest: str | None) -> NgramDraft:
    if rest is None:
        return NgramDraft()
    return NgramDraft(_number(rest, MAX_LENGTH, "ngram", "the tokens of its longest n-gram"))


def _read_lookup(rest: str | None) -> LookupDraft:
    if not rest:
        raise BatchdecodeError("--draft lookup:FILE needs the FILE to look drafts up in")
    return LookupDraft(rest)


def _read_suffix(rest: str | None) -> SuffixDraft:
    if rest is not None:
        raise BatchdecodeError(f"--draft suffix takes nothing behind it, not {rest!r}")
    return SuffixDraft()


def _read_layers(rest: str | None) -> LayersDraft:
    return LayersDraft(_number(rest or "", MAX_LAYERS, "layers", "the layers that draft"))


READERS: dict[str, Callable[[str | None], Draft]] = {
    "ngram": _read_ngram,
    "lookup": _read_lookup,
    "suffix": _read_suffix,
    "layers": _read_layers,
}


def _number(text: str, largest: int, kind: str, what: str) -> int:
    """Return a number from 1 on, or raise a BatchdecodeError."""
    is_number = text.isascii() and text.isdigit() and len(text) <= len(str(largest))
    if not (is_number and 1 <= int(text) <= largest):
        raise BatchdecodeError(f"--draft {kind}:{text}: expected {what}, 1 to {largest:,}")
    return int(text)
