"""Drafters for tests, which know what rows are given and are wrong now and then."""

from collections.abc import Mapping, Sequence
from random import Random

from batcher import Result
from batcher.tokens import Tokens


class Oracle:
    """Proposes what rows were given before, with every token wrong by a chance.

    expected: prompts, and what follows each of them in one of its samples.
    """

    def __init__(self, expected: Sequence[tuple[Tokens, Result]], chance: float, seed: int) -> None:
        self._wholes = [[*prompt, *result.tokens] for prompt, result in expected]
        self._chance, self._random = chance, Random(seed)
        self.rows: dict[int, list[int]] = {}
        self.num_accepted = 0

    def open(self, slot: int, tokens: Tokens) -> None:
        assert slot not in self.rows, slot
        self.rows[slot] = [*tokens]

    def extend(self, given: Mapping[int, Sequence[int]]) -> None:
        assert given.keys() <= self.rows.keys()
        for slot, tokens in given.items():
            assert tokens
            self.num_accepted += len(tokens) - 1
            self.rows[slot] += tokens

    def propose(self, num_wanted: Mapping[int, int]) -> dict[int, list[int]]:
        return {slot: self._draft(slot, num) for slot, num in num_wanted.items()}

    def _draft(self, slot: int, num: int) -> list[int]:
        row = self.rows[slot]
        wholes = [whole for whole in self._wholes if whole[: len(row)] == row]
        if not wholes:
            return []
        draft = wholes[0][len(row) :][: self._random.randint(0, num)]
        for place in range(len(draft)):
            if self._random.random() < self._chance:
                draft[place] = self._random.choice([3, 17, 40, 300, 10**6])
        return draft

    def close(self, slot: int, *, has_ended: bool) -> None:
        del self.rows[slot]
