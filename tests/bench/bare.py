"""What the engine is measured against: the shortest loop of plain Python that batches at all.

It has an integer hash for a model and no errors, events, text, limits or order to keep.  As a
script it decodes a file of requests into a file of results: `python bare.py IN OUT BATCH`.
"""

import json
import sys
from collections import deque
from pathlib import Path

MULTIPLIER = 0x5851F42D4C957F2D
MASK = 2**64 - 1
SEED = 0x1234567


def decode(rows, num_slots):
    """Return the tokens and the finish reason of every row."""
    waiting, outputs = deque(rows), {}
    slots = [None] * num_slots
    while True:
        for slot in range(num_slots):
            if slots[slot] is None and waiting:
                row = waiting.popleft()
                state = SEED
                for token in row["prompt"]:
                    state = (state * MULTIPLIER + token + 1) & MASK
                stops = [tuple(stop) for stop in row.get("stop_sequence", ())]
                slots[slot] = [row["id"], state, [], row["max_tokens"], stops]
        active = [slot for slot in range(num_slots) if slots[slot]]
        if not active:
            return outputs
        for slot in active:
            held = slots[slot]
            token = held[1] >> 55
            held[1] = (held[1] * MULTIPLIER + token + 1) & MASK
            held[2].append(token)
            if any(tuple(held[2][-len(stop) :]) == stop for stop in held[4]):
                outputs[held[0]], slots[slot] = (held[2], "stop"), None
            elif len(held[2]) >= held[3]:
                outputs[held[0]], slots[slot] = (held[2], "length"), None


def main(source, target, num_slots):
    """Decode a file of requests into a file of results."""
    with Path(source).open() as lines:
        rows = [json.loads(line) for line in lines]
    outputs = decode(rows, int(num_slots))
    with Path(target).open("w") as results:
        for request_id, (tokens, reason) in outputs.items():
            result = {"id": request_id, "tokens": tokens, "finish_reason": reason}
            results.write(json.dumps(result) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
