"""Policies of your own: run one with `batchdecode run requests.jsonl --policy my_policy:shortest`.

A policy gets a Candidate, which tells of a request that waits, and returns a number or a tuple of
numbers; the smallest goes first.  Of equals, the one that arrived first does.
"""

from batcher.scheduling.queue import Candidate


def shortest(candidate: Candidate) -> int:
    """Prefer short outputs, however long the prompt is."""
    return candidate.max_tokens - candidate.generated


def chats_first(candidate: Candidate) -> tuple[int, float]:
    """Let chats go before all else, and the one whose deadline comes next before other chats."""
    is_chat = candidate.id.startswith("chat-")
    return int(not is_chat), candidate.deadline or 0.0
