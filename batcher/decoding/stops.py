"""Stops and states of a request as an automaton, and the exact rule by which it reads tokens.

A request without states has one state, all of whose exits end generation: its stops.

Text is matched byte by byte inside a token, so one token may pass through several states; ids match
at the end of a token. After a match the matching restarts, for ids with the next token.
stop_matcher.py repeats this rule in a table for all rows.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from msgspec import Struct

from batcher.models.base import IntArray, bytes_of, join_bytes
from batcher.request import Request
from batcher.requests.validation import ANY_STATE
from batcher.result import StopReason

END = -1  # target of an exit that ends generation
NO_ID = -1  # a token in no pattern
NOWHERE = -2  # target of an exit while the row may not end: matched without effect

Pattern = bytes | tuple[int, ...]


class Exit(Struct, frozen=True):
    """An exit of a state.

    pattern: the text, or the token ids, to be generated in that state.
    target: the index of the next state, END or NOWHERE.
    given: as written in the request, an id list as a tuple; None for EOS.
    """

    pattern: Pattern
    target: int
    given: int | tuple[int, ...] | str | None

    @property
    def stop_reason(self) -> StopReason:
        return list(self.given) if isinstance(self.given, tuple) else self.given


class StopAutomaton(Struct, frozen=True, cache_hash=True):
    """The states of a request, hashable so that equal ones share one table.

    exits: of each state, the initial one first, by precedence (see `precedence`).
    names: of the states in the request; otherwise empty.
    """

    exits: tuple[tuple[Exit, ...], ...]
    names: tuple[str, ...] = ()

    @property
    def endless(self) -> "StopAutomaton":
        """This automaton while the row may not end.

        It has the same patterns and so the same StopProgress: a stop begun in one can complete in
        the other.
        """
        return self._without(lambda way: way.target == END)

    @property
    def until_eos(self) -> "StopAutomaton":
        return self._without(lambda way: way.target == END and way.given is not None)

    def _without(self, is_out: Callable[[Exit], bool]) -> "StopAutomaton":
        return StopAutomaton(
            tuple(
                tuple(
                    Exit(way.pattern, NOWHERE, way.given) if is_out(way) else way for way in exits
                )
                for exits in self.exits
            ),
            self.names,
        )


class StopProgress(NamedTuple):
    """The progress of a row in its automaton: all of its past that matters.

    id_node, text_node: the longest suffix, since the state was entered, that begins a pattern; a
    node of a trie.
    skip: how many of the next bytes belong to the prompt, with tokens that have no byte after them.
    """

    state: int = 0
    id_node: int = 0
    text_node: int = 0
    skip: int = 0


def precedence(way: Exit, size: int, place: int) -> tuple[int, int, int]:
    """Return the rank, ascending, of exits whose patterns end at the same byte of a token.

    size: of the pattern in bytes; the longest goes first. place: its index in the exits of its
    state. An exit that ends at an earlier byte goes first; ids end with their token.
    """
    is_text = isinstance(way.pattern, bytes)
    # EOS ranks last, as text does
    num_ids = 0 if is_text or way.given is None else len(way.pattern)
    return -size, -num_ids, place


def stop_automaton(request: Request, eos_token_ids: tuple[int, ...]) -> StopAutomaton:
    """Return the automaton of a valid `request`; EOS is any of the ids."""
    token, sequence, text = request.stop_token, request.stop_sequence, request.stop
    ends = () if request.ignore_eos else eos_token_ids
    if token is None and sequence is None and text is None and request.states is None:
        return _only_stops((), (), (), ends)
    token_ids: tuple[int, ...] = ()
    if token is not None:
        token_ids = (token,) if isinstance(token, int) else tuple(token)
    patterns: list[Any] = []
    if sequence:  # in any of its four forms
        is_one = isinstance(sequence, str) or isinstance(sequence[0], int)
        patterns = [sequence] if is_one else [*sequence]
    if text is not None:
        patterns += [text] if isinstance(text, str) else text
    sequences, texts = [], []
    for pattern in patterns:
        if isinstance(pattern, str):
            texts.append(pattern)
        else:
            sequences.append(tuple(pattern))
    automaton = _only_stops(token_ids, tuple(sequences), tuple(texts), ends)
    if request.states is None:
        return automaton
    states, initial_state, exits = request.states, request.initial_state, automaton.exits[0]
    names = [name for name in states if name != ANY_STATE]
    if initial_state is not None:
        names.sort(key=lambda name: name != initial_state)  # the others stay in order
    numbers: dict[str | None, int] = {None: END} | {name: n for n, name in enumerate(names)}
    general = states.get(ANY_STATE, [])
    stops = tuple(way for way in exits if way.given is not None)
    return StopAutomaton(
        tuple(
            stops
            + tuple(
                Exit(way.on.encode(), numbers[way.to], way.on)
                if isinstance(way.on, str)
                else Exit(tuple(way.on), numbers[way.to], tuple(way.on))
                for way in [*states[name], *general]
            )
            + exits[len(stops) :]
            for name in names
        ),
        tuple(names),
    )


@lru_cache(1024)  # so that most equal automata are one, which is faster to look up
def _only_stops(
    token_ids: tuple[int, ...],
    sequences: tuple[tuple[int, ...], ...],
    texts: tuple[str, ...],
    eos_token_ids: tuple[int, ...],
) -> StopAutomaton:
    exits = [Exit((token_id,), END, token_id) for token_id in token_ids]
    exits += [Exit(sequence, END, sequence) for sequence in sequences]
    exits += [Exit(text.encode(), END, text) for text in texts]
    exits += [Exit((token_id,), END, None) for token_id in eos_token_ids]
    return StopAutomaton((tuple(exits),))


class Match(NamedTuple):
    """An exit that a token completed; end: how many bytes of the token were needed."""

    exit: Exit
    end: int
    size: int


class StopReading(NamedTuple):
    """The result of a token: the `matches`, in order, and the `progress`, None at the end."""

    progress: StopProgress | None
    matches: list[Match]


class RankedExit(NamedTuple):
    """An exit and its rank in its state, smaller first; size: of its pattern, in bytes."""

    rank: tuple[int, int, int]
    exit: Exit
    size: int


class Trie:
    """The patterns of one kind, ids or text, of one state (Aho and Corasick, CACM 18(6), 1975).

    Node 0 is the root; any other is a symbol after its parent's.
    best: the exit taken at each node, if a pattern ends there.
    settled: the node that is equivalent for all that follows; a complete pattern has no node of its
    own unless another one extends it.
    """

    __slots__ = ("_begun", "_children", "_fallback", "best", "settled")

    def __init__(self, exits: Iterable[RankedExit]) -> None:
        self._children: list[dict[int, int]] = [{}]
        self._fallback = [0]
        self._begun: list[list[tuple[Pattern, int]]] = [[]]
        self.best: list[RankedExit | None] = [None]
        for way in exits:
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

    def step(self, node: int, symbol: int) -> int:
        """Return the node of the longest suffix that begins a pattern, `symbol` after `node`."""
        children = self._children
        while symbol not in children[node]:
            if not node:
                return 0
            node = self._fallback[node]
        return children[node][symbol]

    def begun(self, node: int) -> Iterator[tuple[Pattern, int]]:
        """Yield the patterns begun at `node`, each with its matched length; longest first."""
        while node:
            yield from self._begun[node]
            node = self._fallback[node]

    def next_nodes(self) -> IntArray:
        """Return the result of `step` for every node and byte: [nodes, 256]; for text only."""
        table = np.zeros((len(self._children), 256), np.int64)
        queue = deque([0])
        while queue:  # breadth first: the line of the fallback, which is shorter, is complete
            node = queue.popleft()
            table[node] = table[self._fallback[node]]
            for byte, child in self._children[node].items():
                table[node, byte] = child
                queue.append(child)
        return table


class StopReader:
    """An automaton that reads tokens; tries: of each state, (ids, text)."""

    def __init__(self, automaton: StopAutomaton, token_bytes: Sequence[bytes]) -> None:
        self._token_bytes = token_bytes
        self.tries: list[tuple[Trie, Trie]] = []
        for exits in automaton.exits:
            ids, texts = list[RankedExit](), list[RankedExit]()
            for place, way in enumerate(exits):
                pattern, is_text = way.pattern, isinstance(way.pattern, bytes)
                size = len(pattern if is_text else join_bytes(pattern, token_bytes))
                ranked = RankedExit(precedence(way, size, place), way, size)
                (texts if is_text else ids).append(ranked)
            self.tries.append((Trie(ids), Trie(texts)))

    def bytes_of(self, token_id: int) -> bytes:
        return bytes_of(token_id, self._token_bytes)

    def read(self, progress: StopProgress, token_id: int) -> StopReading:
        return self.read_text(progress, token_id, self.bytes_of(token_id))

    def read_text(self, progress: StopProgress, token_id: int, token: bytes) -> StopReading:
        """Return the result of a token with these bytes; token_id: NO_ID if it may be any."""
        state, id_node, text_node, skip = progress
        if skip:
            if len(token) <= skip:  # it is the prompt's
                return StopReading(progress._replace(skip=skip - len(token)), [])
            token, skip = token[skip:], 0
        ids, texts = self.tries[state]
        id_node = ids.step(id_node, token_id)
        by_ids = ids.best[id_node]
        matches: list[Match] = []
        for end, byte in enumerate(token, 1):
            text_node = texts.step(text_node, byte)
            by_text = texts.best[text_node]
            if by_text is None or (by_ids is not None and end == len(token) and by_ids < by_text):
                continue
            matches.append(Match(by_text.exit, end, by_text.size))
            state = by_text.exit.target
            if state == END:
                return StopReading(None, matches)
            (ids, texts), id_node, text_node, by_ids = self.tries[state], 0, 0, None
        if by_ids is not None:
            matches.append(Match(by_ids.exit, len(token), by_ids.size))
            if by_ids.exit.target == END:
                return StopReading(None, matches)
            return StopReading(StopProgress(by_ids.exit.target), matches)
        return StopReading(
            StopProgress(state, ids.settled[id_node], texts.settled[text_node]), matches
        )
