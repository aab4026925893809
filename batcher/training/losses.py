"""What a run tells of itself: how well the model learns, and how good it is on other texts."""

from typing import NamedTuple


class Evaluation(NamedTuple):
    """How good a model is on texts that it has not learnt from, in means over their tokens.

    loss: its cross-entropy, in nats.
    divergence: KL(target, draft); acceptance: the sum of min(p, q) over the vocabulary, by which a
    token drafted at temperature 1 is accepted (Leviathan et al., 2023, section 3.2); agreement: how
    often the likeliest token is the same.  None where there is no target.
    """

    loss: float
    divergence: float | None = None
    acceptance: float | None = None
    agreement: float | None = None

    @property
    def objective(self) -> float:
        """What training makes less: the loss, or the divergence from a target."""
        return self.loss if self.divergence is None else self.divergence


class Losses(NamedTuple):
    """What a run has told so far; training: of each step.  held_out: after so many steps."""

    training: list[float]
    held_out: dict[int, Evaluation]
