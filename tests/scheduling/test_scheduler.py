"""What the scheduler decides step by step is what follows from sorting and searching all anew."""

from typing import NamedTuple

import pytest
from examples import examples
from hypothesis import event, example, given
from hypothesis import strategies as st
from msgspec.structs import replace
from scheduling_settings import scheduling_settings
from slow_scheduler import SlowScheduler
from slow_units import Job, SlowPlan

from batcher.lifecycle import ABORT, FINISH, State
from batcher.scheduling.blocks import NO_NODE
from batcher.scheduling.scheduler import Scheduler
from batcher.scheduling.sequence import Schedulable
from batcher.settings import SchedulingSettings

PROMPTS = st.builds(
    lambda shared, own: (*range(100, 100 + shared), *own),
    st.integers(0, 14),
    st.lists(st.integers(0, 2), max_size=4),
)
MAX_STEPS = 3000


class Workload(NamedTuple):
    """Jobs in order of arrival, and who is aborted when: step -> place among the living."""

    jobs: list[Job]
    num_slots: int
    settings: SchedulingSettings
    aborts: dict[int, int]


@st.composite
def workloads(draw):
    num_slots = draw(st.integers(2, 5))
    block_size = draw(st.sampled_from([1, 2, 3, 4]))
    arrivals = draw(st.lists(st.sampled_from([0.0, 0.0, 1.0, 2.5, 4.0, 30.0]), max_size=10))
    jobs = [
        Job(
            f"j{number}",
            draw(PROMPTS),
            draw(st.integers(1, 12)),
            arrival,
            draw(st.integers(0, 2)),
            draw(st.sampled_from([None, arrival + 3.0, arrival + 20.0])),
            draw(st.sampled_from([None, None, "salt"])),
            draw(st.sampled_from([None, None, None, (), (100, 101, 102), (7,) * 6])),
        )
        for number, arrival in enumerate(sorted(arrivals))
    ]
    least = max((num_blocks(job, block_size) for job in jobs), default=1)
    blocks = st.one_of(st.integers(least, least + 3), st.integers(least, 3 * least))
    chosen = draw(scheduling_settings(num_slots, blocks, block_size))
    aborts = draw(st.dictionaries(st.integers(0, 40), st.integers(0, 9), max_size=3))
    return Workload(jobs, num_slots, chosen, aborts)


