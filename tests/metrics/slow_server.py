"""A server that takes steps of all lengths, by the slowest obvious means: its events, the truth.

What it decides is drawn, so it does all that a trace can tell: it lets rows stand still, computes
prompts in chunks, preempts, blocks, jumps, fails and aborts, and tells of steps late.
"""

from bisect import bisect_left
from dataclasses import dataclass, field
from random import Random

from batcher.events import (
    AdmitEvent,
    ArriveEvent,
    BlockedEvent,
    EndEvent,
    Event,
    FinishEvent,
    JumpEvent,
    PreemptEvent,
    PrefillEvent,
    RunEvent,
    StepsEvent,
)

DURATIONS = [0.013, 0.25, 0.5, 1.0, 2.75]
TOTAL_BLOCKS, BUDGET = 40, 24
HOLDS = ["kv", "tokens", "preemption", "batch"]


@dataclass
class Job:
    """A request, and the truth of what became of it; all times in seconds."""

    id: str
    arrival: float
    prompt: int
    length: int
    outcome: str
    deadline: float | None
    has_partner: bool
    admitted: list[float] = field(default_factory=list)
    token_times: list[float] = field(default_factory=list)
    end: float | None = None
    ended_as: str | None = None
    slot: int = -1
    left: int = 0
    computed: int = 0
    lost: int = 0
    is_decoding: bool = False
    num_lost_again: int = 0


@dataclass
class Truth:
    """All that a slow look at every step gives."""

    jobs: list[Job]
    steps: list[dict] = field(default_factory=list)
    hold_steps: dict = field(default_factory=lambda: dict.fromkeys(HOLDS, 0))
    preemptions: list[float] = field(default_factory=list)  # when
    moves: list[tuple[float, int, int]] = field(default_factory=list)  # when, running, waiting
    asked: int = 0
    found: int = 0
    asked_again: int = 0
    found_again: int = 0
    recomputed: int = 0


