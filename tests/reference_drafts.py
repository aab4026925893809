"""A run whose rows speculate, by the slowest obvious means: its events, and the truth.

It is no engine: what is drafted and accepted is drawn, and a token is nothing but its time.
"""

from random import Random
from typing import NamedTuple

from hypothesis import strategies as st

from batcher.events import (
    AcceptEvent,
    AdmitEvent,
    ArriveEvent,
    DraftEvent,
    EndEvent,
    Event,
    FinishEvent,
    PreemptEvent,
    RollbackEvent,
    RunEvent,
    SpeculateEvent,
    StepsEvent,
)
from batcher.result import FinishReason


class DraftedJob(NamedTuple):
    """A request that generates `length` tokens; speculates: whether steps draft for it."""

    id: str
    prompt: int
    length: int
    speculates: bool = True
    outcome: FinishReason = "length"


class Verified(NamedTuple):
    """What a step verified in a slot."""

    step: int
    slot: int
    id: str
    drafted: int
    accepted: int


class DraftedRun(NamedTuple):
    """The events of a run, and what is so.

    tokens: after each step, of those that hold a slot.  given: by job, when its tokens came.
    ends: of the steps.  computed, prompts: positions of each step, and those of prompts among them.
    decode_steps: by job, those that gave it a token after the first of a stay.
    """

    events: list[Event]
    verified: list[Verified]
    tokens: list[dict[str, int]]
    given: dict[str, list[float]]
    ends: list[float]
    computed: list[int]
    prompts: list[int]
    decode_steps: dict[str, int]


class _Row:
    def __init__(self, job):
        self.job = job
        self.slot = -1
        self.generated = 0
        self.has_token = False  # in this stay


class _Play:
    def __init__(self, jobs, batch, seed, *, is_timed):
        self.rng, self.batch, self.is_timed = Random(seed), batch, is_timed
        step_time = {"name": "linear"} if is_timed else {}
        run = RunEvent(batch=batch, model="test", settings={}, step_time=step_time)
        self.run = DraftedRun([run], [], [], {job.id: [] for job in jobs}, [], [], [], {})
        self.queue = [_Row(job) for job in jobs]
        self.rows = []
        self.step, self.now = 0, 0.0
        self.columns = []

    def emit(self, kind, row, *fields, **named):
        self.run.events.append(kind(self.step, self.now, row.job.id, 0, *fields, **named))

    def play(self):
        for row in self.queue:
            self.emit(ArriveEvent, row, "input", row.job.prompt, row.job.length)
        while self.queue or self.rows:
            self.take_step()
        self.tell()
        num_tokens = sum(map(len, self.run.given.values()))
        end = EndEvent(self.step, self.now, num_tokens, len(self.run.given))
        self.run.events.append(end)
        return self.run

    def take_step(self):
        rng, run = self.rng, self.run
        if self.is_timed and len(self.rows) > 1 and rng.random() < 0.1:
            self.preempt(self.rows[-1])
        admitted = self.admit()
        drafts = {row.slot: self.draft(row) for row in self.rows if row.has_token}
        end = self.now + (rng.choice([0.25, 0.5, 2.0]) if self.is_timed else 1.0)
        prompts = sum(row.job.prompt + row.generated for row in admitted)
        num_drafts = sum(drafts.values())
        num_decodes = len(self.rows) - len(admitted)
        run.computed.append(prompts + num_decodes + num_drafts)
        run.prompts.append(prompts)
        self.columns.append((end, num_decodes, prompts + num_drafts, len(self.rows), num_drafts))
        run.ends.append(end)
        for row in list(self.rows):
            self.give(row, drafts.get(row.slot, 0), end)
        run.tokens.append({row.job.id: row.generated for row in self.rows})
        for row in list(self.rows):
            if row.generated == row.job.length:
                self.rows.remove(row)
                self.emit(FinishEvent, row, row.slot, row.job.outcome, None, row.generated)
        self.step, self.now = self.step + 1, end
        if rng.random() < 0.3:
            self.tell()

    def admit(self):
        admitted = []
        while self.queue and len(self.rows) < self.batch:
            row = self.queue.pop(0)
            row.slot = min(set(range(self.batch)) - {other.slot for other in self.rows})
            self.rows.append(row)
            self.emit(AdmitEvent, row, row.slot, "empty", generated=row.generated)
            admitted.append(row)
        return admitted

    def preempt(self, row):
        self.rows.remove(row)
        lost = row.job.prompt + row.generated - 1
        self.emit(PreemptEvent, row, row.slot, "kv", "z", 0, lost, row.generated)
        row.has_token = False
        self.queue.insert(0, row)

    def draft(self, row):
        num_drafts = self.rng.choice([0, 1, 2, 2, 5]) if row.job.speculates else 0
        if num_drafts:
            self.emit(DraftEvent, row, row.slot, row.job.prompt + row.generated, num_drafts)
        return num_drafts

    def give(self, row, drafted, end):
        """Give a row its tokens; what is drafted behind its end is rejected, or not told of."""
        left = row.job.length - row.generated
        accepted = min(self.rng.randint(0, drafted), left - 1)
        position = row.job.prompt + row.generated
        if accepted:
            self.emit(AcceptEvent, row, row.slot, position, accepted)
        is_told = accepted < left - 1 or self.rng.random() < 0.5
        if accepted < drafted and is_told:
            first, rejected = position + accepted, drafted - accepted
            self.emit(RollbackEvent, row, row.slot, first, rejected, self.rng.choice([0, 2]))
        if drafted:
            found = Verified(self.step, row.slot, row.job.id, drafted, accepted)
            self.run.verified.append(found)
        if row.has_token:
            self.run.decode_steps[row.job.id] = self.run.decode_steps.get(row.job.id, 0) + 1
        if row.job.speculates and self.rng.random() < 0.1:
            self.emit(SpeculateEvent, row, row.slot, 3, "gain")
        row.has_token = True
        row.generated += 1 + accepted
        self.run.given[row.job.id] += [end] * (1 + accepted)

    def tell(self):
        """Tell of the steps that were not told of yet, if the run tells of any."""
        if self.is_timed and self.columns:
            ends, decodes, prefills, rows, drafts = map(list, zip(*self.columns, strict=True))
            nothing = [0] * len(ends)
            told = (ends, decodes, prefills, rows, nothing, nothing, nothing)
            first = self.step - len(ends)
            self.run.events.append(StepsEvent(first, *told, drafts if any(drafts) else None))
        self.columns.clear()


def play_drafts(jobs, batch, seed, *, is_timed=False):
    """Run `jobs`, first come first served; `seed` is that of all that is drawn.

    is_timed: steps differ in length, and are told of; then rows are also preempted.
    """
    return _Play(jobs, batch, seed, is_timed=is_timed).play()


@st.composite
def drafted_workloads(draw):
    """Draw jobs, a batch and a seed."""
    job = st.builds(
        DraftedJob,
        st.just(""),
        st.integers(1, 4),
        st.integers(1, 12),
        st.booleans(),
        st.sampled_from(["length", "stop"]),
    )
    jobs = draw(st.lists(job, max_size=6))
    named = [job._replace(id=f"r{number}") for number, job in enumerate(jobs)]
    return named, draw(st.integers(1, 4)), draw(st.integers(0, 2**32))