def num_blocks(job, block_size):
    prompts = [job.prompt] if job.negative is None else [job.prompt, job.negative]
    most = [max(len(prompt) + job.max_tokens - 1, 1) for prompt in prompts]
    return sum(-(-num_tokens // block_size) for num_tokens in most)


class Play:
    """Runs a workload through both schedulers, side by side."""

    def __init__(self, workload, *, has_names=True):
        self.workload, self.has_names = workload, has_names
        self.slow = SlowScheduler(workload.num_slots, workload.settings)
        contents = self.contents if has_names else None
        self.scheduler = Scheduler(workload.num_slots, workload.settings, contents)
        self.firsts = {}
        self.jobs = {job.id: job for job in workload.jobs}
        self.unread = list(workload.jobs)
        self.step, self.now = 0, 0.0

    def contents(self, row, start, stop, size):
        job = self.jobs[row.id]
        prompt = job.negative if row.role == "negative" else job.prompt
        tokens = [
            prompt[place] if place < len(prompt) else (row.id, row.role, place - len(prompt))
            for place in range(start, stop)
        ]
        return (tuple(tokens[first : first + size]) for first in range(0, len(tokens), size))

    def run(self):
        while self.unread or self.slow.waiting or self.slow.running:
            assert self.step < MAX_STEPS, "it hangs"
            if not (self.slow.waiting or self.slow.running):
                self.now = max(self.now, self.unread[0].arrival)
            while self.unread and self.unread[0].arrival <= self.now:
                self.push(self.unread.pop(0))
            self.one_step()
        assert self.scheduler.queue.num_waiting == self.scheduler.batch.num_occupied == 0
        assert self.scheduler.kv_cache.pool.num_used == 0
        assert self.scheduler.batch.num_decoding == 0
        assert self.scheduler.batch.ending == {}

    def push(self, job):
        self.slow.push(job)
        first = make_sequence(job)
        self.firsts[job.id] = first
        self.scheduler.queue.push(first)

    def one_step(self):
        plan = self.scheduler.schedule(self.step, self.now)
        expected = self.slow.plan(self.now)
        expected_hold, expected.hold = expected.hold, None
        assert summary(plan) == expected
        is_told = plan.blocked is not None and plan.blocked.reason == "preemption"
        assert plan.preempted or not is_told, "nobody was preempted"
        is_alone = self.workload.settings.preempt_for is None
        assert not (is_alone and plan.preempted and plan.admitted), "some come, and others go"
        if expected_hold is not None:
            self.check_hold(expected_hold)
        self.check_blocks(plan)
        due = self.scheduler.update(plan)
        done = self.slow.end_step(expected)
        assert sorted(due) == done
        for slot in done:
            self.leave(slot, FINISH)
        if self.has_names:
            self.scheduler.check()
        self.step += 1
        self.now += 1.0
        self.abort_somebody()
        event(f"preempts: {bool(expected.preempted)}")

    def check_hold(self, expected):
        blocked = self.scheduler.blocked
        assert blocked is not None, "nothing is said of who is held back"
        assert (blocked.first.id, blocked.reason) == expected

    def check_blocks(self, plan):
        kv_cache, slow = self.scheduler.kv_cache, self.slow.pool
        assert kv_cache.pool.num_free == len(slow.free)
        assert sum(node != NO_NODE for node in kv_cache.pool.nodes) == len(slow.keys)
        for unit in self.slow.running:
            first = self.firsts[unit.name]
            for row, other in zip(unit.rows, first.computed_group, strict=True):
                assert not self.has_names or len(other.block_table) == len(row.blocks)
                assert other.num_cached_tokens == row.num_cached_tokens
                source = other.cached_from
                assert (source and (source.id, source.role)) == row.cached_from
                assert self.scheduler.batch.slots[other.slot] is other
                assert other.slot == unit.slots[unit.rows.index(row)]
        budget = self.workload.settings.max_batch_tokens
        num_computed_tokens = sum(plan.num_scheduled_tokens.values())
        if plan.is_decode_step:
            fresh = sum(len(first.computed_group) for first in plan.prefill_finished)
            num_computed_tokens += self.scheduler.batch.num_decoding - fresh
        assert budget is None or num_computed_tokens <= budget, "invariant 11"

    def leave(self, slot, why):
        first = self.scheduler.batch.slots[slot]
        self.slow.leave(next(unit for unit in self.slow.running if slot in unit.slots))
        self.scheduler.release(first, self.step, why)

    def abort_somebody(self):
        place = self.workload.aborts.get(self.step)
        units = [*self.slow.running, *self.slow.waiting]
        if place is None or not units:
            return
        unit = units[place % len(units)]
        if unit in self.slow.running:
            self.leave(unit.slots[0], ABORT)
        else:
            self.slow.waiting.remove(unit)
            self.scheduler.queue.take(self.firsts[unit.name])


def make_sequence(job):
    """Return what stands for a job in the scheduler, waiting."""

    def row(role, prompt):
        return Schedulable(
            id=job.id,
            role=role,
            arrival_time=job.arrival,
            num_prompt_tokens=len(prompt),
            num_tokens=len(prompt),
            max_tokens=job.max_tokens,
            priority=job.priority,
            deadline=job.deadline,
            cache_salt=job.salt,
            state=State.WAITING,
            block_table=[],
        )

    first = row("sample", job.prompt)
    if job.negative is not None:
        first.others, first.num_slots = (row("negative", job.negative),), 2
    return first


def summary(plan):
    """Return a plan by names, without the hold."""
    chunks = {
        (row.id, row.role): (row.num_computed_tokens - num_tokens, num_tokens)
        for row, num_tokens in plan.num_scheduled_tokens.items()
    }
    return SlowPlan(
        [
            (
                preemption.first.id,
                preemption.beneficiary.id,
                preemption.reason,
                {
                    (row.id, row.role): number
                    for row, number in preemption.num_computed_tokens.items()
                },
            )
            for preemption in plan.preempted
        ],
        [first.id for first in plan.admitted],
        chunks,
        [first.id for first in plan.prefill_finished],
        plan.is_decode_step,
    )


WATERMARK = SchedulingSettings(kv_blocks=10, block_size=4, capacity="watermark", watermark=0.9)
LAST_ONE_HOLDS_NO_BLOCK = Workload(
    [Job("nothing", (), 1), Job("large", (5,) * 16, 2)], 2, WATERMARK, {}
)
NO_EVICT = SchedulingSettings(
    policy="ljf", kv_blocks=13, block_size=3, capacity="no-evict", prefix_cache=False
)
SOMEBODY_ELSE_IN_BETWEEN = Workload(
    [
        Job("short", (1, 2, 3), 2, negative=(7,) * 6),
        Job("long", (1,) * 8, 8, negative=(7,) * 6),
        Job("middle", (1, 2, 3), 12, 1.0),
        Job("late", (2,) * 8, 10, 2.5, negative=(7,) * 6),
    ],
    3,
    NO_EVICT,
    {},
)

ONE_OF_TWO_HAS_NOTHING_TO_COMPUTE = Workload(
    [Job("half", (), 3, negative=(7,) * 6)],
    2,
    SchedulingSettings(kv_blocks=10, block_size=4, long_prefill_threshold=2),
    {},
)

BLOCKS_OF_TWO = SchedulingSettings(
    prefill_order="prefill-first", kv_blocks=2, block_size=2, capacity="on-demand"
)
NO_ROOM_FOR_THE_LAST_TOKEN = Workload(
    [Job("first", (1,) * 3, 1), Job("one token", (1,), 1, 1.0)], 2, BLOCKS_OF_TWO, {}
)
ROOM_UNTIL_ANOTHER_GROWS = Workload(
    [Job("first", (1,) * 2, 2), Job("second", (1,) * 3, 1)], 2, BLOCKS_OF_TWO, {}
)
BOTH_PROMPTS_BEGIN_LIKE_A_VICTIM = Workload(
    [
        Job("first", (5,), 3, 0.0, 2),
        Job("victim", (5,) * 2, 2, 1.0, 2),
        Job("urgent", (5,) * 8, 1, 2.0, 1, negative=(5,) * 3),
    ],
    4,
    SchedulingSettings(preempt_for="priority", kv_blocks=11, block_size=1, capacity="on-demand"),
    {},
)


@given(workloads())
@example(BOTH_PROMPTS_BEGIN_LIKE_A_VICTIM)
@example(NO_ROOM_FOR_THE_LAST_TOKEN)
@example(ROOM_UNTIL_ANOTHER_GROWS)
@example(ONE_OF_TWO_HAS_NOTHING_TO_COMPUTE)
@example(LAST_ONE_HOLDS_NO_BLOCK)
@example(SOMEBODY_ELSE_IN_BETWEEN)
@examples(200)
def test_the_plan_of_each_step_is_one_made_from_scratch(workload):
    Play(workload).run()


ONE_THAT_HAS_JUST_GROWN_GIVES_WAY = Workload(
    [Job("less urgent", (1,), 3, priority=1), Job("urgent", (1,), 4, 1.0)],
    2,
    SchedulingSettings(policy="priority", kv_blocks=4, block_size=1),
    {},
)
ALL_HAVE_WHAT_THEY_EVER_NEED = Workload(
    [Job("one", (1, 1), 1), Job("other", (1,), 2)],
    2,
    SchedulingSettings(kv_blocks=2, block_size=1, capacity="no-evict"),
    {},
)


@given(workloads())
@example(ONE_THAT_HAS_JUST_GROWN_GIVES_WAY)
@example(ALL_HAVE_WHAT_THEY_EVER_NEED)
@examples(100)
def test_blocks_that_are_only_counted_are_as_many(workload):
    settings = replace(workload.settings, prefix_cache=False, preempt_for=None)
    if settings.policy == "lpm":
        settings = replace(settings, policy="fcfs")
    jobs = [job._replace(negative=None) for job in workload.jobs]
    Play(workload._replace(jobs=jobs, settings=settings), has_names=False).run()


@pytest.mark.parametrize(
    ("job", "fits"),
    [
        (Job("x", (1,) * 9, 8), True),  # the last token is never computed
        (Job("x", (1,) * 9, 9), False),
        (Job("x", (), 17), True),
        (Job("x", (), 18), False),
        (Job("x", (1,) * 4, 5, negative=(2,) * 4), True),
        (Job("x", (1,) * 4, 6, negative=(2,) * 4), False),
    ],
)
def test_what_no_number_of_preemptions_makes_room_for_is_told(job, *, fits):
    settings = SchedulingSettings(kv_blocks=4, block_size=4)
    scheduler = Scheduler(2, settings, Play(Workload([job], 2, settings, {})).contents)
    failure = scheduler.why_never(make_sequence(job))
    assert (failure is None) == fits
    if failure is not None:
        assert failure.code == "kv-too-small"
        assert "--kv-blocks is 4" in failure.message
