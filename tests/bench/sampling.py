"""Benchmark of the samplers: a step of 64 rows, greedy and sampled."""

import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import numpy as np
from report import Row

from batcher import Engine, Request, SimulatedModel
from batcher.decoding.filters import SamplingParams
from batcher.decoding.sampling import Sampler, SamplingRow, row_key

NUM_ROWS = 64
TEMPERATURE, TOP_K, TOP_P = 0.8, 50, 0.9
GREEDY = SamplingParams()
FILTERED = SamplingParams(temperature=TEMPERATURE, top_k=TOP_K, top_p=TOP_P)
FROM_ALL = [
    {},
    {"min_p": 0.05},
    {"top_p": TOP_P},
    {"typical_p": TOP_P},
    {"top_p": TOP_P, "min_p": 0.05, "typical_p": TOP_P},
]


class NoText:
    """A tokenizer without texts."""

    token_bytes: tuple[bytes, ...] = ()

    def encode(self, text: str) -> list[int]:
        raise NotImplementedError


def language_like(vocab_size: int) -> np.ndarray:
    """Logits [rows, vocab] of a few likely tokens and a long tail after Zipf's law."""
    rng = np.random.default_rng(0)
    ranks = np.stack([rng.permutation(vocab_size) for _ in range(NUM_ROWS)]) + 1
    return (-1.2 * np.log(ranks) + rng.normal(0, 0.5, ranks.shape)).astype(np.float32)


def our_step(logits: np.ndarray, params: SamplingParams) -> Callable[[], object]:
    sampler = Sampler(NUM_ROWS, logits.shape[1], NoText())
    for slot in range(NUM_ROWS):
        sampler.open(slot, SamplingRow(params, row_key(0, str(slot), 0), []))
    return lambda: sampler.sample(logits)


class Both(SimulatedModel):
    """The simulated model, which gives logits to those who want them."""


class Tokens(SimulatedModel):
    """The simulated model as it would be if it gave none."""

    gives = "tokens"


def greedy_step(model: SimulatedModel, batch_size: int) -> float:
    """Return the CPU-seconds of a step in which no row needs logits."""
    engine = Engine(model, batch_size)
    for _ in range(batch_size):
        engine.add(Request(prompt=[5], max_tokens=2100, ignore_eos=True, stop_token=3))
    engine.step()
    began = time.process_time()
    for _ in range(2000):
        engine.step()
    return (time.process_time() - began) / 2000


def least(step: Callable[[], object], times: int) -> float:
    """The seconds of the fastest of `times` calls by the wall, since torch has several threads."""
    taken = []
    for _ in range(times):
        began = time.perf_counter()
        step()
        taken.append(time.perf_counter() - began)
    return min(taken)


def bare_step(logits: np.ndarray) -> None:
    """A step of as little numpy as can be: softmax, cumsum, and where a random number falls."""
    rng = np.random.default_rng(0)
    for row in logits:
        scores = (row - row.max()) / TEMPERATURE
        sums = np.exp(scores.astype(np.float64)).cumsum()
        sums.searchsorted(rng.random() * sums[-1])


def cpu_seconds(step: Callable[[], object]) -> float:
    began = time.process_time()
    step()
    return time.process_time() - began


def from_large_vocabularies() -> Iterator[Row]:
    """Measure draws that no top_k narrows, which a real vocabulary makes dear."""
    logits = language_like(49_152)
    for fields in FROM_ALL:
        step = our_step(logits, SamplingParams(temperature=TEMPERATURE, **fields))
        turns = [(cpu_seconds(step), cpu_seconds(partial(bare_step, logits))) for _ in range(10)]
        ours, bare = (least / NUM_ROWS * 1e3 for least in map(min, zip(*turns, strict=True)))
        name = f"a row of {NUM_ROWS}, V=49,152, {', '.join(['temperature', *fields])}"
        yield Row(f"{name}: {ours / bare:.1f}x a bare softmax", f"{ours:.2f} ms", "<= 1 ms")


def sampling(folder: Path) -> Iterator[Row]:
    """Measure a step of the sampler by itself.

    Of each the least of several turns is taken: other work on the machine only ever adds.
    """
    for batch_size in (8, 64, 256):
        turns = [
            (greedy_step(Tokens(), batch_size), greedy_step(Both(), batch_size)) for _ in range(15)
        ]
        tokens, both = map(min, zip(*turns, strict=True))
        name = f"a greedy step, B={batch_size}: {both * 1e6:.2f} µs, against a model without logits"
        yield Row(name, f"{both / tokens:.3f}x", "<= 1.03x")
    logits = language_like(2048)
    for params, name, target in (
        (GREEDY, "greedy", "<= 100 µs"),
        (FILTERED, f"temperature, top_k {TOP_K}, top_p", "<= 400 µs"),
        (SamplingParams(temperature=TEMPERATURE), "temperature alone", "<= 5,000 µs"),
    ):
        step = our_step(logits, params)
        taken = least(step, 400)
        yield Row(f"a step of {NUM_ROWS} rows, V=2,048, {name}", f"{taken * 1e6:.0f} µs", target)
    yield from from_large_vocabularies()
