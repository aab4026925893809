"""A run with blocks, a budget and preemption by the slowest obvious means: its events, the truth.

It is no engine: blocks are counted, not kept, and nothing is cached but what a job says, of whoever
was admitted last.
"""

from typing import NamedTuple

from hypothesis import strategies as st

from batcher.events import (
    AdmitEvent,
    ArriveEvent,
    BlockedEvent,
    EndEvent,
    Event,
    FinishEvent,
    PreemptEvent,
    PrefillEvent,
    RunEvent,
    SequenceName,
    StepsEvent,
)


class PagedJob(NamedTuple):
    """A request: how many tokens it begins with, of which `cached` are found, and generates."""

    id: str
    prompt: int
    length: int
    arrival: float = 0.0
    cached: int = 0


class Limits(NamedTuple):
    """What a step and the memory have room for; a step lasts `duration`, and more by its tokens."""

    batch: int = 2
    blocks: int = 8
    block_size: int = 2
    budget: int = 4
    is_prefill_first: bool = False
    duration: float = 0.25


class State(NamedTuple):
    """What a job met in a step."""

    phase: str
    cause: str = ""
    behind: str | None = None


class PagedRun(NamedTuple):
    """The events of a run, and what is so: by step, and by job and step."""

    events: list[Event]
    slots: list[list[str | None]]
    waiting: list[int]
    states: dict[str, dict[int, State]]
    tokens: list[dict[str, int]]  # generated after each step, of those that hold a slot
    starts: list[float]
    ends: list[float]


class _Row:
    def __init__(self, job):
        self.job = job
        self.generated = self.computed = self.blocks = 0
        self.slot = -1
        self.is_decoding = False  # it has had a token in this slot

    @property
    def known(self):
        return self.job.prompt + self.generated


