"""What proposes drafts: the tokens that a row may be given next, for the model to verify at once.

A draft decides how many tokens a step gives, and never which (Leviathan et al., "Fast Inference
from Transformers via Speculative Decoding", 2023; Chen et al., 2023); but see
SpeculationSettings.acceptance.
"""

from collections.abc import Mapping, Sequence
from typing import Protocol

from batcher.speculation.proposal import Proposal
from batcher.tokens import Tokens


class Drafter(Protocol):
    """Knows the rows that speculate, by slot, and proposes what each is given next."""

    def open(self, slot: int, tokens: Tokens) -> None:
        """Begin a row that has `tokens`: its prompt, and what it generated before a preemption."""

    def extend(self, given: Mapping[int, Sequence[int]]) -> None:
        """Let rows have been given tokens; slot -> those of one step."""

    def propose(self, num_wanted: Mapping[int, int]) -> dict[int, Proposal]:
        """Return drafts, by slot: as many as are wanted of each, fewer, or none.

        num_wanted: slot -> how many, at least one.
        """

    def close(self, slot: int, *, has_ended: bool) -> None:
        """Forget the row in `slot`; has_ended: whether its output is whole, and not preempted."""
