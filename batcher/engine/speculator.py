"""Speculation: which rows are given drafts, how many, and what becomes of them."""

import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

from batcher.engine.decoded import Decoded
from batcher.engine.draft_model import DraftingRows
from batcher.engine.model_runner import ModelRunner
from batcher.engine.recorder import Recorder
from batcher.engine.sequence import Sequence
from batcher.errors import InvariantError, describe
from batcher.events import SpeculateReason
from batcher.foreign import note_raised, raised
from batcher.lifecycle import State
from batcher.models.base import Chunk
from batcher.scheduling.clock import BatchStats, Clock
from batcher.scheduling.output import SchedulerOutput
from batcher.scheduling.scheduler import Scheduler
from batcher.speculation.drafter import Drafter
from batcher.speculation.lengths import DraftLengths
from batcher.speculation.proposal import Proposal
from batcher.speculation.spec import LINE, TreeShape
from batcher.speculation.step_costs import StepCosts

Answer = TypeVar("Answer")
FAILURE: SpeculateReason = "failure"
_RUNNING = State.RUNNING  # which is asked of every row in every step
NOTHING = Proposal([])


class MeasuredCosts:
    """How long steps and drafts take on the wall; the seconds of a step are those without drafts.

    steps: by their tokens.  drafts: those of one draft of each row, by the rows.
    """

    def __init__(self) -> None:
        self.steps, self.drafts = StepCosts(), StepCosts()
        self._seconds = 0.0  # that the drafts of this step have taken

    def note_drafts(self, num_rows: int, most_drafts: int, seconds: float) -> None:
        """Take in how long it took to propose the drafts of a step."""
        self._seconds = seconds
        if most_drafts:
            self.drafts.learn(num_rows, seconds / most_drafts)

    def note_step(self, num_tokens: int, seconds: float) -> None:
        """Take in how long a step took, its drafts included."""
        if num_tokens:
            self.steps.learn(num_tokens, max(seconds - self._seconds, 0.0))
        self._seconds = 0.0

    def draft_seconds(self, num_rows: int) -> float:
        """Return how long one more draft of each of so many rows takes."""
        return self.drafts.estimate(num_rows, num_rows)


