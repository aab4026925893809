"""Small automata and outputs in which patterns overlap, begin and dissolve all the time."""

import random
from typing import NamedTuple

from batcher.decoding.stops import END, Exit, StopAutomaton

TEXTS = ("a", "b", "ab", "aa", "aab", "abab", "ba", "bb", "é", "aé", "éb", "aba", "bab")


class Pieces:
    """A tokenizer of overlapping pieces."""

    token_bytes = (
        *(b"", b"a", b"b", b"ab", b"\xc3", b"\xa9", b"aab", b"b\xc3", b"\xa9a", b""),
        *(b"a", b"b", b"\xc3", b"\xa9", b""),
    )

    def encode(self, text: str) -> list[int]:
        raise NotImplementedError


PIECES = Pieces()
IDS = [*range(10), 30, 31]  # the last two are not the tokenizer's
LONE = list(range(10, 15))  # ids of single bytes and of nothing, in no pattern
NOTHING = LONE[-1]


def random_exit(draw: random.Random, num_states: int) -> Exit:
    target = draw.choice([END, *range(num_states)])
    if draw.random() < 0.6:
        text = draw.choice(TEXTS)
        return Exit(text.encode(), target, text)
    ids = tuple(draw.choice(IDS) for _ in range(draw.choice([1, 1, 2, 2, 3])))
    if draw.random() < 0.2:
        return Exit(ids[:1], END, None)
    return Exit(ids, target, ids)


def random_automaton(draw: random.Random, num_states: int) -> StopAutomaton:
    """An automaton with named states; one with a single state has stops only, and no names."""
    exits = tuple(
        tuple(random_exit(draw, num_states) for _ in range(draw.randrange(4)))
        for _ in range(num_states)
    )
    if num_states == 1:
        return StopAutomaton((tuple(Exit(way.pattern, END, way.given) for way in exits[0]),))
    return StopAutomaton(exits, tuple("xyz"[:num_states]))


class Case(NamedTuple):
    """An output to be read in an automaton."""

    automaton: StopAutomaton
    tokens: list[int]
    skip: int
    min_tokens: int


def random_case(seed: int) -> Case:
    draw = random.Random(seed)
    return Case(
        random_automaton(draw, draw.choice([1, 1, 2, 3])),
        draw.choices(IDS + LONE, k=draw.randrange(1, 14)),
        draw.choice([0, 0, 0, 1, 2, 4]),
        draw.choice([0, 0, 0, 1, 2, 3, 6]),
    )
