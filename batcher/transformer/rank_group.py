"""Processes that compute the same thing, each a part of it, and hand each other what is missing.

Parts go through memory that all of them share; a byte through a socket says that a part is there.
Nobody waits in a loop, and nobody waits for one that is gone: its sockets are closed then.
"""

import os
from collections.abc import Iterator, Sequence
from itertools import combinations, product
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnContext
from typing import Any, NamedTuple

import numpy as np

from batcher.transformer.layers import FloatArray

CAPACITY = 2**20  # numbers that are handed over at once
_HALVES = 2

Boundaries = Sequence[int]
"""Where the part of each rank begins, and where the last one ends: [world_size + 1]."""


class PeerGoneError(Exception):
    """Another process of the group has ended."""


class GroupPart(NamedTuple):
    """What one process of a group has of it; it can be handed to a process that starts.

    rank: its number among `world_size`.  memory: of all of them.  peers: a socket to each other.
    """

    rank: int
    world_size: int
    memory: Any
    peers: list[Connection]


class RankGroup:
    """One of the processes of a group, as it sees the others.

    The memory has two halves, which are used in turn: what is in one may be read until all are done
    with the next.

    rank: its number among `world_size`.
    """

    def __init__(self, part: GroupPart) -> None:
        self.rank, self.world_size = part.rank, part.world_size
        self._halves = np.frombuffer(part.memory, np.float32).reshape(_HALVES, -1)
        self._turn = 0
        self._peers = part.peers
        self._sockets = [peer.fileno() for peer in part.peers]

    def own_part(self, boundaries: Boundaries) -> slice:
        """Return the part of this rank."""
        return slice(boundaries[self.rank], boundaries[self.rank + 1])

    def all_gather(self, part: FloatArray, boundaries: Boundaries) -> FloatArray:
        """Return the rows [rows, width] of all ranks, one after the other.

        part: [own rows, width].

        Raises:
            PeerGoneError: one of the others is gone.
        """
        own, last = boundaries[self.rank], boundaries[self.rank + 1]
        whole = np.empty((boundaries[-1], part.shape[1]), np.float32)
        for rows, columns in _pieces(*whole.shape, self._halves.shape[1]):
            piece = whole[rows, columns]
            shared = self._halves[self._turn][: piece.size].reshape(piece.shape)
            self._turn = 1 - self._turn
            first, end = max(own, rows.start), min(last, rows.stop)
            if first < end:
                given = part[first - own : end - own, columns]
                shared[first - rows.start : end - rows.start] = given
            self._meet()
            piece[...] = shared
        return whole

    def _meet(self) -> None:
        """Go on when all the others are here, too."""
        try:
            for socket in self._sockets:
                os.write(socket, b"\0")
            for socket in self._sockets:
                if not os.read(socket, 1):
                    raise PeerGoneError
        except OSError:
            raise PeerGoneError from None

    def close(self) -> None:
        """Leave the group; the others are told when they wait for this one."""
        for peer in self._peers:
            peer.close()


def group_parts(
    context: SpawnContext, world_size: int, capacity: int = CAPACITY
) -> list[GroupPart]:
    """Return the parts of a new group, by rank; so many numbers are handed over at once.

    Its memory has no name: it is gone with the last of the processes, however they end.
    """
    memory = context.RawArray("f", _HALVES * capacity)
    peers: list[list[Connection]] = [[] for _ in range(world_size)]
    for one, other in combinations(range(world_size), 2):
        for rank, end in zip((one, other), context.Pipe(), strict=True):
            peers[rank].append(end)
    return [GroupPart(rank, world_size, memory, peers[rank]) for rank in range(world_size)]


def _pieces(num_rows: int, num_columns: int, capacity: int) -> Iterator[tuple[slice, slice]]:
    """Yield rows and columns of the pieces that fit into so many numbers each."""
    width = min(num_columns, capacity)
    height = capacity // max(width, 1)
    for row, column in product(range(0, num_rows, height), range(0, num_columns, capacity)):
        yield (
            slice(row, min(row + height, num_rows)),
            slice(column, min(column + width, num_columns)),
        )
