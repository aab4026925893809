"""The schedule of a workload by the slowest obvious means: its events, and the truth of them."""

from bisect import bisect_left
from typing import NamedTuple

from hypothesis import strategies as st

from batcher.events import (
    AdmitEvent,
    ArriveEvent,
    ArriveReason,
    EndEvent,
    Event,
    FinishEvent,
    RunEvent,
)
from batcher.result import FinishReason
from batcher.trace.timeline import Timeline


class Job(NamedTuple):
    """A request, reduced to what a schedule depends on."""

    id: str
    length: int
    arrival: float = 0.0
    reason: ArriveReason = "input"
    outcome: FinishReason = "length"


class Row(NamedTuple):
    """One step as the scheduler saw it."""

    now: float
    slots: list[str | None]
    waiting: int


class Played(NamedTuple):
    """The events of a run, and its steps by hand."""

    events: list[Event]
    rows: list[Row]


DESIGN_JOBS = [Job("a", 3), Job("b", 1), Job("c", 2), Job("d", 4)]


def jobs_of(*lengths):
    return [Job(f"r{number}", length) for number, length in enumerate(lengths)]


def play(jobs, batch):
    """Run `jobs`, sorted by arrival; a job is read only when a slot is free for it."""
    events = [RunEvent(batch=batch, model="test", settings={})]
    rows = []
    starts = []
    unread = list(jobs)
    queue = []
    slots = [None] * batch
    now = 0.0
    while unread or queue or any(slots):
        step = len(rows)
        starts[step:] = [now]
        free = [slot for slot in range(batch) if slots[slot] is None]
        while len(free) > len(queue) and unread and unread[0].arrival <= now:
            job = unread.pop(0)
            arrived = bisect_left(starts, job.arrival)
            events.append(ArriveEvent(arrived, job.arrival, job.id, 0, job.reason, 5, job.length))
            if job.length:
                queue.append(job)
            else:
                finish = FinishEvent(arrived, now, job.id, 0, None, job.outcome, None, 0)
                events.append(finish)
        for slot, job in zip(free, queue, strict=False):
            used = bool(rows) and rows[-1].slots[slot] is not None
            reason = "refill" if used else "empty"
            events.append(AdmitEvent(step, now, job.id, 0, slot, reason))
            slots[slot] = (job, 0)
        del queue[: len(free)]
        if not any(slots):
            now = max(now, unread[0].arrival) if unread else now
            continue
        unseen = sum(job.arrival <= now and job.length > 0 for job in unread)
        rows.append(Row(now, [held and held[0].id for held in slots], len(queue) + unseen))
        for slot, held in enumerate(slots):
            if held is not None:
                job, done = held
                slots[slot] = (job, done + 1)
                if done + 1 == job.length:
                    tokens = 0 if job.outcome == "error" and job.length == 1 else job.length
                    events.append(
                        FinishEvent(step, now, job.id, 0, slot, job.outcome, None, tokens)
                    )
                    slots[slot] = None
        now += 1.0
    num_tokens = sum(event.tokens for event in events if isinstance(event, FinishEvent))
    events.append(EndEvent(len(rows), now, num_tokens, len(jobs)))
    return Played(events, rows)


def timeline_of(jobs, batch=2):
    return Timeline.from_events(play(jobs, batch).events)


@st.composite
def workloads(draw):
    """Draw up to a dozen jobs in order of arrival, some of length 0, some alike in their times."""
    arrivals = draw(st.lists(st.sampled_from([0.0, 0.5, 1.0, 3.0, 7.25, 8.0, 20.0]), max_size=12))
    return [
        Job(
            f"r{number}",
            draw(st.integers(0, 6)),
            arrival,
            draw(st.sampled_from(["input", "follow"])),
            draw(st.sampled_from(["length", "stop", "error", "aborted"])),
        )
        for number, arrival in enumerate(sorted(arrivals))
    ]