class SlowServer:
    """Serves `jobs`, in order of arrival, in `num_slots` slots; `seed` decides all else."""

    def __init__(self, jobs, num_slots, seed):
        self.random, self.num_slots = Random(seed), num_slots
        self.unread, self.queue, self.running = list(jobs), [], []
        self.truth = Truth(jobs)
        scheduling = {"kv_blocks": TOTAL_BLOCKS, "max_batch_tokens": BUDGET}
        self.events: list[Event] = [
            RunEvent(batch=num_slots, model="test", settings={}, scheduling=scheduling)
        ]
        self.now, self.step, self.starts = 0.0, 0, []
        self.is_eager = self.random.random() < 0.5
        self.hold, self.unstreamed = None, []

    def serve(self):
        """Take steps until nothing is left; return the events and the truth."""
        while self.unread or self.queue or self.running:
            self.starts[self.step :] = [self.now]
            self.num_events = len(self.events)
            self.read()
            self.abort_some()
            if not (self.queue or self.running):
                if self.unread:
                    self.now = max(self.now, self.unread[0].arrival)
                continue
            self.take_step()
            if self.chance(0.2):
                self.take_step_events()
        self.num_events = len(self.events)
        self.take_step_events()
        tokens = sum(e.tokens for e in self.events if isinstance(e, FinishEvent))
        self.events.append(EndEvent(self.step, self.now, tokens, len(self.truth.jobs)))
        return self.events, self.truth

    def chance(self, probability):
        return self.random.random() < probability

    def read(self):
        while self.unread and self.unread[0].arrival <= self.now:
            if not self.is_eager and len(self.running) + len(self.queue) >= self.num_slots:
                return
            job = self.unread.pop(0)
            step = bisect_left(self.starts, job.arrival)
            self.events.append(
                ArriveEvent(
                    step, job.arrival, job.id, 0, "input", job.prompt, job.length, job.deadline
                )
            )
            self.truth.moves.append((job.arrival, 0, 1))
            if job.length:
                self.queue.append(job)
            else:
                self.finish(job, step, self.now, "length", self.now)

    def roles(self, job):
        return ["sample", "negative"] if job.has_partner else ["sample"]

    def finish(self, job, step, time, reason, end):
        slot = None if job.slot < 0 else job.slot
        for role in self.roles(job) if slot is not None else ["sample"]:
            is_own = role == "sample"
            self.events.append(
                FinishEvent(
                    step, time, job.id, 0, slot, reason if is_own else "unused", None,
                    len(job.token_times) if is_own else 0, role,
                )
            )  # fmt: skip
        job.end, job.ended_as = end, reason
        rows = len(self.roles(job))
        self.truth.moves.append((end, -rows, 0) if slot is not None else (end, 0, -1))
        if job in self.running:
            self.running.remove(job)

    def abort_some(self):
        for job in [*self.running]:
            if job.outcome == "aborted" and self.chance(0.15):
                self.finish(
                    job, self.step - 1, self.starts[self.step - 1], "aborted", self.last_end
                )
        for job in [*self.queue]:
            if job.outcome == "aborted" and self.chance(0.15):
                self.queue.remove(job)
                self.finish(job, self.step, self.now, "aborted", self.now)
                if self.hold and self.hold[0] is job:
                    self.hold = None

    def take_step(self):
        step, now = self.step, self.now
        self.preempt_some()
        decoding = [job for job in self.running if job.is_decoding]
        chasing = [job for job in self.running if not job.is_decoding]
        prefills, starting = self.compute(chasing)
        stands_still = bool(prefills) and self.chance(0.3)
        admitted_prefills, admitted_starting = self.admit()
        prefills, starting = prefills + admitted_prefills, starting + admitted_starting
        if not self.running:
            return  # everybody is held back: the simulator does not take empty steps
        rows = 0 if stands_still else sum(len(self.roles(job)) for job in decoding)
        if not rows and not prefills:
            prefills = 1
        end = now + self.random.choice(DURATIONS)
        given = starting + ([] if stands_still else decoding)
        num_tokens = self.give(given, end)
        self.note_step(now, end, rows, prefills, num_tokens)
        if self.hold:
            self.truth.hold_steps[self.hold[1]] += 1
        self.last_end = self.now = end
        self.step = step + 1

    def preempt_some(self):
        for job in [*self.running]:
            if len(self.running) > 1 and self.chance(0.08):
                other = next(j for j in self.running if j is not job)
                for role in self.roles(job):
                    tokens = job.computed if role == "sample" else 0
                    self.events.append(
                        PreemptEvent(
                            self.step, self.now, job.id, 0, job.slot, "kv", other.id, 0, tokens,
                            len(job.token_times), role,
                        )
                    )  # fmt: skip
                self.truth.preemptions.append(self.now)
                self.truth.moves.append((self.now, -len(self.roles(job)), 1))
                job.slot, job.is_decoding, job.lost = -1, False, job.computed
                job.num_lost_again += 1
                self.running.remove(job)
                self.queue.append(job)

    def compute(self, chasing):
        """Compute parts of prompts; return how many tokens, and who is to be given one."""
        computed, starting = 0, []
        for job in chasing:
            tokens = self.random.randint(0, job.left)
            if not tokens:
                continue
            job.left -= tokens
            job.computed += tokens
            computed += tokens
            for role in self.roles(job):
                self.events.append(
                    PrefillEvent(self.step, self.now, job.id, 0, job.slot, tokens, job.left, role)
                )
            if not job.left:
                starting.append(job)
        return computed, starting

    def admit(self):
        computed, starting = 0, []
        while self.queue and len(self.running) < self.num_slots:
            job = self.queue[0]
            if self.running and self.chance(0.25):
                reason = self.random.choice(HOLDS)
                if (job, reason) != self.hold:
                    self.hold = (job, reason)
                    self.events.append(BlockedEvent(self.step, self.now, job.id, 0, reason, 3))
                break
            self.queue.pop(0)
            if self.hold and self.hold[0] is job:
                self.hold = None
            tokens = self.let_in(job)
            computed += tokens
            if not job.left:
                starting.append(job)
        return computed, starting

    def let_in(self, job):
        known = job.prompt + len(job.token_times)
        cached = self.random.randint(0, known - 1)
        job.left = self.random.choice([0, self.random.randint(0, known - cached - 1)])
        job.slot = min({*range(self.num_slots)} - {j.slot for j in self.running})
        for role in self.roles(job):
            self.events.append(
                AdmitEvent(
                    self.step, self.now, job.id, 0, job.slot, "empty", role,
                    len(job.token_times), cached, job.left,
                )
            )  # fmt: skip
        truth = self.truth
        if job.admitted:
            truth.asked_again += known
            truth.found_again += cached
            truth.recomputed += max(0, job.lost - cached)
        else:
            truth.asked += known
            truth.found += cached
        truth.moves.append((self.now, len(self.roles(job)), -1))
        job.admitted.append(self.now)
        job.computed = known - job.left
        self.running.append(job)
        return known - cached - job.left

    def give(self, jobs, end):
        """Give each of `jobs` a token, or an end; return how many tokens were given."""
        total = 0
        for job in jobs:
            if job.outcome == "error" and len(job.token_times) == job.length - 1:
                self.finish(job, self.step, self.now, "error", end)
                continue
            tokens = 1
            if self.chance(0.1) and len(job.token_times) + 3 < job.length:
                tokens += 2
                self.events.append(JumpEvent(self.step, self.now, job.id, 0, job.slot, 2))
            job.token_times += [end] * tokens
            job.computed += tokens
            job.is_decoding = True
            total += tokens
            if len(job.token_times) == job.length:
                reason = "stop" if job.outcome == "stop" else "length"
                self.finish(job, self.step, self.now, reason, end)
        return total

    def note_step(self, start, end, decodes, prefills, num_tokens):
        figures = {
            "start": start,
            "end": end,
            "decodes": decodes,
            "prefills": prefills,
            "blocks": self.random.randint(0, TOTAL_BLOCKS),
            "prefill_padding": self.random.randint(0, 9),
            "decode_padding": self.random.randint(0, 99),
            "num_tokens": num_tokens,
        }
        self.truth.steps.append(figures)
        self.unstreamed.append(figures)

    def take_step_events(self):
        """Write the event of the steps that were not told of."""
        if not self.unstreamed:
            return
        names = ["end", "decodes", "prefills", "decodes", "blocks"]
        names += ["prefill_padding", "decode_padding"]
        columns = [[figures[name] for figures in self.unstreamed] for name in names]
        told = StepsEvent(self.step - len(self.unstreamed), *columns)
        place = self.num_events if self.chance(0.5) else len(self.events)
        self.events.insert(place, told)  # before the events of its last step, or after them
        self.unstreamed = []
