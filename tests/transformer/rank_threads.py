"""Ranks as threads of this process, which start at once and are the same but for that."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import get_context
from typing import NoReturn, Self, TypeVar

import numpy as np
from tiny import tiny_config
from tiny_checkpoints import random_weights

from batcher import BatchdecodeError
from batcher.transformer.ranks import CAPACITY, ColumnParallelLinears, RankGroup, rank_groups
from batcher.transformer.transformer import Transformer, Watch

T = TypeVar("T")


class RankThreads:
    """Calls a function in each rank of a group at the same time."""

    def __init__(self, world_size: int, capacity: int = CAPACITY) -> None:
        self.groups = rank_groups(get_context("spawn"), world_size, capacity)
        self.pool = ThreadPoolExecutor(world_size)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.pool.shutdown()
        for group in self.groups:
            group.close()

    def map(self, function: Callable[[RankGroup], T]) -> list[T]:
        return list(self.pool.map(function, self.groups))


class ThreadedDecoder:
    """A Decoder of ranks that are threads; each must come to the same bits as all others."""

    def __init__(self, ranks: RankThreads, make: Callable[[RankGroup], object]) -> None:
        self.ranks = ranks
        self.transformers = dict(zip(ranks.groups, ranks.map(make), strict=True))
        one = next(iter(self.transformers.values()))
        self.config = one.config
        self.cache_groups, self.cache_size = one.cache_groups, one.cache_size

    def _all(self, function):
        first, *others = self.ranks.map(function)
        assert all((first == other).all() for other in others)
        return first

    def new_store(self) -> "Kept":
        return Kept({group: t.new_store() for group, t in self.transformers.items()})

    def new_states(self) -> "Kept | None":
        if self.config.delta_net is None:
            return None
        return Kept({group: t.new_states() for group, t in self.transformers.items()})

    def forward(self, spans: Sequence[object], store, states=None):
        def of_rank(group):
            own = [kept if kept is None else kept.parts[group] for kept in (store, states)]
            return self.transformers[group].forward(spans, *own)

        return self._all(of_rank)

    def logits(self, hidden):
        return self._all(lambda group: self.transformers[group].logits(hidden))


class Kept:
    """What is kept in each rank: what is done to it is done there."""

    def __init__(self, parts: dict) -> None:
        self.parts = parts
        self.cells = getattr(next(iter(parts.values())), "cells", None)

    def make_room(self, *arguments: int) -> None:
        for part in self.parts.values():
            part.make_room(*arguments)

    def copy(self, *arguments: int) -> None:
        for part in self.parts.values():
            part.copy(*arguments)

    def move(self, moves: list[tuple[int, int]]) -> None:
        for part in self.parts.values():
            part.move(moves)


# What makes the transformer of a rank: functions that a process imports when it starts.


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
