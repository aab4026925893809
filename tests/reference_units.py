"""A run of samples, partners and beams by the slowest obvious means: its events, and the truth."""

from random import Random
from typing import NamedTuple

from hypothesis import strategies as st

from batcher.events import (
    AdmitEvent,
    ArriveEvent,
    ArriveReason,
    EndEvent,
    Event,
    FinishEvent,
    ForkEvent,
    JumpEvent,
    RunEvent,
)
from batcher.result import FinishReason

PROMPT_TOKENS, MAX_TOKENS = 5, 99


class Unit(NamedTuple):
    """What waits and is admitted together: a sample, with its partner or not, or all beams.

    rows: (index, role) of its sequences, in order.  num_results: how many of them have one.
    """

    id: str
    rows: list[tuple[int, str]]
    length: int
    num_results: int = 1
    arrival: float = 0.0
    reason: ArriveReason = "input"
    outcome: FinishReason = "length"


class Stay(NamedTuple):
    """A sequence in its slot."""

    slot: int
    id: str
    index: int
    role: str
    start: int
    end: int
    outcome: str
    jumped: int
    forks: list[tuple[int, int]]


class UnitRun(NamedTuple):
    """The events of a run, and what is so: by step, by sequence, and why slots were idle."""

    events: list[Event]
    labels: list[list[str | None]]
    waiting: list[int]
    stays: list[Stay]
    idle: dict[str, int]


def samples(name, *lengths, **fields):
    return [Unit(name, [(i, "sample")], length, **fields) for i, length in enumerate(lengths)]


def guided(name, *lengths, **fields):
    return [
        Unit(name, [(i, "sample"), (i, "negative")], length, **fields)
        for i, length in enumerate(lengths)
    ]


def beams(name, num_beams, length, **fields):
    return [Unit(name, [(i, "beam") for i in range(num_beams)], length, **fields)]


def label(name, index, role):
    return name + ["", f"#{index}"][index > 0] + ["", "~"][role == "negative"]


class _Running:
    def __init__(self, unit, slots, start):
        self.unit, self.slots, self.start = unit, slots, start
        self.jumped = [0] * len(slots)
        self.forks = [[] for _ in slots]


def play_units(units, batch, seed=None):
    """Run `units`, sorted by arrival, first come first served; `seed` is that of jumps and forks.

    Without a seed there are none.  No unit has more rows than the batch has slots.
    """
    rng = Random(seed)
    run = UnitRun([RunEvent(batch=batch, model="test", settings={})], [], [], [], {})
    unread, queue, running = list(units), [], []
    idle_steps, admissions = [], []  # (step, time, number of slots), (step, unit)
    now = 0.0
    while unread or queue or running:
        step = len(run.labels)
        while unread and unread[0].arrival <= now:
            unit = unread.pop(0)
            index = unit.rows[0][0]
            run.events.append(
                ArriveEvent(
                    step, unit.arrival, unit.id, index, unit.reason, PROMPT_TOKENS, MAX_TOKENS
                )
            )
            queue.append(unit)
        held = {slot for one in running for slot in one.slots}
        free = [slot for slot in range(batch) if slot not in held]
        while queue and len(queue[0].rows) <= len(free):
            unit = queue.pop(0)
            taken, free = free[: len(unit.rows)], free[len(unit.rows) :]
            for slot, (index, role) in zip(taken, unit.rows, strict=True):
                run.events.append(AdmitEvent(step, now, unit.id, index, slot, "empty", role))
            running.append(_Running(unit, taken, step))
            admissions.append((step, unit))
        if not running:
            now = max(now, unread[0].arrival)
            continue
        idle_steps.append((step, now, len(free)))
        run.labels.append(_labels(running, batch))
        run.waiting.append(len(queue))
        for one in list(running):
            if seed is not None:
                _jump(one, step, now, rng, run)
            if step - one.start + 1 == one.unit.length:
                running.remove(one)
                _finish(one, step, now, run)
            elif seed is not None and one.unit.rows[0][1] == "beam":
                _fork(one, step, now, rng, run)
        now += 1.0
    _count_idle(idle_steps, admissions, run.idle)
    run.events.append(EndEvent(len(run.labels), now, 0, len({unit.id for unit in units})))
    return run


def _labels(running, batch):
    row = [None] * batch
    for one in running:
        for slot, (index, role) in zip(one.slots, one.unit.rows, strict=True):
            row[slot] = label(one.unit.id, index, role)
    return row


def _jump(one, step, now, rng, run):
    if one.unit.rows[0][1] == "sample" and rng.random() < 0.3:
        num_tokens, (index, _) = rng.randint(1, 4), one.unit.rows[0]
        one.jumped[0] += num_tokens
        run.events.append(JumpEvent(step, now, one.unit.id, index, one.slots[0], num_tokens))


def _fork(one, step, now, rng, run):
    for beam, slot in enumerate(one.slots):
        parent = rng.randrange(len(one.slots))
        if parent != beam:
            one.forks[beam].append((step, parent))
            run.events.append(ForkEvent(step, now, one.unit.id, beam, slot, parent))


def _finish(one, step, now, run):
    unit = one.unit
    for number, (slot, (index, role)) in enumerate(zip(one.slots, unit.rows, strict=True)):
        outcome, tokens = "unused", 0
        if number < unit.num_results:
            outcome, tokens = unit.outcome, unit.length + one.jumped[0]
        run.events.append(FinishEvent(step, now, unit.id, index, slot, outcome, None, tokens, role))
        run.stays.append(
            Stay(
                slot,
                unit.id,
                index,
                role,
                one.start,
                step + 1,
                outcome,
                one.jumped[number],
                one.forks[number],
            )
        )


def _count_idle(idle_steps, admissions, idle):
    """Ask of every step which unit would have filled its idle slots."""
    idle |= {"tail": 0, "arrivals": 0, "empty_queue": 0, "too_few": 0}
    for step, now, num_idle in idle_steps:
        later = next((unit for admitted, unit in admissions if admitted > step), None)
        if later is None:
            cause = "tail"
        elif later.arrival <= now:
            cause = "too_few"
        else:
            cause = "arrivals" if later.reason == "input" else "empty_queue"
        idle[cause] += num_idle


@st.composite
def unit_workloads(draw):
    """Draw requests of all kinds in order of arrival, and a batch that has room for each."""
    batch = draw(st.integers(1, 6))
    units = []
    arrivals = draw(st.lists(st.sampled_from([0.0, 0.5, 1.0, 3.0, 7.25, 20.0]), max_size=7))
    lengths = st.integers(1, 5)
    for number, arrival in enumerate(sorted(arrivals)):
        fields = {
            "arrival": arrival,
            "reason": draw(st.sampled_from(["input", "follow"])),
            "outcome": draw(st.sampled_from(["length", "stop", "error", "aborted"])),
        }
        kind = draw(st.sampled_from([samples, guided, beams] if batch > 1 else [samples]))
        if kind is beams:
            num_beams = draw(st.integers(2, batch))
            num_results = draw(st.integers(1, num_beams))
            units += beams(
                f"r{number}", num_beams, draw(lengths), num_results=num_results, **fields
            )
        else:
            units += kind(f"r{number}", *draw(st.lists(lengths, min_size=1, max_size=3)), **fields)
    return units, batch
