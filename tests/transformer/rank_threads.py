"""Ranks as threads of this process, which start at once and are the same but for that."""

from concurrent.futures import ThreadPoolExecutor
from multiprocessing import get_context
from typing import TypeVar

import numpy as np
from tiny import tiny_config
from tiny_checkpoints import random_stored

from batcher import BatchdecodeError
from batcher.transformer.ranks import CAPACITY, rank_groups
from batcher.transformer.transformer import Transformer
from batcher.transformer.weights import Weights

T = TypeVar("T")


class RankThreads:
    """Calls a function in each rank of a group at the same time."""

    def __init__(self, world_size, capacity=CAPACITY):
        self.groups = rank_groups(get_context("spawn"), world_size, capacity)
        self.pool = ThreadPoolExecutor(world_size)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.pool.shutdown()
        for group in self.groups:
            group.close()

    def map(self, function):
        return list(self.pool.map(function, self.groups))


class ThreadedDecoder:
    """A Decoder of ranks that are threads; each must come to the same bits as all others."""

    def __init__(self, ranks, make):
        self.ranks = ranks
        self.transformers = dict(zip(ranks.groups, ranks.map(make), strict=True))
        one = next(iter(self.transformers.values()))
        self.config = one.config
        self.cache_groups, self.cache_size = one.cache_groups, one.cache_size

    def _all(self, function):
        first, *others = self.ranks.map(function)
        assert all((first == other).all() for other in others)
        return first

    def new_store(self):
        return Kept({group: t.new_store() for group, t in self.transformers.items()})

    def new_states(self):
        if self.config.delta_net is None:
            return None
        return Kept({group: t.new_states() for group, t in self.transformers.items()})

    def forward(self, spans, store, states=None):
        def of_rank(group):
            own = [kept if kept is None else kept.parts[group] for kept in (store, states)]
            return self.transformers[group].forward(spans, *own)

        return self._all(of_rank)

    def logits(self, hidden):
        return self._all(lambda group: self.transformers[group].logits(hidden))


class Kept:
    """What is kept in each rank: what is done to it is done there."""

    def __init__(self, parts):
        self.parts = parts
        self.cells = getattr(next(iter(parts.values())), "cells", None)

    def make_room(self, *arguments):
        for part in self.parts.values():
            part.make_room(*arguments)

    def copy(self, *arguments):
        for part in self.parts.values():
            part.copy(*arguments)

    def move(self, moves):
        for part in self.parts.values():
            part.move(moves)


# What makes the transformer of a rank: functions that a process imports when it starts.


def make_tiny(kind, group, watch=None):
    changes = dict(kind)
    kind = changes.pop("weights", "fp32")
    config = tiny_config(**changes)
    return Transformer(config, Weights(random_stored(config), kind, group))


def refuse(group, watch):
    if group.rank == 1:
        raise BatchdecodeError("this one is damaged")
    group.all_gather(np.zeros((0, 1), np.float32), (0, 0, 0))


def fail(group, watch):
    raise ZeroDivisionError
