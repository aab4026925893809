"""What makes the transformer of a rank: functions that a process imports when it starts."""

from typing import NoReturn

import numpy as np
from tiny import tiny_config
from tiny_checkpoints import random_weights

from batcher import BatchdecodeError
from batcher.transformer.ranks import ColumnParallelLinears, RankGroup
from batcher.transformer.transformer import Transformer, Watch


def make_tiny(
    kind: dict[str, object],
    group: RankGroup,
    watch: Watch | None = None,
) -> Transformer:
    changes = dict(kind)
    weights, is_fast = changes.pop("weights", "fp32"), changes.pop("is_fast", False)
    config = tiny_config(**changes)
    linears = ColumnParallelLinears(weights, group, is_fast=is_fast)
    return Transformer(config, random_weights(config), linears)


def refuse(group: RankGroup, watch: Watch) -> None:
    if group.rank == 1:
        raise BatchdecodeError("this one is damaged")
    group.all_gather(np.zeros((0, 1), np.float32), (0, 0, 0))


def fail(group: RankGroup, watch: Watch) -> NoReturn:
    raise ZeroDivisionError
