"""What constraints cost: masks of rows under several kinds of them, and compiling one."""

import random
import statistics
import time
from collections.abc import Iterator
from pathlib import Path

from report import Row

from batcher import Engine, Request, SimulatedModel
from batcher.decoding.constraints import (
    ConstraintCompiler,
    RowConstraint,
    allowed_tokens,
)
from batcher.decoding.grammars import ConstraintSource, constraint_source
from batcher.decoding.healing import HealingRow, VocabularyIndex
from batcher.models.tokenizers import EOS_TOKEN_ID, WordTokenizer

SCHEMA = {
    "type": "array",
    "minItems": 50,
    "items": {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 20},
            "age": {"type": "integer", "minimum": 0, "maximum": 120},
            "tags": {"type": "array", "items": {"enum": ["a", "b", "cc"]}, "maxItems": 5},
            "city": {"type": "string", "pattern": "^[A-Z][a-z ]+$"},
        },
        "required": ["name", "age", "tags", "city"],
    },
}
LISP = 'root ::= "(" (" "? root)+ ")" | [a-z]+ | [0-9]+'
CONSTRAINED = {
    "a JSON schema": {"json_schema": SCHEMA},
    "a choice": {"choice": ["The quick brown fox runs away", "A small cat sat upon the red mat"]},
    "a regex that forces most": {"regex": r"(The quick brown fox jumps over the dog [0-9]\n){10}"},
    "a regex that forces little": {"regex": r"( [a-z]+){40}\."},
}
NUM_WARM_UP, NUM_STEPS = 100, 300


class Pieces:
    """The words of the simulated model, and random pieces of JSON up to `vocab_size` tokens."""

    def __init__(self, vocab_size: int) -> None:
        rng = random.Random(1)
        letters = 'abcdefghijklmnopqrstuvwxyz "{}:,[]0123456789'
        self.token_bytes = list(WordTokenizer().token_bytes[:vocab_size])
        while len(self.token_bytes) < vocab_size:
            self.token_bytes.append("".join(rng.choices(letters, k=rng.randint(2, 7))).encode())

    def encode(self, text: str) -> list[int]:
        """Not used by constraints."""
        raise NotImplementedError


def mask_time(source: ConstraintSource, vocab_size: int, num_rows: int) -> float:
    """Return the median microseconds per row and step of following random outputs with masks."""
    rng = random.Random(0)
    compiler = ConstraintCompiler(Pieces(vocab_size), vocab_size, (EOS_TOKEN_ID,))
    rows: list[RowConstraint] = [compiler.compile(source).new_row() for _ in range(num_rows)]
    taken = []
    for _ in range(NUM_WARM_UP + NUM_STEPS):
        began = time.perf_counter()
        masks = allowed_tokens(rows, vocab_size)
        taken.append(time.perf_counter() - began)
        tokens = [int(rng.choice(mask.nonzero()[0])) for mask in masks]
        began = time.perf_counter()
        for place, token in enumerate(tokens):
            if token == EOS_TOKEN_ID:
                rows[place] = compiler.compile(source).new_row()
            else:
                rows[place].advance(token)
        taken[-1] += time.perf_counter() - began
    return statistics.median(taken[NUM_WARM_UP:]) / num_rows * 1e6


def healing_time(vocab_size: int) -> float:
    """Return the median microseconds of a row's mask while a prompt is healed."""
    tokens = Pieces(vocab_size).token_bytes
    index = VocabularyIndex(tokens, vocab_size, (EOS_TOKEN_ID,))
    taken = []
    for token in tokens[-NUM_STEPS:]:
        row = HealingRow(index, token[:-1])
        began = time.perf_counter()
        allowed_tokens([row], vocab_size)
        taken.append(time.perf_counter() - began)
    return statistics.median(taken) * 1e6


def microseconds_per_token(**fields: object) -> float:
    """Return the time of the process per token, for 256 requests with these fields in 64 slots."""
    engine = Engine(SimulatedModel(), 64)
    taken = []
    for turn in range(9):  # the first one compiles
        num_before, began = engine.num_tokens, time.process_time()
        for number in range(256):
            prompt = f"The cat sat {turn} {number}"
            engine.add(Request(prompt=prompt, max_tokens=64, id=f"{turn}-{number}", **fields))
        while engine.has_work:
            engine.step()
        seconds = time.process_time() - began
        taken.append(seconds / (engine.num_tokens - num_before) * 1e6)
    return min(taken[1:])


def constraints(folder: Path) -> Iterator[Row]:
    """Measure masks and healing, and how often a schema is compiled."""
    schema = constraint_source(Request(prompt="", json_schema=SCHEMA))
    for vocab_size in (512, 4096):
        for num_rows in (1, 8, 64):
            figure = mask_time(schema, vocab_size, num_rows)
            name = f"mask of a JSON schema, V={vocab_size}, {num_rows} rows: per row and step"
            yield Row(name, f"{figure:.1f} µs", "<= 15 µs")
    figure = mask_time(ConstraintSource("gbnf", LISP), 4096, 64)
    yield Row("mask of a recursive GBNF, V=4096, 64 rows: per row and step", f"{figure:.1f} µs", "")
    yield Row("mask of a healing row, V=4096", f"{healing_time(4096):.1f} µs", "")
    plain = microseconds_per_token()
    for kind, fields in CONSTRAINED.items():
        figure = microseconds_per_token(**fields)
        name = (
            f"256 requests of 64 tokens, B=64, {kind}: {figure:.1f} µs a token, plain {plain:.1f}"
        )
        yield Row(name, f"1/{figure / plain:.1f} of plain", ">= 1/8")
    compiler = ConstraintCompiler(Pieces(4096), 4096, (EOS_TOKEN_ID,))
    began = time.perf_counter()
    for _ in range(1000):
        compiler.compile(constraint_source(Request(prompt="", json_schema=SCHEMA))).new_row()
    seconds = time.perf_counter() - began
    name = f"1,000 requests with one schema, {seconds * 1e3:.0f} ms: how often it is compiled"
    yield Row(name, str(compiler.num_misses), "1")
