"""Rows decoded without an engine, so that a test can say who is in the batch and in which slot."""

from collections.abc import Callable
from random import Random
from typing import NamedTuple

from batcher import Request, SimulatedModel
from batcher.engine.model_runner import ModelRunner
from batcher.engine.sequence import Decoded, Generated, Sequence, SequenceMaker, SuspendedRows
from batcher.models.base import ANY_LENGTH, Chunk
from batcher.result import FinishReason

NUM_SLOTS = 7
MODEL = SimulatedModel()  # one for many tests, since it makes its table of logits once
Choose = Callable[[], bool]


class Outcome(NamedTuple):
    """What came of each unit, by its id and index: its outputs, and what was told of it."""

    outputs: dict[tuple[str, int], list[Generated]]
    told: dict[tuple[str, int], list[tuple[list[int], str, str | None]]]


class SlottedRows:
    """A batch of rows; every first is running, suspended, or done."""

    def __init__(self, requests: list[Request]) -> None:
        self.runner = ModelRunner(MODEL, NUM_SLOTS, is_streaming=True)
        self.batch, self.step = self.runner.batch, 0
        self.free = list(range(NUM_SLOTS))
        maker = SequenceMaker(MODEL, ANY_LENGTH, self.runner.heal)
        self.waiting: list[Sequence] = []
        for place, request in enumerate(requests):
            if request.output_limit > 0:
                name = f"r{place}"
                self.waiting += maker.make(request, name, place, "input", {}, is_streamed=True)
        self.running: dict[int, Sequence] = {}  # by the first's slot
        self.suspended: list[tuple[Sequence, SuspendedRows]] = []
        self.outcome = Outcome({}, {})

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running or self.suspended)

    def take_slots(self, first: Sequence, random: Random) -> None:
        for row in (first, *first.others):
            row.slot = self.free.pop(random.randrange(len(self.free)))
        self.running[first.slot] = first

    def leave_slots(self, first: Sequence) -> None:
        del self.running[first.slot]
        self.free += [row.slot for row in first.group]

    def start(self, first: Sequence) -> None:
        """Begin a row in its slot; beams wait for the first fork."""
        forced = self.runner.open(first)
        first.num_tokens += len(forced)
        rows = [first] if first.role == "beam" else [first, *first.others]
        for row in rows:
            self.batch.join(Chunk(row.slot, row.prompt.tokens + forced, 0))

    def suspend(self, first: Sequence) -> None:
        self.runner.preempt(first)
        self.suspended.append((first, self.runner._suspended[first]))
        self.leave_slots(first)

    def resume(self, first: Sequence, suspended: SuspendedRows) -> None:
        self.runner.resume(first)
        for row, tokens in zip((first, *first.others), suspended.tokens, strict=False):
            self.batch.join(Chunk(row.slot, row.prompt.tokens + tokens, 0))

    def admit(self, random: Random, leaves_at_once: Choose) -> None:
        for first in self.waiting.copy():
            if first.num_slots <= len(self.free):
                self.waiting.remove(first)
                self.take_slots(first, random)
                self.start(first)
                if leaves_at_once():
                    self.suspend(first)

    def compute(self) -> None:
        """Let the model do a step of all running rows."""
        decoded = self.runner.step(self.step)
        self.step += 1
        for slot, first in list(self.running.items()):
            self._commit(first, slot, decoded)
        for source, target in decoded.forks:
            if target in self.runner.rows.first_slots or target in self.running:
                MODEL.fork(source, target)
                self.batch.enter(target)

    def _commit(self, first: Sequence, slot: int, decoded: Decoded) -> None:
        tokens = decoded.jumps.get(slot, [0])
        first.num_tokens += 0 if slot in decoded.failed else len(tokens)
        num_tokens = first.num_generated
        if slot in decoded.failed:
            self.end(first, "error")
        elif slot in decoded.stopped:
            self.end(first, "stop")
        elif num_tokens >= first.request.output_limit:
            self.end(first, "length")
        elif len(tokens) > 1:
            for row in (first, *first.others):
                start = len(row.prompt.tokens) + num_tokens - len(tokens)
                self.batch.chunks.append(Chunk(row.slot, tokens, start))

    def end(self, first: Sequence, reason: FinishReason) -> None:
        key = first.id, first.index
        self.outcome.outputs[key] = self.runner.close(first, reason)
        self.leave_slots(first)

    def finish(self) -> Outcome:
        for event in self.runner.take_streamed():
            told = self.outcome.told.setdefault((event.id, event.index), [])
            told.append((event.tokens, event.text, event.state))
        return self.outcome


def never() -> bool:
    return False


def decode_all(requests: list[Request], random: Random, leaves: Choose = never) -> Outcome:
    """Decode requests to their end; whenever `leaves` says so a row is out of the batch."""
    rows = SlottedRows(requests)
    while rows.has_work:
        for place in reversed(range(len(rows.suspended))):
            first, suspended = rows.suspended[place]
            if first.num_slots <= len(rows.free) and not leaves():
                del rows.suspended[place]
                rows.take_slots(first, random)
                rows.resume(first, suspended)
        rows.admit(random, leaves)
        for first in list(rows.running.values()):
            if leaves():
                rows.suspend(first)
        if rows.running:
            rows.compute()
    return rows.finish()
