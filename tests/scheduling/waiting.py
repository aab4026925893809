"""Sequences that wait, for the tests of queues and orders."""

from batcher.lifecycle import State
from batcher.scheduling.sequence import Schedulable


def waiting(name, **fields):
    """Return a sequence that waits; one prompt token and one to generate if not told."""
    sequence = pending(name, **fields)
    sequence.state = State.WAITING
    return sequence


def pending(name, **fields):
    """Return the same before it has arrived."""
    fields = {"num_prompt_tokens": 1, "max_tokens": 1, "block_table": [], **fields}
    return Schedulable(id=name, **fields)
