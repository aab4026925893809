"""Drafts of a row, in a line or in a tree, and what proposes them.

Something cheap proposes the tokens that a row may be given next; the model verifies them in one
step.  Drafts decide how many tokens a step gives, and never which (Leviathan et al. 2023; Chen et
al. 2023); but see SpeculationSettings.acceptance.
"""

from collections.abc import Mapping, Sequence
from typing import Protocol

from msgspec import Struct

from batcher.errors import BatchdecodeError
from batcher.tokens import Tokens


class Proposal(Struct, frozen=True, gc=False):
    """The drafts of a row, numbered from 1; number 0 is the token that it was given last.

    tokens: of each.  parents: for each the number of the one that it follows, which is less than
    its own, so that the first of them are a tree, too; () of a line, in which each follows the one
    before.
    """

    tokens: list[int]
    parents: tuple[int, ...] = ()

    def __len__(self) -> int:
        return len(self.tokens)

    def child(self, number: int, token: int) -> int:
        """Return the draft that follows `number` and is `token`; 0 if there is none."""
        if not self.parents:
            is_next = self.tokens[number : number + 1] == [token]
            return number + 1 if is_next else 0
        for draft, (parent, own) in enumerate(zip(self.parents, self.tokens, strict=True), 1):
            if parent == number and own == token:
                return draft
        return 0

    def only(self, drafts: Sequence[int]) -> "Proposal":
        """Return these drafts alone, ascending; with each there is the one that it follows."""
        numbers = {0: 0} | {draft: number for number, draft in enumerate(drafts, 1)}
        parents = self.parents or range(len(self.tokens))
        return proposal_of(
            [self.tokens[draft - 1] for draft in drafts],
            [numbers[parents[draft - 1]] for draft in drafts],
        )


def proposal_of(tokens: list[int], parents: Sequence[int]) -> Proposal:
    """Return the drafts that follow these; a tree without branches is a line."""
    is_line = all(draft == parent for draft, parent in enumerate(parents))
    return Proposal(tokens) if is_line else Proposal(tokens, tuple(parents))


def merged(branches: Sequence[Sequence[int]], number: int) -> Proposal:
    """Return branches as a tree in which what they begin with alike is there once.

    The first drafts of all branches come first, then the second ones, until there are `number`.
    """
    tokens, parents = list[int](), list[int]()
    drafts: dict[tuple[int, int], int] = {}  # (what it follows, token) -> draft
    ends = [0] * len(branches)
    for depth in range(max(map(len, branches), default=0)):
        for place, branch in enumerate(branches):
            if depth >= len(branch):
                continue
            follows = ends[place], branch[depth]
            if follows not in drafts:
                if len(tokens) == number:
                    return proposal_of(tokens, parents)
                tokens.append(branch[depth])
                parents.append(ends[place])
                drafts[follows] = len(tokens)
            ends[place] = drafts[follows]
    return proposal_of(tokens, parents)


class Drafter(Protocol):
    """Knows the rows that speculate, by slot, and proposes their next tokens."""

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
    """A user's drafter, which may propose nonsense.

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
        kept = {}
        for slot, proposal in proposed.items():
            tokens, parents, number = proposal.tokens, proposal.parents, num_wanted[slot]
            if parents and len(parents) != len(tokens):
                raise ValueError(f"{len(tokens)} drafts, and parents of {len(parents)}")
            own = [*map(int, parents[:number])] or range(number)
            for draft, parent in enumerate(own, 1):
                if not 0 <= parent < draft:
                    raise ValueError(
                        f"draft {draft} follows draft {parent}, which is not before it"
                    )
            kept[slot] = proposal_of([*map(int, tokens[:number])], own)
        return kept
