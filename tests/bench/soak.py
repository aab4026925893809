"""A million requests through one engine, with pressure on the blocks, aborts and prefix churn."""

import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from report import Row

NUM_REQUESTS = int(os.environ.get("SOAK_REQUESTS", "1_000_000"))


def soak(folder: Path) -> Iterator[Row]:
    """Measure whether memory grows, and what is left; SOAK_REQUESTS sets how many there are."""
    sys.path.append(str(Path(__file__).parent.parent))
    import soaking  # noqa: PLC0415 - the tests run the same, shorter

    began = time.process_time()
    soaked = soaking.soak(NUM_REQUESTS)
    seconds = time.process_time() - began
    outcomes = ", ".join(f"{count:,} {reason}" for reason, count in soaked.outcomes.most_common())
    name = (
        f"a soak of {NUM_REQUESTS:,} requests ({outcomes}; {soaked.num_preemptions:,} preemptions,"
        f" {soaked.num_hits:,} hits, {soaked.num_steps:,} steps checked or counted)"
    )
    yield Row(name, f"{seconds:.0f} s", "")
    peak = max(soaked.resident)
    name = f"memory, its last tenth against the second (peak {peak:.0f} MB)"
    yield Row(name, f"{soaked.growth:.3f}x", "<= 1.02x")
    yield Row("what the engine still holds at the end", str(sum(soaked.kept.values())), "0")
