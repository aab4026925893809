"""Patterns looked for all at once in a stream of ids or bytes, and which of them goes first."""

from collections import deque
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np

from batcher.decoding.machine import NOWHERE, Exit, Pattern
from batcher.models.base import IntArray


class RankedExit(NamedTuple):
    """An exit as it ranks among the others of its state; smaller goes first.

    size: of its pattern, in bytes.
    """

    rank: tuple[int, int, int]
    exit: Exit
    size: int


class Trie:
    """The patterns of one kind, ids or text, of one state, after Aho and Corasick.

    Node 0 is the root, any other is a symbol after its parent's (CACM 18(6), 1975).
    best: the way taken at each node, if a pattern ends there.
    settled: the node that is as good for all that follows; a complete pattern has no node of its
    own unless another one goes on from it.
    """

    __slots__ = ("_begun", "_children", "_fallback", "best", "settled")

    def __init__(self, exits: Iterable[RankedExit]) -> None:
        self._children: list[dict[int, int]] = [{}]
        self._fallback = [0]
        self._begun: list[list[tuple[Pattern, int]]] = [[]]
        self.best: list[RankedExit | None] = [None]
        for way in exits:
            self._insert(way)
        self.settled = [0] * len(self.best)
        queue = deque(self._children[0].values())
        while queue:  # breadth first: the fallback, which is shorter, is complete
            node = queue.popleft()
            fallback = self._fallback[node]
            ends_here = [way for way in (self.best[node], self.best[fallback]) if way is not None]
            self.best[node] = min(ends_here, default=None)
            self.settled[node] = node if self._children[node] else self.settled[fallback]
            for symbol, child in self._children[node].items():
                self._fallback[child] = self.step(fallback, symbol)
                queue.append(child)

    def _insert(self, way: RankedExit) -> None:
        node = 0
        for depth, symbol in enumerate(way.exit.pattern):
            self._begun[node].append((way.exit.pattern, depth))
            if symbol not in self._children[node]:
                self._children[node][symbol] = len(self._children)
                self._children.append({})
                self._fallback.append(0)
                self._begun.append([])
                self.best.append(None)
            node = self._children[node][symbol]
        best = self.best[node]
        if way.exit.target != NOWHERE and (best is None or way < best):
            self.best[node] = way

    def step(self, node: int, symbol: int) -> int:
        """Return the node of the longest suffix that begins a pattern, `symbol` after `node`."""
        children = self._children
        while symbol not in children[node]:
            if not node:
                return 0
            node = self._fallback[node]
        return children[node][symbol]

    def begun(self, node: int) -> Iterator[tuple[Pattern, int]]:
        """Yield the patterns begun at `node`, each with how much of it is there; most first."""
        for suffix in self._suffixes(node):
            yield from self._begun[suffix]

    def own_symbols(self, node: int) -> set[int]:
        """Return the symbols that may lead from `node` to where they do not lead from the root."""
        return {symbol for suffix in self._suffixes(node) for symbol in self._children[suffix]}

    def _suffixes(self, node: int) -> Iterator[int]:
        """Yield `node` and the nodes of its shorter suffixes, longest first, without the root."""
        while node:
            yield node
            node = self._fallback[node]

    @property
    def patterns(self) -> list[Pattern]:
        """All patterns."""
        return [pattern for pattern, _ in self._begun[0]]

    def next_nodes(self) -> IntArray:
        """Return what `step` returns for every node and byte: [nodes, 256], of text only."""
        table = np.zeros((len(self._children), 256), np.int64)
        queue = deque([0])
        while queue:  # breadth first: the line of the fallback, which is shorter, is complete
            node = queue.popleft()
            table[node] = table[self._fallback[node]]
            for byte, child in self._children[node].items():
                table[node, byte] = child
                queue.append(child)
        return table
