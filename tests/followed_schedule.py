"""What must be true of a schedule, followed event by event: a model made of events alone.

A unit is what is admitted, preempted and ended together; the documentation says of what it
consists.  All of this is for Engine, but it knows nothing of how that works.
"""

from collections import Counter
from math import inf
from typing import NamedTuple

from msgspec import structs
from reference_policies import policy_key
from scheduling_settings import blocks_needed

from batcher.events import (
    AdmitEvent,
    ArriveEvent,
    BlockedEvent,
    DropEvent,
    FinishEvent,
    JumpEvent,
    PreemptEvent,
    PrefillEvent,
    StepsEvent,
)
from batcher.request import is_plain


class Row(NamedTuple):
    """A sequence: a sample, a beam or a negative prompt."""

    id: str
    index: int
    role: str


Unit = tuple[Row, ...]  # the head_row first


def units_of(request, request_id):
    """Return what waits on behalf of a request, by the documentation."""
    if request.output_limit == 0 and request.prompt_logprobs is None:
        return [(Row(request_id, index, "sample"),) for index in range(request.n)]
    if request.num_beams > 1 and request.output_limit:
        return [tuple(Row(request_id, index, "beam") for index in range(request.num_beams))]
    roles = ["sample"] if request.cfg_scale == 1 else ["sample", "negative"]
    return [
        tuple(Row(request_id, index, role) for role in roles)
        for index in range((request.best_of or request.n) if request.output_limit else request.n)
    ]


