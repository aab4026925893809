"""What proposes drafts: the tokens that a row may be given next, for the model to verify at once.

A draft decides how many tokens a step gives, and never which (Leviathan et al., "Fast Inference
from Transformers via Speculative Decoding", 2023; Chen et al., 2023); but see
SpeculationSettings.acceptance.
"""

from collections.abc import Mapping, Sequence
from typing import Protocol

from batcher.errors import BatchdecodeError
from batcher.speculation.proposal import Proposal, first_of
from batcher.tokens import Tokens


class Drafter(Protocol):
    """Knows the rows that speculate, by slot, and proposes what each is given next."""

    def open(self, slot: int, tokens: Tokens) -> None:
        """Begin a row that has `tokens`: its prompt, and what it generated before a preemption."""

    def extend(self, given: Mapping[int, Sequence[int]]) -> None:
        """Let rows have been given tokens; slot -> those of one step."""

    def propose(self, num_wanted: Mapping[int, int]) -> dict[int, Proposal]:
        """Return drafts, by slot: as many as are wanted of each, fewer, or none.

        num_wanted: slot -> how many, at least one.  Of a tree of so many branches, each reaches as
        deep at most as it does where all have an equal share, rounded up.
        """

    def close(self, slot: int, *, has_ended: bool) -> None:
        """Forget the row in `slot`; has_ended: whether its output is whole, and not preempted."""


class CheckedDrafter:
    """A drafter of somebody else's, which may propose nonsense.

    takes_trees: whether the model verifies trees.
    """

    def __init__(self, drafter: Drafter, *, takes_trees: bool) -> None:
        self._drafter, self._takes_trees = drafter, takes_trees
        self.open, self.extend, self.close = drafter.open, drafter.extend, drafter.close

    def propose(self, num_wanted: Mapping[int, int]) -> dict[int, Proposal]:
        """Return as much of what is proposed as is wanted.

        Raises:
            BatchdecodeError: it is a tree, and the model does not verify trees.
            ValueError: it is neither a line nor a tree.
        """
        proposed = self._drafter.propose(num_wanted)
        if not self._takes_trees and any(proposal.parents for proposal in proposed.values()):
            raise BatchdecodeError("drafts in a tree, for a model that does not verify trees")
        return {slot: first_of(proposal, num_wanted[slot]) for slot, proposal in proposed.items()}
