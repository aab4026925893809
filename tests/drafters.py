"""Drafters for tests, which know what rows are given and are wrong now and then."""

from random import Random

from drafted_trees import lines_of, random_parents, way_to

from batcher.speculation.settings import Proposal, proposal_of


class Oracle:
    """Proposes what rows were given before, with every token wrong by a chance.

    Half of what it proposes are lines, and the others trees of any shape, if it makes any.

    expected: prompts, and what follows each of them in one of its samples.
    """

    def __init__(self, expected, chance, seed, *, makes_trees=True):
        self._makes_trees = makes_trees
        self.known = expected
        self._wholes = [[*prompt, *result.tokens] for prompt, result in expected]
        self._chance, self._random = chance, Random(seed)
        self.rows = {}
        self.num_accepted = 0

    def open(self, slot, tokens):
        assert slot not in self.rows, slot
        self.rows[slot] = [*tokens]

    def extend(self, given):
        assert given.keys() <= self.rows.keys()
        for slot, tokens in given.items():
            assert tokens
            self.num_accepted += len(tokens) - 1
            self.rows[slot] += tokens

    def propose(self, num_wanted):
        return {slot: self._drafts(slot, num) for slot, num in num_wanted.items()}

    def _drafts(self, slot, num):
        row = self.rows[slot]
        wholes = [whole for whole in self._wholes if whole[: len(row)] == row]
        num_drafts = self._random.randint(0, num)
        if not (wholes and num_drafts):
            return Proposal([])
        follows = wholes[0][len(row) :]
        parents = [*range(num_drafts)]
        if self._makes_trees:
            parents = [parent + 1 for parent in random_parents(self._random, num_drafts)]
        depths = map(len, lines_of(Proposal([0] * num_drafts, tuple(parents))))
        tokens = [token for depth in depths for token in follows[depth - 1 : depth]]
        if len(tokens) < num_drafts:  # the row ends before
            return Proposal(follows[:num_drafts])
        right = way_to(self._random.randrange(num_drafts), [p - 1 for p in parents])
        for place in range(num_drafts):
            if self._random.random() < (self._chance if place in right else 0.7):
                tokens[place] = self._random.choice([3, 17, 40, 300, 10**6])
        return proposal_of(tokens, parents)

    def close(self, slot, *, has_ended):
        del self.rows[slot]
