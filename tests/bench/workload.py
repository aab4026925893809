"""The requests of the benchmarks: prompts of 4 to 64 ids, outputs of 16 to 96, half with stops."""

import json
import random
from typing import NamedTuple

VOCAB_SIZE = 512
STOPS = [[7], [5, 6]]


class Row(NamedTuple):
    """A line of the table in docs/inside/benchmarks.md: the measured and the wanted value."""

    name: str
    figure: str
    target: str


def rows(num_requests, max_tokens=(16, 96)):
    """Yield request rows, the same each time.

    EOS is ignored, so that outputs are as long as those of the bare loop, which has none.
    """
    draw = random.Random(0)
    for number in range(num_requests):
        row = {
            "id": f"req-{number:07}",
            "prompt": [draw.randrange(3, VOCAB_SIZE) for _ in range(draw.randint(4, 64))],
            "max_tokens": draw.randint(*max_tokens),
            "ignore_eos": True,
        }
        if number % 2:
            row["stop_sequence"] = STOPS
        yield row


def write(path, num_requests, max_tokens=(16, 96)):
    with path.open("w") as file:
        for row in rows(num_requests, max_tokens):
            file.write(json.dumps(row) + "\n")
