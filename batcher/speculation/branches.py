"""The likeliest of what may come next, as branches of a tree, where continuations are counted."""

from collections.abc import Callable, Sequence
from heapq import heappop, heappush
from itertools import count
from typing import TypeVar

State = TypeVar("State")
Followers = Callable[[State], Sequence[tuple[float, int, State]]]
"""Return what may follow: how likely, the token, and from where on then; the likeliest first."""


def likeliest_branches(
    start: State, num_branches: int, length: int, followers: Followers[State], least: float = 0.0
) -> list[list[int]]:
    """Return at most so many branches of at most `length` tokens.

    The first is the line of likeliest tokens.  Each other one leaves those before it by the
    likeliest token that they lack, wherever that is, and goes on by likeliest tokens.

    least: how likely all of a branch up to its last token has to be.
    """
    branches: list[list[int]] = []
    order = count()
    left = [(-1.0, next(order), list[int](), start)]
    while left and len(branches) < num_branches:
        unlikely, _, branch, at = heappop(left)
        while len(branch) < length:
            found = [
                (unlikely * share, next(order), [*branch, token], then)
                for share, token, then in followers(at)
                if -unlikely * share >= least
            ]
            if not found:
                break
            (unlikely, _, branch, at), *others = found
            for other in others:
                heappush(left, other)
        if branch:
            branches.append(branch)
    return branches
