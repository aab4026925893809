"""What a fleet comes to: the times of all that were served, and what each replica did.

Rule: no request is kept as an object; what is kept of one are six numbers.
"""

from array import array
from collections import Counter
from collections.abc import Sequence
from functools import cached_property
from typing import Literal

import numpy as np
from msgspec import Struct, field
from numpy.typing import NDArray

from batcher.metrics.arrays import ServedTimes
from batcher.planning.life import Life
from batcher.planning.simulated_sequence import SimulatedSequence
from batcher.planning.simulator import SimulationResult, SimulationTotals
from batcher.scheduling.sequence import NEVER
from batcher.timing.step_time import TICKS_PER_SECOND

Priorities = NDArray[np.int32]


class ServedColumns:
    """The times and priorities of sequences that came to their end, as they are added."""

    def __init__(self) -> None:
        self._columns = tuple(array("d") for _ in ServedTimes._fields)
        self._priorities = array("i")

    def __len__(self) -> int:
        return len(self._priorities)

    def add(self, sequence: SimulatedSequence, num_output_tokens: int) -> None:
        """Take in one that was given tokens."""
        arrival, admitted, first_token, end, num_tokens = self._columns
        came = sequence.came
        arrival.append(sequence.arrival_time if came is None else came)
        admitted.append(sequence.admitted_ticks / TICKS_PER_SECOND)
        first_token.append(sequence.first_token_ticks / TICKS_PER_SECOND)
        end.append(sequence.end_ticks / TICKS_PER_SECOND)
        num_tokens.append(num_output_tokens)
        self._priorities.append(sequence.priority)

    def since(self, place: int) -> ServedTimes:
        """Return those added after the first `place` ones."""
        arrival, admitted, first_token, end, num_tokens = (
            np.array(column[place:]) for column in self._columns
        )
        return ServedTimes(arrival, admitted, first_token, end, num_tokens.astype(np.int64))

    @property
    def times(self) -> ServedTimes:
        """Them all, in the order in which they were added; nothing may be added after that."""
        arrival, admitted, first_token, end, num_tokens = map(np.frombuffer, self._columns)
        return ServedTimes(arrival, admitted, first_token, end, num_tokens.astype(np.int64))

    @property
    def priorities(self) -> Priorities:
        """Those of them all, in the same order; nothing may be added after that, either."""
        return np.frombuffer(self._priorities, np.int32)


class ReplicaResult(Struct):
    """What one engine did.

    num_served: sequences that were given tokens.  failed: those that could never run, by their
    priorities.
    kv_read: tokens before its own that each read while it decoded, summed up, less what accepted
    drafts saved.  prefill_work: see StepTime; of all prompts, and of the drafts.
    last_admission_ticks: when a sequence was last admitted for the first time; None: none was.
    end_ticks: when its last step had ended.  paid_seconds: for how long it was there, from the
    first arrival at the fleet to the end of all steps; None: all that time.
    stalled_ticks: how long it took no step though requests waited, as blocks were kept for others.
    group: of a file, that it is in.
    """

    num_slots: int
    num_blocks: int | None
    max_batch_tokens: int | None
    totals: SimulationTotals = field(default_factory=SimulationTotals)
    num_served: int = 0
    failed: Counter[int] = field(default_factory=Counter)
    kv_read: int = 0
    prefill_work: int = 0
    last_admission_ticks: int | None = None
    end_ticks: int = 0
    paid_seconds: float | None = None
    stalled_ticks: int = 0
    group: str = ""

    def add(self, sequence: SimulatedSequence, columns: ServedColumns) -> None:
        """Take in a sequence that has ended, or failed."""
        if sequence.has_failed:
            self.failed[sequence.priority] += 1
            return
        num_output = sequence.num_output_tokens
        self.add_output(sequence.num_prompt_tokens, num_output)
        self.add_prompt(sequence)
        if sequence.first_token_ticks != NEVER:
            self.note_served(sequence.admitted_ticks)
            columns.add(sequence, num_output)

    def add_output(self, num_prompt: int, num_output: int) -> None:
        """Count what was read for an output after a prompt, but for its first token."""
        if num_output > 1:
            decoded = num_output - 1
            self.kv_read += decoded * num_prompt + (decoded * (decoded - 1) >> 1)

    def add_prompt(self, sequence: SimulatedSequence) -> None:
        """Count the work of a prompt."""
        if sequence.job.max_tokens:
            self.prefill_work += sequence.num_prompt_tokens**2 - sequence.num_cached_at_first**2

    def note_served(self, admitted_ticks: int) -> None:
        """Count a sequence that was admitted then, and given tokens."""
        self.num_served += 1
        if admitted_ticks > (self.last_admission_ticks or NEVER):
            self.last_admission_ticks = admitted_ticks

    @property
    def busy_ticks(self) -> int:
        """How long all its steps took together."""
        return sum(self.totals.binding_ticks.values())


Refusal = Literal["queue_full", "max_wait", "deadline", "retries", "router", "no_replica"]