class Speculator:
    """The rows that speculate, and the drafts that are proposed for them.

    Whatever goes wrong with drafts, no request fails for it: there are none from then on.

    scheduler, runner, recorder, clock: of the engine whose steps have them.
    drafter: what proposes them.  lengths: how many of a row in a step, unless its request says
    otherwise.
    settings: what reproduces that, ready for JSON.  costs: what steps take, if that is measured.
    shape: of what is proposed for a row.
    failure: why there are no drafts any more, if so.
    """

    def __init__(
        self,
        scheduler: Scheduler[Sequence],
        runner: ModelRunner,
        recorder: Recorder,
        clock: Clock,
        drafter: Drafter,
        lengths: DraftLengths,
        settings: dict[str, Any],
        costs: MeasuredCosts | None = None,
        shape: TreeShape = LINE,
    ) -> None:
        self._scheduler, self._batch = scheduler, scheduler.batch
        self._runner, self._recorder, self._clock = runner, recorder, clock
        self._drafter, self._lengths, self.settings = drafter, lengths, settings
        self._costs, self._shape = costs, shape
        self._rows: dict[int, Sequence] = {}  # by slot
        self._own_lengths: dict[int, int] = {}  # of rows whose requests say so, by slot
        self.failure: str | None = None

    # -- before a step ---------------------------------------------------------------------------

    def wanted(self) -> dict[Sequence, int]:
        """Return how many drafts are wanted of which rows in the current step.

        No way through them is longer than one less than the tokens that are left to it: the last is
        not verified by another.
        """
        self._forget()
        num_wanted: dict[Sequence, int] = {}
        if self.failure is not None:
            return num_wanted
        decoding = {slot: row for slot, row in self._rows.items() if row.is_decoding}
        by_slot = self._lengths.wanted(decoding) | self._own_lengths
        num_branches, most = self._shape.num_branches, self._shape.size
        for slot, row in decoding.items():
            num_left = row.last_decode_step - self._batch.decode_step
            num = min(by_slot.get(slot, 0), most, num_branches * num_left)
            if num > 0:
                num_wanted[row] = num
        return num_wanted

    def open(self, first: Sequence) -> None:
        """Take in a row that begins to decode, or goes on after it was preempted."""
        if self._rows.get(first.slot) is first or not first.speculates:
            return
        if first.slot in self._rows:
            self._close(first.slot)
        self._rows[first.slot] = first
        self._lengths.open(first.slot)
        if first.request.draft_tokens is not None:
            self._own_lengths[first.slot] = first.request.draft_tokens
        known = [*first.prompt_tokens, *(first.generated or ())]
        self._ask(lambda: self._drafter.open(first.slot, known))

    def compute(self, chunks: Iterable[Chunk]) -> None:
        """Let a model that drafts compute the prompts of the step."""
        drafter = self._drafter
        if isinstance(drafter, DraftingRows):
            self._ask(lambda: drafter.compute(chunks))

    # -- a step ----------------------------------------------------------------------------------

    def execute(self, scheduled: SchedulerOutput[Sequence]) -> Decoded:
        """Let the model compute the step, with drafts of the rows that speculate.

        `num_drafts` says afterwards how many there are of which rows.
        """
        runner, decode_step = self._runner, self._batch.decode_step
        drafts = self._propose(scheduled.num_drafts)
        if scheduled.num_drafts:
            scheduled.num_drafts = {row: len(drafts[row].tokens) for row in scheduled.num_drafts}
            self._recorder.drafted(drafts, decode_step)
            runner.add_drafts(drafts, decode_step)
        by_slot = {row.slot: proposal for row, proposal in drafts.items()}
        decoded = runner.verify(self._clock.step, by_slot)
        if decoded.given:
            self._ask(lambda: self._drafter.extend(decoded.given))
        self._lengths.learn(
            (row.slot, num, decoded.num_accepted.get(row.slot, 0))
            for row, num in scheduled.num_drafts.items()
        )
        for row, num_tokens, reason in self._take_changes():
            self._recorder.speculates(row, num_tokens, reason)
        return decoded

    def _propose(self, num_drafts: Mapping[Sequence, int]) -> dict[Sequence, Proposal]:
        """Return drafts of the rows that decode, none of those for which there is no room.

        num_drafts: how many there is room for.
        """
        rows = self._runner.decoder.speculating
        if rows is None:
            raise InvariantError("no row may be given drafts")
        cut, drafts = rows.cut, {row: NOTHING for row in self._rows.values() if row.is_decoding}
        if num_drafts:
            num_wanted = {row.slot: num for row, num in num_drafts.items()}
            began = time.perf_counter()
            proposed = self._ask(lambda: cut(self._drafter.propose(num_wanted))) or {}
            if self._costs is not None:
                most = max(map(len, proposed.values()), default=0)
                self._costs.note_drafts(len(proposed), most, time.perf_counter() - began)
            for slot, proposal in proposed.items():
                drafts[self._rows[slot]] = proposal
        return drafts

    # -- after a step ----------------------------------------------------------------------------

    def settle(self, scheduled: SchedulerOutput[Sequence], decoded: Decoded) -> None:
        """Let rows keep the drafts that were accepted, and undo the others."""
        if scheduled.num_drafts:
            num_blocks = self._scheduler.settle_drafts(scheduled, decoded.num_accepted)
            self._recorder.settled(
                scheduled.num_drafts, decoded, num_blocks, self._batch.decode_step
            )

    def end_step(self, scheduled: SchedulerOutput[Sequence], measured: BatchStats | None) -> None:
        """Let rows go on behind the drafts of the step, which is over.

        measured: what it has computed, if that is known.
        """
        if scheduled.num_drafts:
            for row in self._scheduler.recompute_drafts():
                self._runner.note_known(row)
            self._runner.settle_drafts(scheduled.num_drafts, self._batch.decode_step)
        if self._costs is not None:
            num_tokens = 0 if measured is None else measured.num_tokens
            began = self._clock.start_of(self._clock.step - 1)
            self._costs.note_step(num_tokens, self._clock.now - began)

    def _take_changes(self) -> list[tuple[Sequence, int, SpeculateReason]]:
        """Return which rows are given another number of drafts from now on, how many, and why."""
        self._forget()  # this step may have preempted some
        if self.failure is not None:
            ended = [(row, 0, FAILURE) for row in self._rows.values()]
            self._rows.clear()
            return ended
        changes = self._lengths.take_changes()
        return [
            (self._rows[each.slot], each.tokens, each.reason)
            for each in changes
            if each.slot in self._rows
        ]

    def _ask(self, call: Callable[[], Answer]) -> Answer | None:
        """Return what the drafter answers; None if it fails, or has failed before."""
        if self.failure is None:
            try:
                return call()
            except InvariantError:
                raise
            except Exception as error:  # noqa: BLE001 - it is no request's fault
                self.failure = describe(error)
                note_raised(raised(error))
        return None

    def _forget(self) -> None:
        """Forget the rows that have left their slots."""
        gone = [
            slot
            for slot, row in self._rows.items()
            if row.state is not _RUNNING or row.slot != slot
        ]
        for slot in gone:
            self._close(slot)

    def _close(self, slot: int) -> None:
        row = self._rows.pop(slot)
        self._lengths.close(slot)
        self._own_lengths.pop(slot, None)
        self._ask(lambda: self._drafter.close(slot, has_ended=row.state is State.FINISHED))
