"""The hits of a Mooncake trace against a count over its hash_ids that knows nothing of blocks."""

import json
from random import Random

from jobs import simulate
from msgspec import convert, to_builtins

from batcher import Request, SimulatedModel
from batcher.planning.workload import workload_of
from batcher.planning.workload_traces import BLOCK_TOKENS, TraceEntryChecks, trace_entries
from batcher.settings import SchedulingSettings
from batcher.timing.step_time import ConstantStepTime

Line = dict[str, object]


def made_up_trace(random, num_requests):
    """Requests that go on from each other, some cut inside a block, some at the end of one."""
    lines = []
    chains = [[0]]
    next_id = 1
    for number in range(num_requests):
        before = random.choice(chains)
        kept = before[: random.randint(0, len(before))]
        new = random.randint(0 if kept else 1, 4)
        ids = kept + list(range(next_id, next_id + new))
        next_id += new
        chains.append(ids)
        rest = random.choice([1, 17, BLOCK_TOKENS - 1, BLOCK_TOKENS, BLOCK_TOKENS])
        length = BLOCK_TOKENS * (len(ids) - 1) + rest
        output = random.choice([1, 3, 600])
        lines.append(
            {
                "timestamp": number * 100,
                "input_length": length,
                "output_length": output,
                "hash_ids": ids,
            }
        )
    return lines


def direct_hits(lines):
    """The tokens each request finds: full blocks whose chain was there before, one token left."""
    seen = set()
    hits = []
    for line in lines:
        ids, length = tuple(line["hash_ids"]), line["input_length"]
        most = (length - 1) // BLOCK_TOKENS
        found = next((count for count in range(most, 0, -1) if ids[:count] in seen), 0)
        hits.append(found * BLOCK_TOKENS)
        seen.update(ids[:count] for count in range(1, length // BLOCK_TOKENS + 1))
    return hits


def workload_of_lines(lines):
    numbered = [(number, json.dumps(line).encode()) for number, line in enumerate(lines, 1)]
    entries = trace_entries("mooncake", numbered, TraceEntryChecks("trace"))
    requests = [convert(to_builtins(entry), Request) for entry in entries]
    return workload_of(requests, SimulatedModel())


def test_a_trace_hits_what_a_direct_count_over_its_hash_ids_hits():
    for seed in range(5):
        lines = made_up_trace(Random(seed), 150)
        for num_slots in (8, 200):
            settings = SchedulingSettings(prefix_cache=True, block_size=BLOCK_TOKENS)
            result = simulate(workload_of_lines(lines), num_slots, settings, ConstantStepTime(0.01))
            found = [sequence.num_cached_at_first for sequence in result.sequences]
            assert found == direct_hits(lines)
            assert result.totals.found_tokens == sum(found) > 0