class _Play:
    """The state of a run; each method is a rule."""

    def __init__(self, jobs, limits):
        self.limits = limits
        self.unread = sorted(jobs, key=lambda job: job.arrival)
        self.queue = []
        self.running = []
        self.now, self.step = 0.0, 0
        self.last_admitted = None
        self.used: set[int] = set()  # slots of the step before
        self.hold = None
        scheduling = {"kv_blocks": limits.blocks, "block_size": limits.block_size}
        if limits.is_prefill_first:
            scheduling["prefill_order"] = "prefill-first"
        run = RunEvent(
            batch=limits.batch,
            model="test",
            settings={},
            scheduling=scheduling,
            step_time={"name": "test", "duration": limits.duration},
        )
        self.run = PagedRun([run], [], [], {job.id: {} for job in jobs}, [], [], [])
        self.figures = []

    def emit(self, event):
        self.run.events.append(event)

    def free_blocks(self):
        return self.limits.blocks - sum(row.blocks for row in self.running)

    def blocks_for(self, num_tokens):
        return -(-num_tokens // self.limits.block_size)

    def play(self):
        while self.unread or self.queue or self.running:
            self.arrive()
            if not self.queue and not self.running:
                self.now = self.unread[0].arrival
                continue
            self.one_step()
        self.flush()
        num_tokens = sum(e.tokens for e in self.run.events if isinstance(e, FinishEvent))
        self.emit(EndEvent(self.step, self.now, num_tokens, len(self.run.states)))
        return self.run

    def arrive(self):
        while self.unread and self.unread[0].arrival <= self.now:
            job = self.unread.pop(0)
            self.emit(
                ArriveEvent(self.step, job.arrival, job.id, 0, "input", job.prompt, job.length)
            )
            self.queue.append(_Row(job))

    def one_step(self):
        self.room = self.limits.budget
        self.has_preempted = False
        self.work: dict[str, int] = {}  # tokens computed, by id
        decoding = [row for row in self.running if row.is_decoding]
        if self.limits.is_prefill_first:
            chasing = [row for row in self.running if not row.is_decoding]
            self.chase(chasing)
            self.admit()
            if not self.work:
                self.decode(decoding)
                if self.has_preempted:
                    self.admit()
        else:
            self.decode(decoding)
            self.chase([row for row in self.running if not row.is_decoding])
            self.admit()
        self.note_states()
        self.commit()

    def decode(self, rows):
        for row in rows:
            while row in self.running and self.blocks_for(row.known) > row.blocks:
                if self.free_blocks():
                    row.blocks += 1
                else:
                    self.preempt(self.running[-1], row)
            if row in self.running:
                self.work[row.job.id] = 1
                self.room -= 1
        for name in [name for name in self.work if name not in {r.job.id for r in self.running}]:
            del self.work[name]
            self.room += 1

    def preempt(self, row, other):
        self.running.remove(row)
        self.has_preempted = True
        self.emit(
            PreemptEvent(
                self.step,
                self.now,
                row.job.id,
                0,
                row.slot,
                "kv",
                other.job.id,
                0,
                row.computed,
                row.generated,
            )
        )
        row.computed = row.blocks = 0
        row.is_decoding = False
        self.queue.insert(0, row)

    def chase(self, rows):
        for row in rows:
            num_tokens = min(row.known - row.computed, self.room)
            if num_tokens:
                self.work[row.job.id] = num_tokens
                self.room -= num_tokens
                left = row.known - row.computed - num_tokens
                self.emit(
                    PrefillEvent(self.step, self.now, row.job.id, 0, row.slot, num_tokens, left)
                )

    def admit(self):
        while self.queue and len(self.running) < self.limits.batch:
            row = self.queue[0]
            needed = self.blocks_for(row.known)
            if self.has_preempted:
                return self.note_hold(row, "preemption", 0)
            if needed > self.free_blocks():
                return self.note_hold(row, "kv", needed)
            if not self.room:
                return self.note_hold(row, "tokens", 0)
            self.queue.pop(0)
            self.hold = None
            row.blocks = needed
            row.computed = cached = min(row.job.cached, row.known - 1)
            row.slot = min(set(range(self.limits.batch)) - {r.slot for r in self.running})
            self.running.append(row)
            num_tokens = min(row.known - cached, self.room)
            self.work[row.job.id] = num_tokens
            self.room -= num_tokens
            left = row.known - cached - num_tokens
            reason = "refill" if row.slot in self.used else "empty"
            source = self.last_admitted if cached else None
            self.last_admitted = SequenceName(row.job.id, 0)
            self.emit(
                AdmitEvent(
                    self.step,
                    self.now,
                    row.job.id,
                    0,
                    row.slot,
                    reason,
                    "sample",
                    row.generated,
                    cached,
                    left,
                    cached_from=source,
                )
            )
        return None

    def note_hold(self, row, reason, blocks):
        hold = (row.job.id, reason, blocks)
        if hold != self.hold:
            self.emit(BlockedEvent(self.step, self.now, row.job.id, 0, reason, blocks))
        self.hold = hold

    def note_states(self):
        """Write down what each job meets, from what was just decided."""
        for row in self.queue:
            if len(self.running) == self.limits.batch:
                state = State("wait", "slots")
            else:
                head, reason, _ = self.hold
                state = State("wait", reason, None if head == row.job.id else head)
            self.run.states[row.job.id][self.step] = state
        for row in self.running:
            has_share = row.job.id in self.work
            if row.is_decoding:
                state = State("decode", "" if has_share else "prefill")
            else:
                cause = "prefill" if self.limits.is_prefill_first else "tokens"
                state = State("prefill", "" if has_share else cause)
            self.run.states[row.job.id][self.step] = state
        labels = [None] * self.limits.batch
        for row in self.running:
            labels[row.slot] = row.job.id
        self.run.slots.append(labels)
        self.run.waiting.append(len(self.queue))

    def commit(self):
        start = self.now
        num_decodes = sum(row.is_decoding and row.job.id in self.work for row in self.running)
        num_tokens = sum(self.work.values())
        self.now += self.limits.duration + 0.125 * num_tokens
        self.run.starts.append(start)
        self.run.ends.append(self.now)
        num_blocks = sum(row.blocks for row in self.running)
        self.figures.append(
            (self.now, num_decodes, num_tokens - num_decodes, len(self.work), num_blocks)
        )
        self.used = {row.slot for row in self.running}
        ended = []
        for row in self.running:
            row.computed += self.work.get(row.job.id, 0)
            if row.job.id in self.work and row.computed == row.known:
                row.generated += 1
                row.is_decoding = True
                ended += [row] if row.generated == row.job.length else []
        self.run.tokens.append({row.job.id: row.generated for row in self.running})
        for row in sorted(ended, key=lambda row: row.slot):
            self.running.remove(row)
            self.emit(
                FinishEvent(
                    self.step, start, row.job.id, 0, row.slot, "length", None, row.generated
                )
            )
        self.step += 1
        if len(self.figures) == 3:
            self.flush()

    def flush(self):
        if self.figures:
            columns = [list(column) for column in zip(*self.figures, strict=True)]
            zeros = [0] * len(self.figures)
            self.emit(StepsEvent(self.step - len(self.figures), *columns, zeros, zeros))
            self.figures.clear()


def play_paged(jobs, limits):
    """Run `jobs`, each of which the blocks have room for, first come first served."""
    return _Play(jobs, limits).play()


@st.composite
def paged_workloads(draw):
    """Draw up to eight jobs and limits under which each of them can run alone."""
    limits = Limits(
        batch=draw(st.integers(1, 4)),
        blocks=draw(st.integers(5, 12)),
        block_size=draw(st.integers(1, 3)),
        budget=draw(st.integers(4, 8)),
        is_prefill_first=draw(st.booleans()),
    )
    room = limits.blocks * limits.block_size
    sizes = st.tuples(
        st.integers(1, 10),
        st.integers(1, 8),
        st.sampled_from([0.0, 0.1, 1.0, 2.5, 40.0]),
        st.integers(0, 10),
    )
    jobs = []
    for number, (most, longest, arrival, cached) in enumerate(draw(st.lists(sizes, max_size=8))):
        prompt = min(most, room - 1)
        length = min(longest, room - prompt)
        jobs.append(PagedJob(f"r{number}", prompt, length, arrival, min(cached, prompt)))
    return jobs, limits


CROWDED = [PagedJob("a", 2, 9), PagedJob("b", 2, 9), PagedJob("c", 7, 2)]
"""Two that outgrow eight blocks of two tokens together, and one that waits for them."""
