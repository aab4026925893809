"""The orders in which the waiting queue is served: each a key, the smallest of which goes first.

Rule: a policy is an ordering of sequences and nothing else; admission and preemption are the same
for all of them.  Ties are broken by who joined the queue first: in order of arrival, then by input
index, then by sample.
"""

import reprlib
from collections.abc import Callable
from math import inf
from operator import attrgetter
from typing import Any

from msgspec import Struct

from batcher.errors import BatchdecodeError
from batcher.foreign import calling, import_object
from batcher.scheduling.sequence import Schedulable

Key = Any
Policy = Callable[[Schedulable], Key]

LONGEST_PREFIX_MATCH = "lpm"  # its key changes with the cache, so the queue asks for it anew


class Candidate(Struct, frozen=True, gc=False):
    """What a policy of one's own is told of a request that waits, to return what sorts it."""

    id: str
    index: int
    arrival_time: float
    prompt_tokens: int
    max_tokens: int
    priority: int
    deadline: float | None
    generated: int


# How many had joined the waiting queue before a sequence first did.
queue_number: Policy = attrgetter("queue_number")


def _size(sequence: Schedulable) -> int:
    return sequence.num_prompt_tokens + sequence.max_tokens


POLICIES: dict[str, Policy] = {
    "fcfs": queue_number,
    "priority": lambda sequence: (sequence.priority, sequence.queue_number),
    "sjf": lambda sequence: (_size(sequence), sequence.queue_number),
    "ljf": lambda sequence: (-_size(sequence), sequence.queue_number),
    "deadline": lambda sequence: (
        inf if sequence.deadline is None else sequence.deadline,
        sequence.queue_number,
    ),
    LONGEST_PREFIX_MATCH: queue_number,
}


def policy_of(name: str) -> Policy:
    """Return the policy called `name`, or the one that `module:function` names.

    Raises:
        BatchdecodeError: there is none.
    """
    if name in POLICIES:
        return POLICIES[name]
    if ":" not in name:
        from difflib import get_close_matches  # noqa: PLC0415 - for a mistake only

        near = get_close_matches(name, POLICIES, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        known = ", ".join(POLICIES)
        raise BatchdecodeError(
            f"unknown policy {name!r}{hint} (known: {known}, or module:function)"
        )
    own_key = import_object(name, "policy", ", ".join(POLICIES))
    if not callable(own_key):
        raise BatchdecodeError(f"the policy {name} is no function, but a {type(own_key).__name__}")
    return _policy_of_ones_own(name, own_key)


def _policy_of_ones_own(name: str, own_key: Callable[[Candidate], Any]) -> Policy:
    """Return a policy that sorts by what `own_key` returns.

    Raises, when it is asked:
        BatchdecodeError: `own_key` raised, or returned what is no number, or tuple of numbers.
    """

    def key(sequence: Schedulable) -> Key:
        candidate = Candidate(
            sequence.id,
            sequence.index,
            sequence.arrival_time,
            sequence.num_prompt_tokens,
            sequence.max_tokens,
            sequence.priority,
            sequence.deadline,
            sequence.num_generated,
        )
        with calling(f"the policy {name} raised"):
            found = own_key(candidate)
        numbers = found if isinstance(found, tuple) else (found,)
        if not all(isinstance(number, int | float) and number == number for number in numbers):  # noqa: PLR0124 - NaN
            shown = reprlib.repr(found)
            raise BatchdecodeError(
                f"the policy {name} returned {shown}, not a number or a tuple of numbers"
            )
        return numbers, sequence.queue_number

    return key
