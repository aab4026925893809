"""What binds a deployment: the one thing of which more would serve the workload sooner.

Rule: the time from the first arrival to the end is shared out, and the largest share binds;
docs/what-if.md has the definition.
"""

from typing import Literal, get_args

from msgspec import Struct

from batcher.simulation.result import SimulationResult
from batcher.simulation.sequence import SimulatedSequence
from batcher.timing.step_time import TICKS_PER_SECOND, StepTime

Constraint = Literal["slots", "kv", "tokens", "static", "compute", "arrivals"]

WORTH_DOUBLING = 0.1  # a doubled step that gains less is as good as none
NUM_DIGITS = 6

# What the simulator says kept the first of the queue out -> what there was too little of.
_LACKS: dict[str, Constraint] = {
    "slots": "slots",
    "kv": "kv",
    "preemption": "kv",
    "tokens": "tokens",
    "batch": "static",
}
_IS_ROOM = ("slots", "kv", "tokens")  # with more of them, steps would be larger


class Binding(Struct, frozen=True):
    """What binds, and how time is shared out.

    shares: of the time from the first arrival to the end, 1 together; of those above 0.
    doubling: by how much the tokens per second of the mean step would grow if it were twice as
    large, from 0 (its time doubles, too) to 1 (it takes no longer).
    """

    constraint: Constraint
    share: float
    shares: dict[Constraint, float]
    doubling: float


def binding_of(result: SimulationResult, step_time: StepTime) -> Binding:
    """Return what bound a simulated run whose steps took `step_time`."""
    if result.sequences and all(sequence.has_failed for sequence in result.sequences):
        return Binding("kv", 1.0, {"kv": 1.0}, 0.0)  # there is no time to share out
    ticks = dict.fromkeys(get_args(Constraint), 0)
    for reason, lacking in _LACKS.items():
        ticks[lacking] += result.totals.binding_ticks[reason]
    doubling = gain_of_doubling(result, step_time)
    if doubling < WORTH_DOUBLING:
        for room in _IS_ROOM:
            ticks["compute"] += ticks[room]
            ticks[room] = 0
    num_waiting_ticks = sum(ticks.values())
    admissions = [s.admitted_ticks for s in result.sequences if s.admitted is not None]
    drain = result.end_ticks - max(admissions, default=result.end_ticks)
    drain = min(drain, result.totals.binding_ticks["arrivals"])
    total = max(round(result.makespan * TICKS_PER_SECOND), num_waiting_ticks + drain)
    ticks["compute"] += drain
    ticks["arrivals"] = total - num_waiting_ticks - drain
    shares = {name: round(part / total, NUM_DIGITS) for name, part in ticks.items() if part}
    constraint: Constraint = max(ticks, key=lambda name: ticks[name]) if total else "arrivals"
    return Binding(constraint, shares.get(constraint, 0.0), shares, round(doubling, NUM_DIGITS))


def gain_of_doubling(result: SimulationResult, step_time: StepTime) -> float:
    """Return by how much a step twice as large as the mean one gives more tokens per second."""
    num_steps = result.totals.num_steps
    if not num_steps:
        return 0.0
    num_rows = max(1, round(result.totals.slot_steps / num_steps))
    num_tokens = max(num_rows, round(result.totals.computed_tokens / num_steps))
    kv_read = round(sum(map(_kv_read, result.sequences)) / num_steps)
    prefill_work = round(sum(map(_prefill_work, result.sequences)) / num_steps)
    once = step_time.ticks(num_tokens, num_rows, kv_read, prefill_work)
    twice = step_time.ticks(2 * num_tokens, 2 * num_rows, 2 * kv_read, 2 * prefill_work)
    return 2 * once / twice - 1


def _kv_read(sequence: SimulatedSequence) -> int:
    """Return how many tokens before its own a sequence reads while it decodes."""
    if sequence.has_failed or sequence.job.num_output_tokens < 1:
        return 0
    num_decoded = sequence.job.num_output_tokens - 1
    return num_decoded * sequence.num_prompt_tokens + num_decoded * (num_decoded - 1) // 2


def _prefill_work(sequence: SimulatedSequence) -> int:
    """Return the sum of P * (2 * context + P) over the chunks of a prompt, however it was cut."""
    if sequence.has_failed or sequence.job.max_tokens == 0:
        return 0
    return sequence.num_prompt_tokens**2 - sequence.num_cached_at_first**2
