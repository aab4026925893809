"""The schedule by the slowest obvious means: lists, sorted and searched anew in every step."""

from collections.abc import Iterator
from math import inf

from reference_policies import policy_key
from slow_pool import SlowPool
from slow_units import Job, SlowPlan, SlowRow, SlowUnit

from batcher.settings import SchedulingSettings


class SlowScheduler:
    """Plans each step from scratch, by the documentation."""

    def __init__(self, num_slots: int, settings: SchedulingSettings) -> None:
        self.settings, self.num_slots = settings, num_slots
        self.size = settings.block_size
        self.pool = SlowPool(settings.kv_blocks) if settings.kv_blocks is not None else None
        self.waiting: list[SlowUnit] = []
        self.running: list[SlowUnit] = []  # by admission
        self.num_joined = self.num_admissions = 0

    # -- orders ----------------------------------------------------------------------------------

    def key(self, unit: SlowUnit) -> tuple[float, int]:
        job = unit.job
        key = policy_key(
            self.settings.policy,
            num_prompt_tokens=len(job.prompt),
            max_tokens=job.max_tokens,
            priority=job.priority,
            deadline=job.deadline,
        )
        return key, unit.queue_number

    def is_aged(self, unit: SlowUnit) -> bool:
        is_aging = self.settings.policy != "fcfs"
        return is_aging and self.now - unit.job.arrival >= self.settings.aging

    def head(self) -> SlowUnit | None:
        if not self.waiting:
            return None
        in_order = sorted(self.waiting, key=lambda unit: unit.queue_number)
        if self.is_aged(in_order[0]):
            return in_order[0]
        if self.settings.policy == "lpm":
            return max(in_order, key=lambda unit: len(self.match(unit.rows[0])))
        return min(self.waiting, key=self.key)

    def urgency(self, unit: SlowUnit) -> float:
        deadline = inf if unit.job.deadline is None else unit.job.deadline
        return unit.job.priority if self.settings.preempt_for == "priority" else deadline

    def victim(self, units: list[SlowUnit]) -> SlowUnit:
        if self.settings.preempt_for is not None:
            return max(units, key=lambda unit: (self.urgency(unit), unit.queue_number))
        if self.settings.policy in {"fcfs", "lpm"}:
            return max(units, key=lambda unit: unit.queue_number)
        return max(units, key=lambda unit: (not self.is_aged(unit), self.key(unit)))

    # -- blocks ----------------------------------------------------------------------------------

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.size)

    def match(self, row: SlowRow) -> list[int]:
        blocks: list[int] = []
        if self.pool is None or not self.settings.has_prefix_cache:
            return blocks
        parent: object = ("root", row.job.salt)
        for start in range(0, row.num_known - self.size, self.size):
            block = self.pool.find((parent, row.tokens(start, start + self.size)))
            if block is None:
                break
            blocks.append(block)
            parent = self.pool.hashes[block]
        return blocks

    def cache_full_blocks(self, row: SlowRow, num_tokens: int) -> None:
        if self.pool is None or not self.settings.has_prefix_cache:
            return
        if row.role == "negative":
            num_tokens = min(num_tokens, len(row.prompt))
        for place in range(row.num_cached_blocks, num_tokens // self.size):
            tokens = row.tokens(place * self.size, (place + 1) * self.size)
            key = row.parent, tokens
            row.parent = self.pool.cache(row.blocks[place], key, filler=row.name)
            row.num_cached_blocks = place + 1

    def extend(self, row: SlowRow, num_tokens: int) -> None:
        while self.pool is not None and len(row.blocks) < self.blocks_for(num_tokens):
            row.blocks.append(self.pool.take())

    def make_room(self, plan: SlowPlan, unit: SlowUnit, row: SlowRow, num_tokens: int) -> bool:
        if self.pool is None:
            return True
        while self.blocks_for(num_tokens) - len(row.blocks) > len(self.pool.free):
            busy = {name for name, _ in plan.chunks} | {*plan.begun}
            fresh = [other for other in self.running if other.name in {*plan.admitted} - busy]
            if fresh and not plan.preempted:
                self.preempt(plan, fresh[-1], unit, "kv")
                plan.hold = (fresh[-1].name, "kv")
                continue
            busy |= {other.name for other in fresh}
            victim = self.victim(
                [other for other in self.running if other is unit or other.name not in busy]
            )
            self.preempt(plan, victim, unit, "kv")
            if victim is unit:
                return False
        return True

    def preempt(self, plan: SlowPlan, unit: SlowUnit, beneficiary: SlowUnit, reason: str) -> None:
        for row in unit.rows:
            if row.name in plan.chunks:
                row.num_computed_tokens = plan.chunks.pop(row.name)[0]
                for block in row.blocks[row.num_cached_tokens // self.size :]:
                    self.pool.forget(block)
                row.num_cached_blocks = len(row.blocks)  # nothing more
        lost = {row.name: row.num_computed_tokens for row in unit.rows}
        for row in unit.rows:
            self.close(row)
        self.running.remove(unit)
        self.waiting.append(unit)
        unit.is_decoding, unit.slots = False, []
        if unit.name in plan.admitted:  # so it has not been let in at all
            plan.admitted.remove(unit.name)
        else:
            plan.preempted.append((unit.name, beneficiary.name, reason, lost))

    def close(self, row: SlowRow) -> None:
        self.cache_full_blocks(row, row.num_computed_tokens)
        if self.pool is not None:
            self.pool.give_back(row.blocks)
        row.blocks, row.num_computed_tokens, row.num_cached_blocks = [], 0, 0

    # -- a step ----------------------------------------------------------------------------------

    def plan(self, now: float) -> SlowPlan:
        self.now = now
        plan = SlowPlan()
        budget = self.settings.max_batch_tokens or 10**9
        is_prefill_first = self.settings.prefill_order == "prefill-first"
        if is_prefill_first:
            left = self.let_in_urgent(plan, budget, 1)
            self.let_in(plan, self.go_on_with_all(plan, left, 1), 1)
            if plan.chunks:
                plan.decodes = False
                return plan
        for unit in self.running.copy():
            if unit.is_decoding:
                self.grow(plan, unit)
        num_decoding = sum(len(unit.rows) for unit in self.running if unit.is_decoding)
        budget -= num_decoding
        if not is_prefill_first:
            budget = self.let_in_urgent(plan, budget, 0)
        budget = self.go_on_with_all(plan, budget, 0)
        if plan.preempted or not is_prefill_first:
            self.let_in(plan, budget, 0)
        return plan

    def grow(self, plan: SlowPlan, unit: SlowUnit) -> None:
        for row in unit.rows:
            place = row.num_known - 1
            begins_block = unit in self.running and place % self.size == 0
            if begins_block and self.make_room(plan, unit, row, place + 1):
                self.extend(row, place + 1)

    def go_on_with_all(self, plan: SlowPlan, budget: int, num_kept: int) -> int:
        computed = {name for name, _ in plan.chunks}
        for unit in self.running.copy():
            if unit.name in computed or unit.is_decoding:
                continue
            if unit in self.running and budget > 0:
                budget -= self.go_on(plan, unit, budget, num_kept)
        return budget

    def let_in(self, plan: SlowPlan, budget: int, num_kept: int) -> None:
        if not plan.preempted:
            self.admit(plan, budget, num_kept)
            return
        head = self.head()
        if len(self.slots()) < self.num_slots and head is not None:
            plan.hold = (head.name, "preemption")

    def let_in_urgent(self, plan: SlowPlan, budget: int, num_kept: int) -> int:
        if plan.preempted or self.settings.preempt_for is None:
            return budget
        passed_over: list[float] = []
        gone: list[SlowUnit] = []
        for unit in self.ahead():
            urgency = self.urgency(unit)
            if any(self.urgency(other) <= urgency for other in gone):
                break
            if urgency in passed_over or not self.is_due(unit):
                continue
            victims = self.victims_of(unit)
            if victims is None:
                passed_over.append(urgency)
                continue
            freed = 0 if num_kept else sum(len(v.rows) for v in victims if v.is_decoding)
            if budget + freed < len(unit.rows):
                break
            for victim in victims:
                self.preempt(plan, victim, unit, self.settings.preempt_for)
            gone += victims
            budget += freed
            if self.pool is not None:
                assert self.give_blocks(unit, budget, num_kept)
            budget = self.board(plan, unit, budget, num_kept)
        return budget

    def victims_of(self, unit: SlowUnit) -> list[SlowUnit] | None:
        """Return the fewest that give way, of those that are less urgent; None: all are too few."""
        worse = [other for other in self.running if self.urgency(other) > self.urgency(unit)]
        worse.sort(key=lambda other: (self.urgency(other), other.queue_number), reverse=True)
        fitting = (n for n in range(len(worse) + 1) if self.fits_without(unit, worse[:n]))
        count = next(fitting, None)
        return None if count is None else worse[:count]

    def is_due(self, unit: SlowUnit) -> bool:
        deadline, row = unit.job.deadline, unit.rows[0]
        if self.settings.preempt_for == "priority" or deadline is None:
            return True
        limits = (self.settings.max_batch_tokens, self.settings.long_prefill_threshold)
        chunk = min([limit for limit in limits if limit] or [10**9])
        num_steps = -(-row.num_known // chunk) + unit.job.max_tokens - row.num_generated - 1
        return self.now < deadline < self.now + 1 + num_steps

    def ahead(self) -> list[SlowUnit]:
        """Return who may be let in before the first of the queue, the most urgent first."""
        head = self.head()
        others = self.running if head is None else [*self.running, head]
        waiting = sorted(self.waiting, key=lambda unit: (self.urgency(unit), unit.queue_number))
        return [
            unit
            for unit in waiting
            if any(self.urgency(unit) < self.urgency(other) for other in others)
        ]

    def fits_without(self, unit: SlowUnit, gone: list[SlowUnit]) -> bool:
        others = [other for other in self.running if other not in gone]
        if sum(len(other.rows) for other in (*others, unit)) > self.num_slots:
            return False
        if self.pool is None:
            return True
        held = {block for other in others for row in other.rows for block in row.blocks}
        num_needed = sum(self.blocks_for(row.num_known) for row in unit.rows)
        found = [block for row in unit.rows for block in self.match(row)]
        num_needed += len({*found} - held) - len(found)
        if self.settings.capacity == "watermark" and others:
            num_needed += int(self.settings.watermark * len(self.pool.holders))
        return num_needed <= len(self.pool.holders) - len(held)

    def chunks_of(
        self, unit: SlowUnit, budget: int, num_kept: int
    ) -> Iterator[tuple[SlowRow, int]]:
        max_chunk = self.settings.long_prefill_threshold or 10**9
        num_left = sum(row.num_known - row.num_computed_tokens for row in unit.rows)
        if len(unit.rows) > 1 and num_left > min(budget, max(max_chunk, len(unit.rows))):
            num_kept = 1
        elif len(unit.rows) > 1:
            max_chunk = max(max_chunk, len(unit.rows))
        budget = min(budget, max_chunk)
        for row in unit.rows:
            num_tokens = min(row.num_known - row.num_computed_tokens - num_kept, budget)
            if num_tokens > 0:
                yield row, num_tokens
                budget -= num_tokens

    def go_on(self, plan: SlowPlan, unit: SlowUnit, budget: int, num_kept: int) -> int:
        spent = 0
        for row, num_tokens in list(self.chunks_of(unit, budget, num_kept)):
            stop = row.num_computed_tokens + num_tokens
            if not self.make_room(plan, unit, row, stop):
                return spent
            self.extend(row, stop)
            self.compute(plan, row, num_tokens)
            spent += num_tokens
        self.begin_if_met(plan, unit, num_kept)
        return spent

    def compute(self, plan: SlowPlan, row: SlowRow, num_tokens: int) -> None:
        plan.chunks[row.name] = row.num_computed_tokens, num_tokens
        row.num_computed_tokens += num_tokens
        self.cache_full_blocks(row, row.num_computed_tokens)

    def begin_if_met(self, plan: SlowPlan, unit: SlowUnit, num_kept: int) -> None:
        if not num_kept and all(row.num_computed_tokens >= row.num_known for row in unit.rows):
            unit.is_decoding = True
            plan.begun.append(unit.name)

    def slots(self) -> set[int]:
        return {slot for unit in self.running for slot in unit.slots}

    def admit(self, plan: SlowPlan, budget: int, num_kept: int) -> None:
        is_static = self.settings.batching == "static"
        is_busy = bool(self.running)
        while (unit := self.head()) is not None and len(self.slots()) < self.num_slots:
            if is_static and is_busy:
                plan.hold = (unit.name, "batch")
                return
            free = sorted(set(range(self.num_slots)) - self.slots())
            if len(unit.rows) > len(free):
                return
            if budget < len(unit.rows):
                plan.hold = (unit.name, "tokens")
                return
            if self.pool is not None and not self.give_blocks(unit, budget, num_kept):
                plan.hold = (unit.name, "kv")
                return
            budget = self.board(plan, unit, budget, num_kept)

    def board(self, plan: SlowPlan, unit: SlowUnit, budget: int, num_kept: int) -> int:
        free = sorted(set(range(self.num_slots)) - self.slots())
        self.waiting.remove(unit)
        self.running.append(unit)
        unit.slots = free[: len(unit.rows)]
        plan.admitted.append(unit.name)
        for row, num_tokens in list(self.chunks_of(unit, budget, num_kept)):
            self.compute(plan, row, num_tokens)
            budget -= num_tokens
        self.begin_if_met(plan, unit, num_kept)
        return budget

    def give_blocks(self, unit: SlowUnit, budget: int, num_kept: int) -> bool:
        capacity, rows = self.settings.capacity, unit.rows
        matches = [self.match(row) for row in rows]
        for row, blocks in zip(rows, matches, strict=True):
            row.num_computed_tokens = row.num_cached_tokens = len(blocks) * self.size
        stops = {row.role: row.num_computed_tokens for row in rows}
        for row, num_tokens in self.chunks_of(unit, budget, num_kept):
            stops[row.role] += num_tokens
        if not any(self.chunks_of(unit, budget, num_kept)):  # but the last token, perhaps
            stops = {row.role: row.num_known for row in rows}
        most = {row.role: max(len(row.prompt) + row.job.max_tokens - 1, 1) for row in rows}
        known = {row.role: row.num_known for row in rows}
        needed = {"on-demand": stops, "watermark": known, "no-evict": most}[capacity]
        num_needed = sum(self.blocks_for(num_tokens) for num_tokens in needed.values())
        found = [block for blocks in matches for block in blocks]
        num_needed += len({*found} & {*self.pool.free}) - len(found)
        if capacity == "watermark" and self.running:
            num_needed += int(self.settings.watermark * len(self.pool.holders))
        if num_needed > len(self.pool.free):
            return False
        for row, blocks in zip(rows, matches, strict=True):
            for block in blocks:
                self.pool.share(block)
            row.cached_from = self.pool.fillers[blocks[-1]] if blocks else None
            row.blocks, row.num_cached_blocks = blocks, len(blocks)
            row.parent = self.pool.hashes[blocks[-1]] if blocks else ("root", row.job.salt)
        for row in rows:
            self.extend(row, (most if capacity == "no-evict" else stops)[row.role])
        return True

    def end_step(self, plan: SlowPlan) -> list[int]:
        """Give every decoding row its token; return the slots of firsts that are done."""
        done = []
        for unit in self.running:
            if unit.is_decoding and plan.decodes:
                for row in unit.rows:
                    row.num_computed_tokens = row.num_known
                    row.num_generated += 1
                if unit.rows[0].num_generated == unit.job.max_tokens:
                    done.append(unit.slots[0])
        return sorted(done)

    def leave(self, unit: SlowUnit) -> None:
        for row in unit.rows:
            self.close(row)
        self.running.remove(unit)

    def push(self, job: Job) -> None:
        rows = [SlowRow(job, "sample", job.prompt)]
        if job.negative is not None:
            rows.append(SlowRow(job, "negative", job.negative))
        self.waiting.append(SlowUnit(job, rows, self.num_joined))
        self.num_joined += 1
