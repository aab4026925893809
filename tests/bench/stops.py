"""Benchmark of the automata: rows a step through the table alone, and the making of lines."""

import statistics
import time
from collections.abc import Iterator
from itertools import cycle, islice
from pathlib import Path

import numpy as np
from report import Row

from batcher import SimulatedModel
from batcher.decoding.stop_matcher import StopMatcher
from batcher.decoding.stops import StopAutomaton, stop_automaton
from batcher.request import Request, Transition

NUM_STEPS = 4000
NUM_REQUESTS = 10_000
NUM_DISTINCT = 1000
TOKENS_EACH = 40
STATES = {
    "*": [Transition("<tool>", "tool")],
    "normal": [Transition(" think", "reasoning")],
    "reasoning": [Transition(" so", "normal")],
    "tool": [Transition("</tool>", None)],
}


def automata() -> dict[str, StopAutomaton]:
    """Automata of three kinds, none of which ends on the tokens of `steps`."""
    requests = {
        "stops of ids": Request(prompt="", stop_sequence=[[7, 8, 600], [5, 600]]),
        "stops of ids and text": Request(prompt="", stop_sequence=[7, 8, 600], stop=" the\0end"),
        "three states": Request(prompt="", states=STATES, stop=" the\0end"),
    }
    return {name: stop_automaton(request, (0,)) for name, request in requests.items()}


def steps(batch_size: int) -> list[np.ndarray]:
    """Tokens [rows] of many steps, EOS not among them."""
    rng = np.random.default_rng(0)
    return [rng.integers(2, 512, batch_size) for _ in range(NUM_STEPS)]


def rate(automaton: StopAutomaton, batch_size: int) -> float:
    """Return tokens per second through the table, its lines made beforehand."""
    table = StopMatcher(batch_size, 512, SimulatedModel().tokenizer)
    batches = steps(batch_size)
    seconds = []
    for _ in range(6):
        for slot in range(batch_size):
            table.close(slot)
            table.open(slot, automaton)
        began = time.process_time()
        for tokens in batches:
            table.advance(tokens)
        seconds.append(time.process_time() - began)
    return NUM_STEPS * batch_size / min(seconds[1:])


def microseconds_per_request(num_distinct: int, batch_size: int = 64) -> float:
    """Return what a request of TOKENS_EACH tokens takes, one in so many with a stop of its own."""
    table = StopMatcher(batch_size, 512, SimulatedModel().tokenizer)
    requests = [Request(prompt="", stop=f" the {number}") for number in range(num_distinct)]
    ahead = islice(cycle(requests), NUM_REQUESTS)
    batches = steps(batch_size)
    began = time.process_time()
    for number, request in enumerate(ahead):
        slot = number % batch_size
        table.close(slot)
        table.open(slot, stop_automaton(request, (0,)))
        if slot == batch_size - 1:
            for tokens in batches[number % 100 :][:TOKENS_EACH]:
                table.advance(tokens)
    return (time.process_time() - began) / NUM_REQUESTS * 1e6


def stops(folder: Path) -> Iterator[Row]:
    """Measure the table alone, and what stops that differ from request to request cost."""
    for name, of_all in automata().items():
        for batch_size in (8, 64, 256):
            figure = f"{rate(of_all, batch_size) / 1e6:.0f}M tokens/s"
            target = ">= 10M tokens/s" if batch_size == 256 else ""
            yield Row(f"{name} through the table alone, B={batch_size}", figure, target)
    same, distinct = (
        statistics.median(microseconds_per_request(number) for _ in range(3))
        for number in (1, NUM_DISTINCT)
    )
    name = f"a request of {TOKENS_EACH} tokens, {NUM_DISTINCT} distinct stops, through the table"
    yield Row(name, f"{distinct:.0f} µs; {same:.0f} µs if all have the same", "")
