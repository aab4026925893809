"""Speculation: which rows are given drafts, by what, how many, and what becomes of them."""

import time
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, NamedTuple, TypeVar

import msgspec

from batcher.engine.model_runner import ModelRunner
from batcher.engine.recorder import Recorder
from batcher.engine.sequence import Decoded, Sequence
from batcher.errors import BatchdecodeError, InvariantError, describe
from batcher.events import SpeculateReason
from batcher.fields import check_types
from batcher.foreign import check_members, note_raised, raised
from batcher.lifecycle import State
from batcher.models.base import (
    Chunk,
    Model,
    can_page,
    can_verify,
    can_verify_trees,
    eos_token_ids_of,
    kv_block_bytes_of,
    number_of,
)
from batcher.models.loading import as_model, cache_windows_of
from batcher.models.simulated import SimulatedSettings, simulated_draft
from batcher.scheduling.clock import BatchStats, Clock, ConstantClock, WallClock
from batcher.scheduling.scheduler import Scheduler, SchedulerOutput
from batcher.speculation.draft_model import DraftingRows, DraftModel, DraftTreeModel
from batcher.speculation.lengths import AutoLengths, MeasuredCosts
from batcher.speculation.ngram import NgramDrafter
from batcher.speculation.proposal import CheckedDrafter, Drafter, Proposal
from batcher.speculation.settings import (
    AUTO,
    DEFAULT_DRAFT_TOKENS,
    LINE,
    SPECULATION_SETTINGS,
    ModelDraft,
    NgramDraft,
    SpeculationSettings,
    TreeShape,
    parse_draft,
    parse_tree,
)
from batcher.transformer.config import is_checkpoint

MAX_AUTO_TOKENS = 16
FAILURE: SpeculateReason = "failure"
NOTHING = Proposal([])
_RUNNING = State.RUNNING  # which is asked of every row in every step
Answer = TypeVar("Answer")


class Speculator:
    """The rows that speculate, and the drafts that are proposed for them.

    No request fails because of drafts: after an error there are none.

    scheduler, runner, recorder, clock: of the engine whose steps have them.
    drafter: what proposes them.  settings: what reproduces that, ready for JSON.
    num_drafts: per row and step, unless its request says otherwise; or `lengths` decide.
    costs: what steps take, if that is measured.  shape: of what is proposed for a row.
    failure: why there are no drafts any more, if so.
    """

    def __init__(
        self,
        scheduler: Scheduler[Sequence],
        runner: ModelRunner,
        recorder: Recorder,
        clock: Clock,
        drafter: Drafter,
        settings: dict[str, Any],
        num_drafts: int = DEFAULT_DRAFT_TOKENS,
        lengths: AutoLengths | None = None,
        costs: MeasuredCosts | None = None,
        shape: TreeShape = LINE,
    ) -> None:
        self._scheduler, self._batch = scheduler, scheduler.batch
        self._runner, self._recorder, self._clock = runner, recorder, clock
        self._drafter, self.settings = drafter, settings
        self._num_drafts, self._lengths = num_drafts, lengths
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
        if self._lengths is None:
            by_slot = dict.fromkeys(decoding, self._num_drafts)
        else:
            by_slot = self._lengths.wanted(decoding)
        by_slot |= self._own_lengths
        num_branches, most = self._shape.num_branches, self._shape.size
        for slot, row in decoding.items():
            num_left = row.last_decode_step - self._batch.decode_step
            num = min(by_slot.get(slot, 0), most, num_branches * num_left)
            if num > 0:
                num_wanted[row] = num
        return num_wanted

    def open(self, first: Sequence) -> None:
        slot = first.slot
        if self._rows.get(slot) is first or not first.speculates:
            return
        if slot in self._rows:
            self._close(slot)
        self._rows[slot] = first
        if self._lengths is not None:
            self._lengths.open(slot)
        if first.request.draft_tokens is not None:
            self._own_lengths[slot] = first.request.draft_tokens
        known = [*first.prompt.tokens, *(first.generated or ())]
        self._ask(lambda: self._drafter.open(slot, known))

    def compute(self, chunks: Iterable[Chunk]) -> None:
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
        if self._lengths is not None:
            self._lengths.learn(
                (row.slot, num, decoded.num_accepted.get(row.slot, 0))
                for row, num in scheduled.num_drafts.items()
            )
        # the rows that are given another number of drafts from now on
        self._forget()  # this step may have preempted some
        if self.failure is not None:
            for row in self._rows.values():
                self._recorder.speculates(row, 0, FAILURE)
            self._rows.clear()
        elif self._lengths is not None:
            for slot, num_tokens, reason in self._lengths.take_changes():
                if slot in self._rows:
                    self._recorder.speculates(self._rows[slot], num_tokens, reason)
        return decoded

    def _propose(self, num_drafts: Mapping[Sequence, int]) -> dict[Sequence, Proposal]:
        """Return drafts of the rows that decode, none of those for which there is no room.

        num_drafts: how many there is room for.
        """
        rows = self._runner.speculating
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
        gone = [
            slot
            for slot, row in self._rows.items()
            if row.state is not _RUNNING or row.slot != slot
        ]
        for slot in gone:
            self._close(slot)

    def _close(self, slot: int) -> None:
        row = self._rows.pop(slot)
        if self._lengths is not None:
            self._lengths.close(slot)
        self._own_lengths.pop(slot, None)
        self._ask(lambda: self._drafter.close(slot, has_ended=row.state is State.FINISHED))


# -- from settings to what speculates --------------------------------------------------------------


