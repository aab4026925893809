"""What a request's output is watched for, stated exactly: its states, and the ways out of them.

A request without states has one, whose every way out ends generation: those are its stops.
"""

from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

from msgspec import Struct

from batcher.request import Request, Transition
from batcher.requests.stops import ANY_STATE
from batcher.result import StopReason

END = -1  # where a way out leads that ends generation
NOWHERE = -2  # where it leads while the row may not end: it is watched for, and does nothing

Pattern = bytes | tuple[int, ...]


class Exit(Struct, frozen=True):
    """A way out of a state.

    pattern: the text, or the token ids, to be generated in that state.
    target: the index of the state it leads to, END or NOWHERE.
    given: what the request wrote, an id list as a tuple; None for EOS.
    """

    pattern: Pattern
    target: int
    given: int | tuple[int, ...] | str | None

    @property
    def stop_reason(self) -> StopReason:
        """What a result reports if this ended it."""
        return list(self.given) if isinstance(self.given, tuple) else self.given

    @property
    def num_ids(self) -> int:
        """How many ids the pattern counts for in precedence; EOS gives way, as text does."""
        is_text = isinstance(self.pattern, bytes)
        return 0 if is_text or self.given is None else len(self.pattern)


class StopAutomaton(Struct, frozen=True, cache_hash=True):
    """The states of a request, hashable so that equal ones share one table.

    exits: of each state, first the initial one, by precedence (see `precedence`).
    names: what the request calls its states; empty if it names none.
    """

    exits: tuple[tuple[Exit, ...], ...]
    names: tuple[str, ...] = ()

    @property
    def endless(self) -> "StopAutomaton":
        """This automaton while the row may not end.

        It knows the same patterns, so that a stop begun in it can be completed in the other: a
        StopProgress of one is a StopProgress of the other.
        """
        return self._without(lambda way: way.target == END)

    @property
    def until_eos(self) -> "StopAutomaton":
        """This automaton where only EOS ends a row, which had nothing else left."""
        return self._without(lambda way: way.target == END and way.given is not None)

    def _without(self, is_out: Callable[[Exit], bool]) -> "StopAutomaton":
        """Return this automaton with exits that are watched for, and do nothing."""
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
    """How far a row has come in its automaton: all that what it generated means for what follows.

    id_node, text_node: the longest suffix of the ids, and of the text, since the state was entered
    that begins a pattern; a node of a trie (see reader.py).
    skip: how many of the next bytes belong to the prompt; so do tokens with no byte after them.
    """

    state: int = 0
    id_node: int = 0
    text_node: int = 0
    skip: int = 0


def precedence(way: Exit, size: int, place: int) -> tuple[int, int, int]:
    """Return what ranks, ascending, exits whose patterns end at one byte of one token.

    size: of the pattern in bytes; the longest goes first.  place: its own in the exits of its
    state.  An exit that ends at an earlier byte goes before all of them; ids end with their token.
    """
    return -size, -way.num_ids, place


def stop_automaton(request: Request, eos_token_ids: tuple[int, ...]) -> StopAutomaton:
    """Return what the output of a valid `request` is watched for.

    eos_token_ids: any of them is EOS.
    """
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
    return _with_states(request.states, request.initial_state, automaton.exits[0])


@lru_cache(1024)  # so that most equal automata are one, which is faster to look up
def _only_stops(
    token_ids: tuple[int, ...],
    sequences: tuple[tuple[int, ...], ...],
    texts: tuple[str, ...],
    eos_token_ids: tuple[int, ...],
) -> StopAutomaton:
    """Return the automaton of one state that these stops end: its exits are in their order."""
    exits = [Exit((token_id,), END, token_id) for token_id in token_ids]
    exits += [Exit(sequence, END, sequence) for sequence in sequences]
    exits += [Exit(text.encode(), END, text) for text in texts]
    exits += [Exit((token_id,), END, None) for token_id in eos_token_ids]
    return StopAutomaton((tuple(exits),))


def _with_states(
    states: dict[str, list[Transition]], initial_state: str | None, exits: tuple[Exit, ...]
) -> StopAutomaton:
    """Return the automaton of these states, each with `exits`, too; EOS stays last."""
    names = [name for name in states if name != ANY_STATE]
    if initial_state is not None:
        names.sort(key=lambda name: name != initial_state)  # the others stay in order
    numbers: dict[str | None, int] = {None: END} | {name: n for n, name in enumerate(names)}
    general = states.get(ANY_STATE, [])
    stops = tuple(way for way in exits if way.given is not None)
    return StopAutomaton(
        tuple(
            stops
            + tuple(_exit(way, numbers) for way in [*states[name], *general])
            + exits[len(stops) :]
            for name in names
        ),
        tuple(names),
    )


def _exit(transition: Transition, numbers: dict[str | None, int]) -> Exit:
    given = transition.on
    target = numbers[transition.to]
    if isinstance(given, str):
        return Exit(given.encode(), target, given)
    return Exit(tuple(given), target, tuple(given))
