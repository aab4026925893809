"""Several ranks come to the bits of one, wherever columns are cut, and end together."""

import os
import signal
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from examples import examples
from hypothesis import given
from hypothesis import strategies as st
from processes import are_gone, is_there
from rank_threads import RankThreads, ThreadedDecoder, fail, make_tiny, refuse
from test_drafts import logits_behind_a_tree
from test_transformer_model import KINDS, REQUESTS, run
from tiny import tiny_config, tiny_model

from batcher import BatchdecodeError, ByteTokenizer, Engine, Request
from batcher.errors import InvariantError, LostModelError
from batcher.models.checkpoints import load_transformer
from batcher.models.transformer import TransformerModel
from batcher.transformer.config import TransformerSettings
from batcher.transformer.graph import Graph
from batcher.transformer.ranks import PeerGoneError, RankProcesses
from batcher.transformer.stored import StoredTensor
from batcher.transformer.weights import Weights

TINY = Path(__file__).parents[2] / "samples" / "tiny.gguf"
ODD = {"hidden_size": 47, "num_heads": 3, "num_kv_heads": 1, "intermediate_size": 37}


def drawn(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


@examples(100)
@given(st.integers(1, 4), st.integers(0, 5), st.integers(0, 30), st.integers(1, 40), st.data())
def test_what_is_gathered_are_all_rows(world_size, width, num_rows, capacity, data):
    inner = data.draw(st.lists(st.integers(0, num_rows), min_size=3, max_size=3))
    boundaries = [0, *sorted(inner)[: world_size - 1], num_rows]
    whole = drawn(num_rows, width)
    with RankThreads(world_size, capacity) as ranks:
        for _ in range(2):
            found = ranks.map(
                lambda group: group.all_gather(
                    whole[slice(*boundaries[group.rank :][:2])], boundaries
                )
            )
            assert all(np.array_equal(each, whole) for each in found)


def product_of(kind, weights, x, group=None):
    """Return x times the weights of all names; `weights`: arrays by name."""
    stored = {
        name: StoredTensor("F32", weight.shape, weight.ravel().view(np.uint8))
        for name, weight in weights.items()
    }
    graph = Graph()
    product = Weights(stored, kind, group).product(graph, "x", *weights)
    return graph.compiled(product)(None, x=x)


@examples(60)
@given(
    st.sampled_from(["fp32", "q8"]),
    st.integers(1, 5),
    st.lists(st.integers(1, 90), min_size=1, max_size=3),
    st.integers(1, 70),
    st.integers(1, 40),
)
def test_a_product_of_several_ranks_is_that_of_one(kind, world_size, sizes, num_in, num_rows):
    weights = {str(num): drawn(num_out, num_in, seed=num) for num, num_out in enumerate(sizes)}
    x = drawn(num_rows, num_in, seed=9)
    expected = product_of(kind, weights, x)
    with RankThreads(world_size) as ranks:
        found = ranks.map(lambda group: product_of(kind, weights, x, group))
        assert all(np.array_equal(each, expected) for each in found)


SOME = [REQUESTS[index] for index in (0, 3, 5, -1)]


def as_model(decoder):
    return TransformerModel(decoder, ByteTokenizer(), "tiny", {})


CASES = [
    pytest.param(kind, world_size, marks=() if is_light else pytest.mark.heavy)
    for name, kind in (KINDS | {"odd": ODD, "odd-q8": ODD | {"weights": "q8"}}).items()
    for world_size in (1, 2, 4)
    for is_light in [(name, world_size) in {("plain", 2), ("gemma3", 2), ("odd", 4)}]
]


@pytest.mark.parametrize(("kind", "world_size"), CASES)
def test_tokens_and_log_probabilities_are_those_of_one_process(kind, world_size):
    alone, _ = run(tiny_model(**kind), 4, SOME)
    with RankThreads(world_size) as ranks:
        model = as_model(ThreadedDecoder(ranks, partial(make_tiny, kind)))
        for settings in ({}, {"scarcity": 1.4, "block_size": 4, "max_batch_tokens": 40}):
            found, _ = run(model, 6, SOME, **settings)
            assert found == alone


class EndedProcess:
    """A process that was killed; its files are closed a moment before its end can be asked for."""

    def __init__(self, sentinel):
        self.sentinel, self.exitcode = sentinel, None

    def join(self, timeout=None):
        self.exitcode = -signal.SIGKILL


def test_how_a_rank_ended_is_told_though_its_files_are_closed_before():
    reading, writing = os.pipe()
    os.close(writing)
    ranks = object.__new__(RankProcesses)
    ranks._connections, ranks._processes = [], [EndedProcess(reading)]
    with pytest.raises(LostModelError, match="rank 0 of 1 was killed by signal 9"):
        ranks._find_out()
    os.close(reading)


@pytest.mark.heavy
def test_processes_come_to_the_same_and_one_that_is_killed_ends_all():
    short = [request for request in REQUESTS if len(request.prompt) + request.output_limit <= 128]
    assert any(request.num_beams for request in short)
    alone, _ = run(load_transformer(str(TINY), TransformerSettings()), 4, short)
    read = []
    model = load_transformer(
        str(TINY), TransformerSettings(tensor_parallel=2), lambda *numbers: read.append(numbers)
    )
    assert read[-1] == (19, 21)  # rows of the embedding are read in each step
    assert run(model, 6, short, kv_blocks=60, block_size=4)[0] == alone
    assert run(model.twin(), 4, short)[0] == alone
    whole = load_transformer(str(TINY), TransformerSettings())
    assert (logits_behind_a_tree(model) == logits_behind_a_tree(whole)).all()
    pids = [process.pid for process in model._decoder._processes]
    engine = Engine(model, 2)
    engine.add(Request(prompt=[5], max_tokens=9))
    engine.step()
    os.kill(pids[1], signal.SIGKILL)
    with pytest.raises(LostModelError, match="rank 1 of 2 was killed by signal 9, perhaps out"):
        engine.step()
    assert are_gone(pids)
    with pytest.raises(LostModelError, match="rank 1 of 2 was killed"):
        model.twin()


def test_what_nobody_needs_any_more_ends():
    make = partial(make_tiny, {"weights": "q8"})
    decoder = RankProcesses(tiny_config(), make, 1, lambda *_: None)
    pids = [process.pid for process in decoder._processes]
    assert all(map(is_there, pids))
    del decoder
    assert are_gone(pids)


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (refuse, BatchdecodeError, "^this one is damaged$"),
        (fail, LostModelError, "^a rank raised ZeroDivisionError"),
    ],
)
def test_what_a_rank_raises_is_raised_here(make, error, message):
    with pytest.raises(error, match=message) as caught:
        RankProcesses(tiny_config(), make, 2, lambda *_: None)
    is_bug = error is LostModelError
    assert isinstance(caught.value.__cause__, InvariantError) == is_bug


def test_a_rank_alone_leaves_the_group():
    with RankThreads(2) as ranks:
        first, second = ranks.groups
        second.close()
        with pytest.raises(PeerGoneError):
            first.all_gather(np.zeros((1, 1), np.float32), (0, 1, 1))