class FollowedSchedule:
    """Who waits, who runs and where, from events; each event is checked against that."""

    def __init__(self, num_slots, settings):
        self.num_slots, self.settings = num_slots, settings
        self.requests = {}
        self.drops = Counter()
        self.pending = {}  # by head_row, as the next two
        self.waiting = {}
        self.running = {}
        self.holders = {}  # slot -> sequence
        self.arrived = {}
        self.queue_numbers = {}
        self.admitted = {}  # for the last time
        self.preempted = {}  # for the last time
        self.left = {}  # tokens still to be computed, of running rows
        self.jumped = Counter()
        self.to_admit = []  # what is left of a unit that is being admitted,
        self.to_end = []  # and of one that is ending,
        self.to_preempt = []  # and of one that is preempted
        self.hold = None
        self.times = [0.0]
        self.computed = []  # tokens of each step, as far as that has been told
        self.blocks = []
        self.ends = []

    def add(self, request, request_id):
        self.requests[request_id] = request
        self.pending |= {unit[0]: unit for unit in units_of(request, request_id)}

    def follow(self, event):
        """Check one event, and take note of it."""
        assert not self.to_admit or isinstance(event, AdmitEvent), "a unit was torn apart"
        assert not self.to_preempt or isinstance(event, PreemptEvent), "a unit was torn apart"
        if isinstance(event, ArriveEvent):
            self._follow_arrival(event)
        elif isinstance(event, AdmitEvent):
            self._follow_admission(event)
        elif isinstance(event, PrefillEvent):
            self._follow_chunk(event)
        elif isinstance(event, PreemptEvent):
            self._follow_preemption(event)
        elif isinstance(event, BlockedEvent):
            self._follow_hold(event)
        elif isinstance(event, StepsEvent):
            self._follow_steps(event)
        elif isinstance(event, FinishEvent):
            self._follow_end(event)
        elif isinstance(event, DropEvent):
            self.drops[event.id] += 1
        else:
            self._follow_row(event)
        if not isinstance(event, ArriveEvent | StepsEvent | DropEvent) and (
            not isinstance(event, FinishEvent) or event.slot is not None
        ):
            self.times.append(event.time)  # the others happen at a time which may be long past

    def check_no_slot_is_wasted(self, now):
        """Make sure that no slot is empty while somebody could have it: invariant 5."""
        num_free = self.num_slots - len(self.holders)
        head = self.head(now)
        if head is None or len(self.waiting[head]) > num_free:
            return
        if self.settings.policy == "lpm" and max(map(len, self.waiting.values())) > num_free:
            return  # only the cache knows who is the first
        assert self.hold is not None, "a slot is empty for no reason (invariant 5)"
        held_back = (self.hold.id, self.hold.index)
        assert held_back in {head_row[:2] for head_row in self.waiting}
        if self.settings.policy != "lpm":
            assert head[:2] == held_back, "somebody else is held back"

    def head(self, now):
        """Return who is to be admitted first, if all that wait are sorted anew."""
        if not self.waiting:
            return None
        oldest = min(self.waiting, key=self.queue_numbers.__getitem__)
        if self.settings.policy != "fcfs":
            has_aged = now - self.arrived[oldest].time >= self.settings.aging
            return oldest if has_aged else min(self.waiting, key=self._key)
        return oldest

    def _key(self, head_row):
        request, arrival = self.requests[head_row.id], self.arrived[head_row]
        key = policy_key(
            self.settings.policy,
            num_prompt_tokens=arrival.prompt_tokens,
            max_tokens=arrival.max_tokens,
            priority=request.priority,
            deadline=request.deadline,
        )
        return key, self.queue_numbers[head_row]

    def _urgency(self, head_row):
        request = self.requests[head_row[0]]
        if self.settings.preempt_for == "priority":
            return request.priority
        return inf if request.deadline is None else request.deadline

    def _goes_first(self, head_row):
        """Whether one that waits may be let in ahead of the queue: who is less urgent gives way.

        Where nothing but priorities and slots decides, those that are before it cannot come.
        """
        if self.settings.preempt_for is None:
            return False
        urgency = self._urgency(head_row[:2])
        lost = [row[:2] for row in self.preempted if row in self.waiting]
        others = [*self.running, *lost, *self.waiting]
        if not any(urgency < self._urgency(row[:2]) for row in others):
            return False
        if self.settings.preempt_for != "priority" or self.settings.kv_blocks is not None:
            return True
        first = {}  # of the waiting that are as urgent; others let it go first
        for row in sorted(self.waiting, key=self.queue_numbers.__getitem__):
            first.setdefault(self._urgency(row[:2]), row)
        before = [row for other, row in first.items() if other < urgency]
        return first[urgency] == head_row and all(map(self._lacks_slots, before))

    def _lacks_slots(self, head_row):
        urgency, num_needed = self._urgency(head_row[:2]), len(self.waiting[head_row])
        held = sum(
            len(unit) for row, unit in self.running.items() if self._urgency(row[:2]) <= urgency
        )
        return held + num_needed > self.num_slots

    def _follow_arrival(self, event):
        head_row = next(row for row in self.pending if row[:2] == (event.id, event.index))
        self.waiting[head_row] = self.pending.pop(head_row)
        self.arrived[head_row] = event
        self.queue_numbers[head_row] = len(self.queue_numbers)

    def _follow_admission(self, event):
        row = Row(event.id, event.index, event.role)
        if not self.to_admit:
            if self.settings.policy != "lpm" and not self._goes_first(row):
                assert row == self.head(event.time), "not the first of the queue (invariant 5)"
            if self.settings.batching == "static":
                before = [held for held in self.holders.values() if held in self.admitted]
                steps = {self.admitted[held].step for held in before}
                assert steps <= {event.step}, "a static batch has grown"
            self.running[row] = self.waiting.pop(row)
            self.to_admit = list(self.running[row])
            self.hold = None
        assert row == self.to_admit.pop(0), "groups are admitted together, in order"
        assert event.slot not in self.holders, "a slot with two sequences (invariant 2)"
        assert row not in self.holders.values(), "a sequence with two slots (invariant 2)"
        assert event.slot == min(self._free_for(event)), "not the lowest free slot"
        self.holders[event.slot] = row
        self.admitted[row], self.left[row] = event, event.left
        before_now = self.preempted.pop(row, None)
        assert event.generated == (before_now.generated if before_now else 0), "tokens are lost"
        assert before_now is None or before_now.step < event.step, "it gave way for nothing"
        if is_plain(self.requests[row.id]):
            self._check_first_chunk(event, self.arrived[row].prompt_tokens + event.generated)

    def _free_for(self, event):
        """Return the slots that were free when one was given to a sequence.

        What is preempted in a step is told before who is let in, but may happen later: for a row
        that lacks a block, or for somebody more urgent who has yet to come.
        """
        waiting = {head_row[:2] for head_row in self.waiting}
        later = {
            lost.slot
            for lost in self.preempted.values()
            if lost.step == event.step
            and (lost.reason == "kv" or (lost.for_id, lost.for_index) in waiting)
        }
        return set(range(self.num_slots)) - set(self.holders) - later

    def _check_first_chunk(self, event, num_known):
        num_known = max(num_known, 1)  # an empty prompt computes the token that begins every text
        assert event.cached < num_known, "nothing was left to compute"
        num_computed = num_known - event.cached - event.left
        threshold = self.settings.long_prefill_threshold
        assert threshold is None or num_computed <= threshold, "too long a chunk (invariant 11)"
        assert num_computed >= 0

    def _follow_chunk(self, event):
        row = self.holders[event.slot]
        assert row == (event.id, event.index, event.role), "not who holds the slot"
        threshold = self.settings.long_prefill_threshold
        if threshold is not None:
            assert event.tokens <= max(threshold, 2), "a chunk is too long (invariant 11)"
            if row.role == "sample" and self.requests[row.id].cfg_scale == 1:
                assert event.tokens <= threshold, "a chunk is too long (invariant 11)"
        assert event.tokens > 0
        assert event.left >= 0
        self.left[row] = event.left

    def _follow_preemption(self, event):
        row = Row(event.id, event.index, event.role)
        assert self.holders.pop(event.slot) == row, "not who held it"
        beneficiary = (event.for_id, event.for_index)
        if event.reason == "kv":
            assert self.settings.kv_blocks is not None, "there are blocks enough"
            assert self.settings.capacity != "no-evict", "that was not to happen"
            assert beneficiary in {held[:2] for held in (*self.holders.values(), row)}
        else:
            assert event.reason == self.settings.preempt_for
            assert beneficiary in {head_row[:2] for head_row in self.waiting}
            assert self._urgency(beneficiary) < self._urgency(row[:2]), "it is as urgent"
        if self.settings.preempt_for is not None:
            assert self._urgency(beneficiary) <= self._urgency(row[:2]), "it takes it back"
        if not self.to_preempt:
            self.to_preempt = list(self.running[row])
            self.waiting[row] = self.running.pop(row)
        assert row == self.to_preempt.pop(0), "groups are preempted together, in order"
        self.preempted[row] = event

    def _follow_hold(self, event):
        head_row = next(row for row in self.waiting if row[:2] == (event.id, event.index))
        assert len(self.waiting[head_row]) <= self.num_slots
        assert len(self.holders) < self.num_slots, "no slot was free"
        if self.settings.policy != "lpm":
            assert head_row == self.head(event.time), "not the first of the queue"
        if event.reason == "kv":
            assert event.blocks > 0
            assert self.settings.kv_blocks is not None
        elif event.reason == "batch":
            assert self.settings.batching == "static"
            assert self.holders
        elif event.reason == "tokens":
            assert self.settings.max_batch_tokens is not None
        self.hold = event

    def _follow_steps(self, event):
        assert event.step == len(self.computed), "steps are left out, or told twice"
        parts = [part for part in structs.astuple(event)[1:] if part is not None]
        assert len({len(part) for part in parts}) == 1
        computed = [sum(pair) for pair in zip(event.decodes, event.prefills, strict=True)]
        budget = self.settings.max_batch_tokens
        assert budget is None or max(computed) <= budget, "too many tokens (invariant 11)"
        assert max(event.rows) <= self.num_slots
        kv_blocks = self.settings.kv_blocks
        assert kv_blocks is None or max(event.blocks) <= kv_blocks, "invariant 10"
        assert min(*event.prefill_padding, *event.decode_padding, 0) == 0
        self.computed += computed
        self.blocks += event.blocks
        self.ends += event.ends
        assert self.ends == sorted(self.ends), "invariant 4"

    def _follow_row(self, event):
        row = self.holders[event.slot]
        assert row[:2] == (event.id, event.index)
        if isinstance(event, JumpEvent):
            self.jumped[row] += event.tokens
        else:
            beams = self.running[row._replace(index=0)]
            assert beams[event.parent] in self.holders.values()

    def _follow_end(self, event):
        row = Row(event.id, event.index, event.role)
        if event.slot is None:
            self._follow_end_without_slot(row, event)
            return
        assert self.holders.pop(event.slot) == row, "not who held it (invariant 3)"
        unit = self.running.get(row)
        if unit is not None:
            del self.running[row]
            self.to_end = list(unit)
        assert row == self.to_end.pop(0), "groups end together, in order"
        if row.role == "negative" or (row.role == "beam" and row.index >= self.requests[row.id].n):
            assert (event.reason, event.tokens) == ("unused", 0)
        if event.reason in {"stop", "length"}:
            assert self.left[row] == 0 or row.role != "sample", "it could not have had a token"

    def _follow_end_without_slot(self, row, event):
        request = self.requests[row.id]
        is_first = row in self.pending or row in self.waiting
        assert is_first or row.role != "sample"
        is_empty = row in self.waiting and request.output_limit == 0
        if event.reason == "error":
            needed = blocks_needed(request, self.settings.block_size)
            assert request.session is not None or needed > (self.settings.kv_blocks or inf)
        else:
            assert event.reason in {"aborted", "unused"} or is_empty, "no legal move (invariant 3)"
        self.pending.pop(row, None)
        self.waiting.pop(row, None)
        if self.hold is not None and row[:2] == (self.hold.id, self.hold.index):
            self.hold = None
