"""Token ids in memory: a list of integers, or, for many, an array of two or four bytes each."""

from array import array
from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    Tokens = list[int] | array[int]
else:  # array is generic only from Python 3.12 on
    Tokens = list[int] | array

NO_TOKENS: Tokens = []
MANY = 4096  # tokens; fewer are a list
_NUM_SHORT = 2**16  # ids that fit into two bytes


def typecode_of(vocab_size: int | None) -> str:
    """Return the type of an array for every id of a vocabulary, or for any id."""
    return "H" if vocab_size is not None and vocab_size <= _NUM_SHORT else "i"


def compact(tokens: Tokens, vocab_size: int | None) -> Tokens:
    """Return many tokens as an array."""
    if isinstance(tokens, array) or len(tokens) <= MANY:
        return tokens
    return array(typecode_of(vocab_size), tokens)


def joined(parts: Iterable[Tokens], vocab_size: int | None) -> Tokens:
    """Return the concatenated tokens of all `parts`, as a new list or array."""
    whole: array[int] = array(typecode_of(vocab_size))
    for part in parts:
        is_alike = isinstance(part, array) and part.typecode == whole.typecode
        whole.extend(part if is_alike else iter(part))
    return whole.tolist() if len(whole) <= MANY else whole
