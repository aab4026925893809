"""Carries out the plan of a step: who leaves the batch, who comes into it, and what is told."""

from typing import cast

from batcher.engine.endings import Endings
from batcher.engine.journal import Journal
from batcher.events import AdmitReason
from batcher.rows.runner import ModelRunner
from batcher.scheduling.clock import Clock
from batcher.scheduling.plan import Preemption, StepPlan
from batcher.scheduling.scheduler import Scheduler
from batcher.scheduling.sequence import NEVER, NO_SLOT
from batcher.sequence import Sequence


class Boarding:
    """Brings the rows of the batch, the journal and the plan of each step together."""

    def __init__(
        self,
        scheduler: Scheduler,
        runner: ModelRunner,
        endings: Endings,
        journal: Journal,
        clock: Clock,
    ) -> None:
        self._scheduler, self._slots = scheduler, scheduler.slots
        self._runner, self._endings, self._journal = runner, endings, journal
        self._clock = clock

    def carry_out(self, plan: StepPlan) -> None:
        """Do all of a plan up to the point where the model computes."""
        step = self._clock.step
        for preemption in plan.preempted:
            self._preempt(preemption)
        for leader in plan.admitted:
            self._admit(plan, leader, step)  # type: ignore[arg-type]  # the engine has no others
        if plan.has_continued:
            self._note_chunks(plan)
        if plan.hold is not None:
            self._journal.held(plan.hold)
        waiting = cast(list[Sequence], self._scheduler.chasing)
        for leader in waiting:
            leader.has_jumped = False  # it could not go on at once
        for leader in cast(list[Sequence], plan.begun):
            leader.has_jumped = False
            if leader.first_token_step == NEVER:
                leader.first_token_step = step
                for companion in leader.companions:
                    companion.first_token_step = step
        self._runner.prepare(plan, waiting)

    def note_jump(self, leader: Sequence) -> None:
        """Take note that a row was given several tokens, all of which it computes next."""
        self._runner.note_jump(leader)
        leader.has_jumped = True

    def _preempt(self, preemption: Preemption) -> None:
        """Take a leader and its companions out of the batch, with all they have generated."""
        leader = cast(Sequence, preemption.leader)
        self._runner.suspend(leader, leader.num_generated)
        for row in preemption.num_computed:
            self._journal.preempted(row, preemption)
        self._runner.release(leader)
        for row in preemption.num_computed:
            row.slot = NO_SLOT

    def _admit(self, plan: StepPlan, leader: Sequence, step: int) -> None:
        """Begin the rows of a leader that was given slots, unless it was preempted before."""
        is_new = leader.admitted_step == NEVER
        num_forced = 0
        if leader.known is not None:
            self._endings.num_known += leader.num_slots
        elif is_new:
            num_forced = self._runner.open(leader)
            if num_forced:
                self._scheduler.lengthen_begun(plan, leader, num_forced)
        was_used_in, last_step = self._slots.was_used_in, step - 1
        for row in leader.rows:
            reason: AdmitReason = "refill" if was_used_in(row.slot, last_step) else "empty"
            if is_new:
                row.admitted_step = step
                self._journal.admitted(row, reason, 0)
            else:
                num_generated = max(row.num_generated, 0)  # below 0: a beam before the first fork
                self._journal.admitted(row, reason, num_generated)
        if num_forced:
            self._journal.jumped(leader, num_forced)

    def _note_chunks(self, plan: StepPlan) -> None:
        """Tell of the chunks of rows admitted before, but for those that jumped just now."""
        for chunk in plan.chunks:
            leader = cast(Sequence, self._scheduler.leader_of(chunk.sequence))
            goes_on = leader.has_jumped and leader.is_decoding
            if not goes_on and leader not in plan.admitted:
                self._journal.computed(chunk)
