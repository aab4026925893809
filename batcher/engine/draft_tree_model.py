"""Drafts of a second model that are a tree, of which it computes a level after the other."""

from collections.abc import Callable, Container, Iterable, Mapping
from typing import NamedTuple

from batcher.engine.draft_model import DraftingRows
from batcher.errors import InvariantError
from batcher.models.base import Chunk, FloatArray, PagedModel, Pages
from batcher.speculation.proposal import Proposal, proposal_of

BestAfter = Callable[[FloatArray, Mapping[int, list[int]], int], dict[int, list[int]]]
"""Return the best tokens of rows behind some more tokens; see SpeculatingRows."""


class _Branch(NamedTuple):
    """The last draft of a branch, 0 before the first, and all tokens on the way to it."""

    end: int
    way: list[int]


class _Tree:
    """The drafts of a row so far, of `size` and so many levels at most.

    branches: those that go on.
    """

    def __init__(self, size: int, num_levels: int) -> None:
        self._size, self._tokens, self._parents = size, list[int](), list[int]()
        self._num_levels_left = num_levels
        self.branches = [_Branch(0, [])]

    @property
    def proposal(self) -> Proposal:
        """The same as what is proposed."""
        return proposal_of(self._tokens, self._parents)

    def grow(self, best: list[list[int]], last: Container[int]) -> None:
        """Let each branch go on by a level, its best tokens, as far as there is room.

        last: tokens behind which none goes on.
        """
        branches, self.branches = self.branches, []
        for branch, tokens in zip(branches, best, strict=True):
            for token in tokens[: self._size - len(self._tokens)]:
                self._tokens.append(token)
                self._parents.append(branch.end)
                if token not in last:
                    self.branches.append(_Branch(len(self._tokens), [*branch.way, token]))
        self._num_levels_left -= 1
        if len(self._tokens) == self._size or not self._num_levels_left:
            self.branches = []


class DraftTreeModel(DraftingRows):
    """Proposes trees: the best tokens, each of which goes on with the best behind it alone.

    What a row is given first counts most, since all that is deeper counts only if that is right: so
    it is there that a tree has branches.  Tokens are the best by the same
    noise as in a DraftModel, so a tree has the line of that for its first branch.

    Each level is computed together with those before it, as the tree that it is: there are as many
    calls as for a line, of more tokens, of which nothing is kept.

    model: verifies trees.
    """

    def __init__(
        self,
        model: PagedModel,
        num_slots: int,
        pages: Pages,
        best_after: BestAfter,
        eos_token_ids: Iterable[int],
        num_branches: int,
        *,
        shares_cells: bool = False,
    ) -> None:
        super().__init__(model, num_slots, pages, eos_token_ids, shares_cells=shares_cells)
        self._best_after, self._num_branches = best_after, num_branches

    def propose(self, num_wanted: Mapping[int, int]) -> dict[int, Proposal]:
        """Return what the model goes on with, as many tokens as are wanted, by slot."""
        trees = {
            slot: _Tree(num_wanted[slot], -(-num_wanted[slot] // self._num_branches))
            for slot in sorted(num_wanted)
        }
        self._take_over()
        active, num_best = trees, self._num_branches
        while active:
            logits, firsts = self._compute(active)
            best: dict[int, list[list[int]]] = {slot: [] for slot in active}
            for number in range(max(len(tree.branches) for tree in active.values())):
                some = {
                    slot: tree.branches[number]
                    for slot, tree in active.items()
                    if number < len(tree.branches)
                }
                places = [firsts[slot] + branch.end for slot, branch in some.items()]
                ways = {slot: branch.way for slot, branch in some.items()}
                for slot, tokens in self._best_after(logits[places], ways, num_best).items():
                    best[slot].append(tokens)
            for slot, tree in active.items():
                tree.grow(best[slot], self._eos_token_ids)
                if not tree.branches:
                    self._stand_still(slot)
            active, num_best = {slot: tree for slot, tree in active.items() if tree.branches}, 1
        return {slot: tree.proposal for slot, tree in trees.items()}

    def _compute(self, trees: Mapping[int, _Tree]) -> tuple[FloatArray, dict[int, int]]:
        """Compute rows with the drafts that they have so far: all have some, or none has any.

        Returns logits, and where in these the one before the first draft of each row would stand:
        that after a draft stands as many places behind it as its number says.
        """
        firsts: dict[int, int] = {}
        num_logits = 0
        for slot, tree in trees.items():
            row, drafts = self._rows[slot], tree.proposal
            start = len(row) - 1 if drafts else self._start(slot)
            self._batch.join(
                Chunk(
                    slot,
                    row[start:] + drafts.tokens,
                    start,
                    num_drafts=len(drafts),
                    draft_parents=drafts.parents,
                )
            )
            self._num_computed_tokens[slot] = len(row)
            firsts[slot] = num_logits - bool(drafts)
            num_logits += len(drafts) or 1
        output = self._forward([] if drafts else [*trees])
        logits = output.draft_logits if drafts else output.logits
        if logits is None:
            raise InvariantError(f"{self._model.name} gave no logits")
        return logits, firsts