class FleetHistory(Struct):
    """What became of the replicas of a fleet that is managed.

    lives: of all there ever were, in the order of the results.  num_failures: of replicas.
    num_lost: how often a sequence was lost with one.  refusals: sequences that were refused, with
    the turns after them, by the reason.
    """

    lives: list[Life]
    num_failures: int = 0
    num_lost: int = 0
    refusals: Counter[Refusal] = field(default_factory=Counter)


class ReplicasResult(Struct, frozen=True, dict=True):
    """What several replicas did together."""

    replicas: list[ReplicaResult]

    @cached_property
    def totals(self) -> SimulationTotals:
        """What the steps of all replicas come to."""
        totals = [replica.totals for replica in self.replicas]
        if len(totals) == 1:
            return totals[0]
        sums = SimulationTotals()
        for name in SimulationTotals.__struct_fields__:
            parts = [getattr(each, name) for each in totals]
            setattr(sums, name, sum(parts, type(parts[0])()))
        return sums

    @property
    def busy_ticks(self) -> int:
        """How long all steps took together."""
        return sum(replica.busy_ticks for replica in self.replicas)

    def paid_seconds(self, makespan: float) -> float:
        """Return for how long replicas were there, summed up, in a run of so many seconds."""
        paid = (each.paid_seconds for each in self.replicas)
        return sum(makespan if each is None else each for each in paid)

    @property
    def kv_read(self) -> int:
        """See ReplicaResult, as prefill_work."""
        return sum(replica.kv_read for replica in self.replicas)

    @property
    def prefill_work(self) -> int:
        """See ReplicaResult."""
        return sum(replica.prefill_work for replica in self.replicas)

    @property
    def slot_utilisation(self) -> float:
        """The share of slots that were held, over all steps."""
        there = sum(each.num_slots * each.totals.num_steps for each in self.replicas)
        return _share(self.totals.slot_steps, there)

    @property
    def kv_utilisation(self) -> float | None:
        """The share of blocks that were held, over all steps; None without a limit."""
        if any(each.num_blocks is None for each in self.replicas):
            return None
        there = sum((each.num_blocks or 0) * each.totals.num_steps for each in self.replicas)
        return _share(self.totals.block_steps, there)

    @property
    def budget_utilisation(self) -> float | None:
        """The share of max_batch_tokens that was computed, over all steps; None without one."""
        if any(each.max_batch_tokens is None for each in self.replicas):
            return None
        there = sum((each.max_batch_tokens or 0) * each.totals.num_steps for each in self.replicas)
        return _share(self.totals.computed_tokens, there)

    @property
    def hit_rate(self) -> float:
        """The share of tokens that were found in blocks, of those admitted the first time."""
        return _share(self.totals.found_tokens, self.totals.asked_tokens)


class FleetResult(ReplicasResult, frozen=True, dict=True):
    """What all replicas of a fleet did, of one with several ranks each by itself.

    times: of all that were served.  priorities: theirs [request].  refused: sequences that the
    router refused, by their priorities.
    first_arrival: in seconds; None if there was none.  history: None if it was not managed.
    """

    times: ServedTimes
    priorities: Priorities
    first_arrival: float | None
    refused: Counter[int] = field(default_factory=Counter)
    history: FleetHistory | None = None

    @property
    def num_failed(self) -> int:
        """How many sequences could never run, or were refused."""
        return self.failed.total()

    @property
    def failed(self) -> Counter[int]:
        """The same by their priorities."""
        return sum((replica.failed for replica in self.replicas), self.refused)

    @property
    def makespan(self) -> float:
        """From the first arrival to the end of the last step, in seconds."""
        end_ticks = max(replica.end_ticks for replica in self.replicas)
        return max(end_ticks / TICKS_PER_SECOND - (self.first_arrival or 0.0), 0.0)


def _share(part: int, whole: int) -> float:
    return part / whole if whole else 0.0


def whole_of(parts: Sequence[FleetResult]) -> FleetResult:
    """Return what a fleet did of which `parts` ran every len(parts)-th replica each, in order."""
    num_replicas, num_parts = len(parts[0].replicas), len(parts)
    return FleetResult(
        [parts[index % num_parts].replicas[index] for index in range(num_replicas)],
        ServedTimes(*map(np.concatenate, zip(*(part.times for part in parts), strict=True))),
        np.concatenate([part.priorities for part in parts]),
        min((part.first_arrival for part in parts if part.first_arrival is not None), default=None),
    )


def result_of_engine(run: SimulationResult, group: str = "") -> FleetResult:
    """Return the same of a run of one engine; group: of a file, that it is in."""
    columns = ServedColumns()
    replica = ReplicaResult(
        run.num_slots,
        run.num_blocks,
        run.max_batch_tokens,
        run.totals,
        end_ticks=run.end_ticks,
        group=group,
    )
    for sequence in run.sequences:
        replica.add(sequence, columns)
    first = min((sequence.arrival_time for sequence in run.sequences), default=None)
    return FleetResult([replica], columns.times, columns.priorities, first)
