"""Speculation: which rows have drafts, from which drafter, how many, and which are accepted.

A draft is accepted if it equals the token that a step of its own would choose, so drafts change no
token.  Noise is keyed, so a draft model can draw with the same noise (Daliri et al., "Coupling
without Communication and Drafter-Invariant Speculative Decoding", 2024).  A drafter with noise of
its own changes the choice itself, which then accepts or replaces the draft
(batcher/decoding/sampling.py).  In a tree of drafts, a row follows the longest accepted path (Miao
et al., "SpecInfer", 2024).
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from time import perf_counter
from typing import TypeVar

import msgspec
import numpy as np

from batcher.decoding.constraints import RowConstraint, allowed_tokens
from batcher.decoding.sampling import Masks
from batcher.engine.model_runner import ModelRunner
from batcher.engine.sequence import Decoded, Sequence
from batcher.errors import BatchdecodeError, InvariantError, describe
from batcher.events import AcceptEvent, DraftEvent, RequestEvent, RollbackEvent, SpeculateEvent
from batcher.fields import check_types
from batcher.foreign import check_members, note_raised, raised
from batcher.lifecycle import State
from batcher.models.base import (
    Chunk,
    FloatArray,
    Model,
    ModelOutput,
    can_page,
    can_verify,
    can_verify_trees,
    eos_token_ids_of,
    kv_block_bytes_of,
    moves_along,
    number_of,
)
from batcher.models.loading import as_model, cache_windows_of
from batcher.models.simulated import SimulatedSettings, simulated_draft
from batcher.scheduling.clock import BatchStats, Clock, ConstantClock, WallClock
from batcher.scheduling.scheduler import Scheduler, SchedulerOutput
from batcher.speculation.draft_model import Choose, DraftingRows, DraftModel, DraftTreeModel
from batcher.speculation.lengths import AutoLengths, LengthChange, MeasuredCosts
from batcher.speculation.ngram import NgramDrafter
from batcher.speculation.settings import (
    AUTO,
    DEFAULT_DRAFT_TOKENS,
    LINE,
    SPECULATION_SETTINGS,
    CheckedDrafter,
    Drafter,
    Proposal,
    SpeculationSettings,
    parse_draft,
    parse_tree,
)
from batcher.transformer.config import is_checkpoint

MAX_AUTO_TOKENS = 16
NOTHING = Proposal([])
Answer = TypeVar("Answer")


class Speculator:
    """Proposes drafts for the rows of an engine and verifies them.

    Drafts never fail a request: after an error there are no more drafts.

    model, runner, scheduler, events, clock: of the engine.
    settings: reproduce the drafter; ready for JSON.
    failure: why there are no more drafts, if so.

    Raises:
        BatchdecodeError: the model cannot verify drafts, there is no drafter, or a setting is
            invalid.
    """

    def __init__(
        self,
        speculation: SpeculationSettings | Drafter,
        model: Model,
        runner: ModelRunner,
        scheduler: Scheduler[Sequence],
        events: list[RequestEvent],
        clock: Clock,
    ) -> None:
        if not can_verify(model):
            raise BatchdecodeError(f"drafts need a model that verifies them: {model.name} does not")
        if runner.rows is None:
            raise InvariantError("no rows may be given drafts")
        self._decoder, self._sampler = runner.rows, runner.rows.sampler
        self._runner, self._events, self._clock = runner, events, clock
        self._scheduler, self._batch = scheduler, scheduler.batch
        self._rows: dict[int, Sequence] = {}  # by slot
        self._num_drafts, self._shape = DEFAULT_DRAFT_TOKENS, LINE  # per row and step
        self._lengths: AutoLengths | None = None  # chooses the number of drafts, if set
        self._costs: MeasuredCosts | None = None  # of steps, if measured
        self._is_drawn_apart = False  # whether the drafter has its own noise
        self.failure: str | None = None
        self._drafter: Drafter
        if not isinstance(speculation, SpeculationSettings):
            check_members("speculation", speculation, Drafter)
            self.settings = {"draft": type(speculation).__qualname__}
            self._drafter = CheckedDrafter(speculation, takes_trees=can_verify_trees(model))
            return
        check_types(speculation, SPECULATION_SETTINGS)
        self.settings = msgspec.to_builtins(speculation)
        self._is_drawn_apart = speculation.acceptance != "exact"
        number = speculation.draft_tokens
        if speculation.draft_tree is not None:
            self._shape = parse_tree(speculation.draft_tree)
            if number == AUTO:
                raise BatchdecodeError(
                    "--draft-tokens auto does not work with --draft-tree: give a number"
                )
            if self._is_drawn_apart:
                raise BatchdecodeError(
                    f"--acceptance {speculation.acceptance} does not work with --draft-tree"
                )
            if not can_verify_trees(model):
                raise BatchdecodeError(
                    f"--draft-tree needs a model that verifies trees: {model.name} cannot "
                    "(models with recurrent layers and `hf:` models cannot); use --draft-tokens"
                )
            self._num_drafts = self._shape.size
        self._drafter = self._make_drafter(speculation.draft, model)
        if number != AUTO:
            self._num_drafts = number or self._num_drafts
        elif isinstance(clock, WallClock):
            self._costs = costs = MeasuredCosts()
            self._lengths = AutoLengths(MAX_AUTO_TOKENS, costs.steps.estimate, costs.draft_seconds)
        elif isinstance(clock, ConstantClock):
            raise BatchdecodeError(
                "--draft-tokens auto needs step times: set --profile, for example to wall, or give "
                "a number of drafts"
            )
        else:

            def seconds(num_rows: int, num_tokens: int) -> float:
                return clock.estimate(BatchStats(num_tokens, num_rows, self._batch.num_read, 0))

            self._lengths = AutoLengths(MAX_AUTO_TOKENS, seconds)

    def _make_drafter(self, name: str, model: Model) -> Drafter:
        draft, num_branches = parse_draft(name), self._shape.num_branches
        if isinstance(draft, int):
            return NgramDrafter(draft, num_branches)
        drafting = _load(draft, model)
        own, others = drafting.vocab_size, model.vocab_size
        if own != others:
            raise BatchdecodeError(
                f"--draft {name} has a vocabulary of {own} tokens, but {model.name} has {others}: "
                "they must be equal"
            )
        if not can_page(drafting) or drafting.gives == "tokens":
            raise BatchdecodeError(f"--draft {name} must return logits and be paged")
        if getattr(drafting, "recomputes_drafts", False):
            raise BatchdecodeError(
                f"--draft {name} has recurrent layers, whose states cannot be rolled back"
            )
        if cache_windows_of(drafting) != cache_windows_of(model):
            raise BatchdecodeError(
                f"--draft {name} and {model.name} have different attention windows, but share "
                "block tables"
            )
        if self._runner.pages is None:
            raise InvariantError("rows that speculate have no pages")
        held = drafting, self._runner.num_slots, self._runner.pages, eos_token_ids_of(model)
        if num_branches == 1:
            return DraftModel(*held, self._look_ahead)
        if not can_verify_trees(drafting):
            raise BatchdecodeError(
                f"--draft-tree needs a draft that computes trees; {drafting.name} cannot"
            )
        return DraftTreeModel(*held, self._best_after, num_branches)

    # -- before a step ---------------------------------------------------------------------------

    def wanted(self) -> dict[Sequence, int]:
        """Return the number of drafts for each row in the current step.

        A row has at most one draft fewer than tokens left, since the last token is not verified.
        """
        self._forget()
        num_wanted: dict[Sequence, int] = {}
        if self.failure is not None:
            return num_wanted
        decoding = {slot: row for slot, row in self._rows.items() if row.is_decoding}
        by_slot = None if self._lengths is None else self._lengths.wanted(decoding)
        num_branches, most = self._shape.num_branches, self._shape.size
        for slot, row in decoding.items():
            num = row.request.draft_tokens
            if num is None:
                num = self._num_drafts if by_slot is None else by_slot.get(slot, 0)
            num_left = row.last_decode_step - self._batch.decode_step
            num = min(num, most, num_branches * num_left)
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
        known = [*first.prompt.tokens, *(first.generated or ())]
        self._ask(lambda: self._drafter.open(slot, known))

    def compute(self, chunks: Iterable[Chunk]) -> None:
        drafter = self._drafter
        if isinstance(drafter, DraftingRows):
            self._ask(lambda: drafter.compute(chunks))

    def cut(self, proposals: dict[int, Proposal]) -> dict[int, Proposal]:
        """Return the proposals by slot, cut to the tokens that their rows can receive."""
        vocab_size, eos = self._decoder.vocab_size, self._decoder.eos_token_ids
        constraints, cut = self._forks(proposals), {}
        for slot, proposal in proposals.items():
            tokens, parents = proposal.tokens, proposal.parents
            after: dict[int, RowConstraint | None] = {0: constraints.get(slot)}
            kept = []
            follows = zip(tokens, parents or range(len(tokens)), strict=True)
            for draft, (token, parent) in enumerate(follows, 1):
                if parent not in after or not 0 <= token < vocab_size:
                    continue
                constraint = after[parent]
                if constraint is None or not constraint.is_active:
                    after[draft] = constraint
                elif not allowed_tokens([constraint], vocab_size)[0, token]:
                    continue
                elif token not in eos:  # constraints do not read EOS
                    after[draft] = then = constraint.fork() if parents else constraint
                    then.advance(token)
                kept.append(draft)
            cut[slot] = proposal if len(kept) == len(tokens) else proposal.only(kept)
        return cut

    @contextmanager
    def _look_ahead(self, slots: list[int]) -> Iterator[Choose]:
        """Give rows tokens for the duration of a `with` block, and take them back afterwards.

        The tokens are those that these logits and the same noise would give.  With noise of its
        own, the step later accepts or replaces them.  Constraints do not move.
        """
        sampler, constraints, at = self._sampler, self._forks(slots), np.array(slots)

        def choose(logits: FloatArray, some: list[int]) -> dict[int, int]:
            own = {slot: constraints[slot] for slot in some if slot in constraints}
            sampled = sampler.sample(logits, self._decoder.masks_of(own), (), np.array(some))
            tokens = zip(some, sampled.tokens[some].tolist(), strict=True)
            chosen = {slot: token for slot, token in tokens if slot not in sampled.failed}
            for slot, constraint in own.items():
                if slot in chosen and chosen[slot] not in self._decoder.eos_token_ids:
                    constraint.advance(chosen[slot])
            return chosen

        with sampler.drafting(at) if self._is_drawn_apart else sampler.undone(at):
            yield choose

    def _best_after(
        self, logits: FloatArray, ways: Mapping[int, list[int]], num_best: int
    ) -> dict[int, list[int]]:
        """Return the tokens that rows would receive after the tokens in `ways`.

        First each row's choice, then the choice without it, and so on, up to the wanted number.

        logits: [rows, vocab].  ways: slot -> tokens, equally many for all rows.
        """
        sampler, slots, constraints = self._sampler, np.array([*ways]), self._forks(ways)
        for slot, constraint in constraints.items():
            for token in ways[slot]:
                constraint.advance(token)
        allowed = np.ones(logits.shape, np.bool_)
        masks = self._decoder.masks_of(constraints)
        if masks is not None:
            allowed[np.isin(slots, masks.slots)] = masks.allowed
        best: dict[int, list[int]] = {slot: [] for slot in ways}
        for _ in range(num_best):
            with sampler.undone(slots):
                sampler.extend(ways)
                sampled = sampler.sample(logits, Masks(slots, allowed), (), slots)
            for row, slot in enumerate(ways):
                if slot not in sampled.failed:
                    best[slot].append(sampled.tokens.item(slot))
                    allowed[row, best[slot][-1]] = False
        return best

    def _forks(self, slots: Iterable[int]) -> dict[int, RowConstraint]:
        constraints = self._decoder.constraints_of(slots)
        return {slot: constraint.fork() for slot, constraint in constraints.items()}

    # -- a step ----------------------------------------------------------------------------------

    def execute(self, scheduled: SchedulerOutput[Sequence]) -> Decoded:
        """Compute the step with drafts.

        `num_drafts` holds the numbers there is capacity for, and afterwards the actual ones.
        """
        runner, decode_step, events = self._runner, self._batch.decode_step, self._events
        batch, pages = runner.batch, runner.pages
        drafts = {slot: NOTHING for slot, row in self._rows.items() if row.is_decoding}
        trees: list[Chunk] = []
        if scheduled.num_drafts:
            num_wanted = {row.slot: num for row, num in scheduled.num_drafts.items()}
            began, last = perf_counter(), batch.tokens.tolist()
            proposed = self._ask(lambda: self.cut(self._drafter.propose(num_wanted))) or {}
            if self._costs is not None:
                most = max(map(len, proposed.values()), default=0)
                self._costs.note_drafts(len(proposed), most, perf_counter() - began)
            drafts |= proposed
            scheduled.num_drafts = {row: len(drafts[row.slot]) for row in scheduled.num_drafts}
            for slot, own in drafts.items():
                if own.tokens:
                    row, num, parents = self._rows[slot], len(own), own.parents
                    start, known = decode_step + row.offset, [last[slot], *own.tokens]
                    events.append(DraftEvent(*self._place(row), start + 1, num, parents))
                    chunk = Chunk(slot, known, start, num_drafts=num, draft_parents=parents)
                    batch.chunks.append(chunk)
                    trees += [chunk] if parents else []
                    if pages is not None:
                        pages.moved.pop(slot, None)
        decoded = runner.step(self._clock.step, partial(self._verify, drafts) if drafts else None)
        if pages is not None:
            # Keep the state of accepted drafts before the next step computes or copies anything,
            # even if the row has ended: other rows may find or receive its blocks.
            for chunk in trees:
                pages.moves += moves_along(decoded.ways.get(chunk.slot, []), chunk, pages)
        if decoded.given:
            self._ask(lambda: self._drafter.extend(decoded.given))
        changes: list[LengthChange] = []
        if self._lengths is not None:
            self._lengths.learn(
                (row.slot, num, decoded.num_accepted.get(row.slot, 0))
                for row, num in scheduled.num_drafts.items()
            )
            changes = self._lengths.take_changes()
        self._forget()  # this step may have preempted some
        if self.failure is not None:
            changes = [LengthChange(slot, 0, "failure") for slot in self._rows]
        for slot, num, reason in changes:
            if slot in self._rows:
                events.append(SpeculateEvent(*self._place(self._rows[slot]), num, reason))
        if self.failure is not None:
            self._rows.clear()
        return decoded

    def _verify(
        self, drafts: Mapping[int, Proposal], output: ModelOutput, decoded: Decoded
    ) -> None:
        """Accept the drafts that equal the rows' own tokens.

        Each draft is checked as a step of its own would choose.

        output: of the step; receives the last token of each row.  decoded: receives the rest.
        """
        tokens, given = output.tokens, decoded.given
        given.update({slot: [tokens.item(slot)] for slot in drafts})
        firsts: dict[int, int] = {}  # row -> the index of its first draft in all drafts
        number = 0
        for slot, proposal in drafts.items():
            if proposal.tokens:
                firsts[slot] = number
                number += len(proposal)
        at = dict.fromkeys(sorted(firsts), 0)  # the last accepted draft of each row
        while at:
            is_over = {*decoded.stopped, *decoded.failed, *decoded.jumps}
            at = {slot: drafts[slot].child(at[slot], given[slot][-1]) for slot in at}
            at = {slot: draft for slot, draft in at.items() if draft and slot not in is_over}
            if not at:
                break
            if output.draft_logits is None:
                raise InvariantError("the model gave no logits of drafts")
            for slot, draft in at.items():
                decoded.num_accepted[slot] = decoded.num_accepted.get(slot, 0) + 1
                if drafts[slot].parents:
                    decoded.ways.setdefault(slot, []).append(draft)
            logits = output.draft_logits[[firsts[slot] + draft - 1 for slot, draft in at.items()]]
            self._decoder.give(tokens, logits, decoded, some=[*at])
            for slot in at:
                if slot not in decoded.failed:
                    given[slot].append(tokens.item(slot))
        for slot, jump in decoded.jumps.items():
            if slot in given:
                given[slot] += jump[1:]
        self._sampler.forget_drafts()

    # -- after a step ----------------------------------------------------------------------------

    def settle(self, scheduled: SchedulerOutput[Sequence], decoded: Decoded) -> None:
        """Advance rows over accepted drafts, and write the events."""
        if not scheduled.num_drafts:
            return
        num_blocks = self._scheduler.settle_drafts(scheduled, decoded.num_accepted)
        for row, num in scheduled.num_drafts.items():
            slot, place = row.slot, self._place(row)
            position = self._batch.decode_step + row.offset + 1
            accepted = decoded.num_accepted.get(slot, 0)
            if accepted:
                way, first = tuple(decoded.ways.get(slot, ())), position - accepted
                self._events.append(AcceptEvent(*place, first, accepted, way))
            if accepted < num:
                told = position, num - accepted, num_blocks.get(row, 0)
                self._events.append(RollbackEvent(*place, *told))

    def end_step(self, scheduled: SchedulerOutput[Sequence], measured: BatchStats | None) -> None:
        """Prepare the drafter for the next step."""
        if scheduled.num_drafts:
            for row in self._scheduler.recompute_drafts():
                self._runner.record_known(row)
            if self._runner.pages is not None:
                self._runner.pages.moved |= {
                    row.slot: self._batch.decode_step + row.offset
                    for row in scheduled.num_drafts
                    if row.is_decoding
                }
        if self._costs is not None:
            num_tokens = 0 if measured is None else measured.num_tokens
            began = self._clock.start_of(self._clock.step - 1)
            self._costs.note_step(num_tokens, self._clock.now - began)

    def _place(self, row: Sequence) -> tuple[int, float, str, int, int]:
        return self._clock.step, self._clock.now, row.id, row.index, row.slot

    def _ask(self, call: Callable[[], Answer]) -> Answer | None:
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
        running = State.RUNNING  # hoisted out of the loop
        rows = self._rows.items()
        for slot in [s for s, row in rows if row.state is not running or row.slot != s]:
            self._close(slot)

    def _close(self, slot: int) -> None:
        row = self._rows.pop(slot)
        if self._lengths is not None:
            self._lengths.close(slot)
        self._ask(lambda: self._drafter.close(slot, has_ended=row.state is State.FINISHED))


def _load(name: str, model: Model) -> Model:
    """Return the draft model; a simulated one drafts for a model with the same settings."""
    if name.partition(":")[0] != "simulated":
        return as_model(name)
    settings = model.settings if model.name == "simulated" else {}
    return simulated_draft(name, msgspec.convert(settings, SimulatedSettings))


def draft_bytes_of(
    speculation: SpeculationSettings, model: Model, block_size: int
) -> tuple[int | None, int | None]:
    """Return the bytes of a draft model's cache per token and per block; None if unknown."""
    draft = parse_draft(speculation.draft)
    if isinstance(draft, int):
        return 0, 0
    if is_checkpoint(draft):
        from batcher.models.checkpoints import cache_size_of  # noqa: PLC0415 - for checkpoints only

        size = cache_size_of(draft)
        return size.per_token, size.of_block(block_size)
    drafting = _load(draft, model)
    return number_of(drafting, "kv_bytes_per_token"), kv_block_bytes_of(drafting, block_size)