def make_speculator(
    speculation: SpeculationSettings | Drafter,
    model: Model,
    runner: ModelRunner,
    scheduler: Scheduler[Sequence],
    recorder: Recorder,
    clock: Clock,
) -> Speculator:
    """Return what speculates for the rows of `runner`, whose model is `model`.

    Raises:
        BatchdecodeError: the model cannot verify drafts, there is nothing that would draft, or a
            setting has no value that it may have.
    """
    if not can_verify(model):
        raise BatchdecodeError(
            f"drafts need a model that verifies them: {model.name} does not say it does"
        )
    made = partial(Speculator, scheduler, runner, recorder, clock)
    if not isinstance(speculation, SpeculationSettings):
        check_members("speculation", speculation, Drafter)
        checked = CheckedDrafter(speculation, takes_trees=can_verify_trees(model))
        return made(checked, {"draft": type(speculation).__qualname__})
    check_types(speculation, SPECULATION_SETTINGS)
    shape = LINE
    if speculation.draft_tree is not None:
        shape = parse_tree(speculation.draft_tree)
        if speculation.draft_tokens == AUTO:
            raise BatchdecodeError(
                "--draft-tokens auto is for drafts in a line: how many pay is not known of a "
                "--draft-tree"
            )
        if speculation.acceptance != "exact":
            raise BatchdecodeError(
                f"--acceptance {speculation.acceptance} is for drafts in a line, and not for a "
                "--draft-tree"
            )
        if not can_verify_trees(model):
            raise BatchdecodeError(
                f"--draft-tree needs a model that verifies trees: {model.name} does not, as no "
                "model with recurrent layers does"
            )
    drafter = _drafter(speculation, model, runner, shape.num_branches)
    made = partial(made, drafter, msgspec.to_builtins(speculation), shape=shape)
    number = speculation.draft_tokens
    if number != AUTO:
        return made(number or (DEFAULT_DRAFT_TOKENS if shape is LINE else shape.size))
    if isinstance(clock, WallClock):
        costs = MeasuredCosts()
        lengths = AutoLengths(MAX_AUTO_TOKENS, costs.steps.estimate, costs.draft_seconds)
        return made(lengths=lengths, costs=costs)
    if isinstance(clock, ConstantClock):
        raise BatchdecodeError(
            "--draft-tokens auto needs to know how long steps take, and all take one second here: "
            "give a --profile, such as wall, or a number of drafts"
        )

    def step_seconds(num_rows: int, num_tokens: int) -> float:
        return clock.estimate(BatchStats(num_tokens, num_rows, scheduler.batch.num_read, 0))

    return made(lengths=AutoLengths(MAX_AUTO_TOKENS, step_seconds))


def _drafter(
    speculation: SpeculationSettings, model: Model, runner: ModelRunner, num_branches: int
) -> Drafter:
    """Return what proposes drafts for `model`."""
    draft, name = parse_draft(speculation.draft), speculation.draft
    if isinstance(draft, NgramDraft):
        return NgramDrafter(draft.max_length, num_branches)
    drafting = _load(draft.name, model)
    own, others = drafting.vocab_size, model.vocab_size
    if own != others:
        raise BatchdecodeError(
            f"--draft {name} has a vocabulary of {own} tokens, and {model.name} one of {others}: "
            "a draft needs the same"
        )
    if not can_page(drafting) or drafting.gives == "tokens":
        raise BatchdecodeError(f"--draft {name} has to give logits, and to be paged")
    if getattr(drafting, "recomputes_drafts", False):
        raise BatchdecodeError(
            f"--draft {name} has recurrent layers, whose states do not go back to before its drafts"
        )
    if cache_windows_of(drafting) != cache_windows_of(model):
        raise BatchdecodeError(
            f"the layers of --draft {name} do not read as far back as those of {model.name}: "
            "both share their block tables"
        )
    rows = runner.speculating
    if runner.pages is None or rows is None:
        raise InvariantError("rows that speculate have no pages")
    held = drafting, runner.num_slots, runner.pages, eos_token_ids_of(model)
    if num_branches == 1:
        is_drawn_apart = speculation.acceptance != "exact"
        return DraftModel(*held, partial(rows.look_ahead, is_drawn_apart=is_drawn_apart))
    if not can_verify_trees(drafting):
        raise BatchdecodeError(
            f"--draft-tree: {drafting.name} cannot compute a tree, as a draft of trees has to"
        )
    return DraftTreeModel(*held, rows.best_after, num_branches)


def _load(name: str, model: Model) -> Model:
    """Return the model that drafts; a simulated one drafts for one of the same settings."""
    if name.partition(":")[0] != "simulated":
        return as_model(name)
    settings = model.settings if model.name == "simulated" else {}
    return simulated_draft(name, msgspec.convert(settings, SimulatedSettings))


class DraftCache(NamedTuple):
    """Bytes that a token, and a block, take in the cache of a model that drafts; None if unknown.

    It is in addition to that of the model it drafts for: every block has room for both.
    """

    per_token: int | None
    per_block: int | None


def draft_cache_of(
    speculation: SpeculationSettings, model: Model, block_size: int
) -> DraftCache | None:
    """Return what is kept of drafts in blocks of `block_size` tokens; None without a draft model.

    Raises:
        BatchdecodeError: there is no such model, or it tells nonsense of its cache.
    """
    draft = parse_draft(speculation.draft)
    if not isinstance(draft, ModelDraft):
        return None
    if is_checkpoint(draft.name):
        from batcher.models.checkpoints import cache_size_of  # noqa: PLC0415 - for checkpoints only

        size = cache_size_of(draft.name)
        return DraftCache(size.per_token, size.of_block(block_size))
    drafting = _load(draft.name, model)
    return DraftCache(
        number_of(drafting, "kv_bytes_per_token"), kv_block_bytes_of(drafting, block_size)
    )
