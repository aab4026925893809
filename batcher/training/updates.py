"""One training step: gradients of a group of batches, and the update of the weights they make.

Weights are float32 whatever the precision: products are computed in another one under autocast
(Micikevicius et al., 2018), and small gradients in fp16 are kept alive by scaling the loss.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

from batcher.training.packing import PackedRows
from batcher.training.settings import Precision

TYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}

LossSum = Callable[[PackedRows], Any]
"""The sum of the losses of all tokens that rows predict, as a tensor."""


def autocast(precision: Precision) -> AbstractContextManager[Any]:
    """Return what products within are computed by in `precision`, of weights in float32."""
    context: AbstractContextManager[Any] = torch.autocast(
        "cpu", TYPES[precision], enabled=precision != "fp32"
    )
    return context


def loss_scaler(precision: Precision) -> Any:
    """Return what multiplies losses, so that gradients in fp16 are not zero; nothing else does.

    Gradients that overflow are no update: the scale is halved for the next step.
    """
    return torch.amp.GradScaler("cpu", enabled=precision == "fp16")


def accumulate_gradients(batches: Sequence[PackedRows], loss_sum: LossSum, scaler: Any) -> float:
    """Add up the gradients of the mean loss of all batches together; return that loss.

    The mean is over tokens, not over batches: the gradients are those of one large batch, though
    the last one may have fewer rows, and rows fewer targets.
    """
    num_targets = sum(batch.num_targets for batch in batches)
    mean = 0.0
    for batch in batches:
        loss = loss_sum(batch) / num_targets
        scaler.scale(loss).backward()
        mean += loss.item()
    return mean


def update(model: nn.Module, optimizer: Any, scaler: Any, max_grad_norm: float) -> None:
    """Change the weights by the gradients there are, whose norm is cut, and forget them."""
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), max_grad_norm)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
