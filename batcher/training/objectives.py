"""What a model learns: the tokens of a corpus, or what a larger model says of them."""

from typing import Any, Protocol

import torch
from torch import nn
from torch.nn import functional

from batcher.training.losses import Evaluation
from batcher.training.packing import NO_TARGET, PackedRows
from batcher.training.settings import Precision
from batcher.training.updates import autocast


class Objective(Protocol):
    """What a model learns."""

    def loss_sum(self, rows: PackedRows) -> Any:
        """Return the sum of the losses of all tokens that `rows` predict, as a tensor."""

    def evaluate(self, batches: list[PackedRows]) -> Evaluation:
        """Return how good the model is on other rows."""


def log_probabilities(model: nn.Module, rows: PackedRows) -> Any:
    """Return what a model says of each token that is predicted: [targets, vocab] float32."""
    is_target = torch.from_numpy(rows.targets != NO_TARGET)
    logits = model(torch.from_numpy(rows.tokens), torch.from_numpy(rows.documents))
    return logits[is_target].float().log_softmax(dim=-1)


def targets_of(rows: PackedRows) -> Any:
    """Return the tokens that are predicted: [targets]."""
    return torch.from_numpy(rows.targets[rows.targets != NO_TARGET])


class NextToken:
    """The model learns the tokens of the corpus: cross-entropy."""

    def __init__(self, model: nn.Module, precision: Precision) -> None:
        self._model, self._precision = model, precision

    def loss_sum(self, rows: PackedRows) -> Any:
        """Return the sum of the cross-entropies."""
        with autocast(self._precision):
            said = log_probabilities(self._model, rows)
        return functional.nll_loss(said, targets_of(rows), reduction="sum")

    @torch.no_grad()
    def evaluate(self, batches: list[PackedRows]) -> Evaluation:
        """Return the mean cross-entropy, whatever the precision in float32."""
        sums = [
            functional.nll_loss(
                log_probabilities(self._model, rows), targets_of(rows), reduction="sum"
            ).item()
            for rows in batches
        ]
        return Evaluation(sum(sums) / sum(rows.num_targets for rows in batches))


class Distillation:
    """The model learns what another one says of the next token (Hinton et al., 2015), all of it.

    The loss is the forward KL divergence from the target's distribution to the draft's, which
    wants the draft to miss nothing that the target may say.
    """

    def __init__(self, draft: nn.Module, target: nn.Module, precision: Precision) -> None:
        self._draft, self._target, self._precision = draft, target, precision

    def loss_sum(self, rows: PackedRows) -> Any:
        """Return the sum of the divergences."""
        with autocast(self._precision):
            with torch.no_grad():
                wanted = log_probabilities(self._target, rows)
            said = log_probabilities(self._draft, rows)
        return functional.kl_div(said, wanted, reduction="sum", log_target=True)

    @torch.no_grad()
    def evaluate(self, batches: list[PackedRows]) -> Evaluation:
        """Return the draft's loss, and how well it says what the target says."""
        sums = torch.zeros(4, dtype=torch.float64)
        for rows in batches:
            said, wanted = (log_probabilities(model, rows) for model in (self._draft, self._target))
            sums += torch.stack(
                [
                    functional.nll_loss(said, targets_of(rows), reduction="sum"),
                    functional.kl_div(said, wanted, reduction="sum", log_target=True),
                    torch.minimum(said, wanted).exp().sum(),
                    (said.argmax(-1) == wanted.argmax(-1)).sum(),
                ]
            )
        return Evaluation(*(sums / sum(rows.num_targets for rows in batches)).tolist())
