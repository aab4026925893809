"""The batch and the model: the rows and tokens that a step computes, and what comes back."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace as dataclass_replace
from functools import cached_property
from typing import TYPE_CHECKING
from weakref import WeakValueDictionary

from msgspec.structs import replace

from batcher.decoding.logprobs import PromptLogprobs
from batcher.decoding.output_tokens import OutputTokens
from batcher.decoding.stop_matcher import StopMatcher
from batcher.engine.sequence import NOTHING_DECODED, Decoded, Generated, Sequence, Suspended
from batcher.errors import BatchdecodeError, Failure, ModelError
from batcher.events import TokenEvent
from batcher.models.base import Batch, Chunk, Model, ModelOutput, Pages, can_page, eos_token_ids_of
from batcher.request import ConstraintField
from batcher.result import FinishReason
from batcher.scheduling.scheduler import SchedulerOutput
from batcher.scheduling.sequence import NO_SLOT
from batcher.settings import GRAMMAR_TIMEOUT
from batcher.tokens import Tokens

if TYPE_CHECKING:
    from array import array

    from batcher.decoding.constraints import ConstraintCompiler
    from batcher.engine.rows import RowDecoder
    from batcher.scheduling.kv_cache import KVCache

ROBBED = "another engine has taken the model, which has only one cache"

Verify = Callable[[ModelOutput, Decoded], None]

# The runner of each model, by the model's id, which is unique while the runner lives.
_RUNNERS: "WeakValueDictionary[int, ModelRunner]" = WeakValueDictionary()


class ModelRunner:
    """Computes the rows of a batch with a model, and keeps the tokens and stops of each row.

    A plain row (greedy tokens until a stop) costs no Python in a step; `rows` handles everything
    else. A row without a token in a step is suspended, whether the rest of its prompt is still to
    compute or it was preempted.  The rows of a group start, wait and stop together.  A model has
    one cache, so a new runner takes the model from the runner before.

    is_streaming: return text as it is generated.  speculates: whether sequences may have drafts.
    grammar_timeout: CPU seconds for compiling a constraint.
    strict_constraints: refuse constraints that masks cannot enforce completely.
    tokens, stops: of all rows.  rows: the decoder of rows that are not plain, made for the first
    one and busy while there is one.
    pages: where keys and values are kept; None unless both the model and the engine use blocks.
    num_replayed: slots whose rows need no model, since their results come from an earlier run.
    """

    def __init__(
        self,
        model: Model,
        num_slots: int,
        kv_cache: "KVCache[Sequence] | None" = None,
        *,
        is_streaming: bool = False,
        speculates: bool = False,
        grammar_timeout: float = GRAMMAR_TIMEOUT,
        strict_constraints: bool = False,
    ) -> None:
        self._model, self.num_slots, self._kv_cache = model, num_slots, kv_cache
        self._grammar_timeout, self._strict_constraints = grammar_timeout, strict_constraints
        self._is_streaming, self._is_robbed = is_streaming, False
        self.tokens = OutputTokens(num_slots)
        self.stops = StopMatcher(num_slots, model.vocab_size, model.tokenizer)
        self._speculates = speculates
        self.rows: RowDecoder | None = None
        if speculates or is_streaming or model.gives == "logits":
            self.rows = self._make_rows()
        self.num_replayed = 0
        self.pages: Pages | None = None
        self._waiting: Collection[Sequence] = ()  # in slots, without a token in this step
        self._lost: set[Sequence] = set()  # their state in the model is gone
        self._scores: dict[int, tuple[PromptLogprobs, int]] = {}  # by slot, of this step's chunks
        holder = getattr(model, "inner", model)  # a CheckedModel is made anew
        previous = _RUNNERS.get(id(holder))
        if previous is not None:
            previous._is_robbed = True  # noqa: SLF001 - of the same class
        _RUNNERS[id(holder)] = self
        if kv_cache is not None and can_page(model):
            pool, block_size = kv_cache.pool, kv_cache.block_size
            tables: list[list[list[int]]] = [
                [[] for _ in range(num_slots)] for _ in range(kv_cache.num_groups)
            ]
            self.pages = Pages(block_size, tables[0], tables[1:], num_blocks=pool.num_total)
            model.allocate_pages(num_slots, pool.num_total or None, block_size)
        else:
            model.allocate(num_slots)
        self.batch = Batch(num_slots, self.pages)

    # -- constraints, and prompts that are healed ------------------------------------------------

    @cached_property
    def grammars(self) -> "ConstraintCompiler":
        """The compiler of constraints and healed prompts for this model."""
        from batcher.decoding.constraints import ConstraintCompiler  # noqa: PLC0415 - not for plain rows

        model = self._model
        vocab_size = model.vocab_size or len(model.tokenizer.token_bytes)
        return ConstraintCompiler(
            model.tokenizer,
            vocab_size,
            eos_token_ids_of(model),
            self._grammar_timeout,
            is_strict=self._strict_constraints,
        )

    def check_constraint(self, field: ConstraintField, value: object) -> None:
        self.grammars.check(field, value)

    def heal(self, prompt_tokens: Tokens) -> tuple[list[int], bytes]:
        return self.grammars.vocabulary.heal(prompt_tokens)

    # -- a group comes, waits and goes -----------------------------------------------------------

    def _make_rows(self) -> "RowDecoder":
        from batcher.engine.rows import RowDecoder  # noqa: PLC0415 - not for plain rows

        return RowDecoder(
            self._model,
            self.num_slots,
            self.grammars,
            self.tokens,
            self.stops,
            is_streaming=self._is_streaming,
            may_speculate=self._speculates,
        )

    def open(self, first: Sequence) -> list[int]:
        """Start the rows of an admitted group, unless they are suspended.

        Returns the tokens that its constraint forces at the start; they are computed with the
        prompt.
        """
        more, rows = first.more, self.rows
        if more is not None and more.replayed is not None:
            self.num_replayed += first.num_slots
            return []
        if first.suspended is not None:
            return []
        if more is None and (rows is None or not rows.takes_plain):
            slot, stops = first.slot, self.stops
            self.tokens.first_rows[slot] = self.tokens.row
            state = stops.starts.get(first.automaton)
            if state is None:
                stops.open(slot, first.automaton)
            else:
                stops.states[slot] = state
                stops.watched.add(slot)
            return []
        if rows is None:
            rows = self.rows = self._make_rows()
        forced = rows.open(first)
        if forced:
            for row in first.group:
                row.generated = forced
        return forced

    def read(self, slot: int, start: int, stop: int) -> "array[int]":
        """Return the generated tokens start..stop of the row in `slot`."""
        if self.rows is not None and self.rows.is_busy:
            return self.rows.read(slot, start, stop)
        return self.tokens.read(slot, start, stop)

    def record_jump(self, first: Sequence, step: int) -> None:
        """Record that `step` gave a row several tokens, which it computes next."""
        if first.more is not None:
            first.more.jumped_step = step
        self.record_known(first)

    def record_known(self, first: Sequence) -> None:
        """Record that a row's next tokens to compute are generated ones."""
        tokens = self.read(first.slot, 0, first.num_generated).tolist()
        for row in first.group:
            row.generated = tokens

    def close(
        self, first: Sequence, reason: FinishReason, *, lacks_token: bool = False
    ) -> list[Generated]:
        """Remove the rows of a running group; return its output, or one output per beam.

        lacks_token: whether it decodes and received no token in the last step.
        """
        num_tokens = first.num_tokens - first.num_prompt_tokens - lacks_token
        rows, slot = self.rows, first.slot
        if first.more is not None and first.more.replayed is not None:
            self.num_replayed -= first.num_slots
            outputs = [Generated([], reason)]
        elif first.suspended is not None:
            outputs = self.close_suspended(first, reason)
        elif rows is not None and rows.is_busy:
            rows.suspend(first, num_tokens)
            outputs = rows.close(first, reason)
        else:
            if slot in self.stops.watched:
                self.stops.close(slot)
            outputs = [Generated(self.tokens.close(slot, num_tokens), reason)]
        self._release(first)
        return outputs

    def close_suspended(self, first: Sequence, reason: FinishReason) -> list[Generated]:
        if self.rows is not None:
            return self.rows.close(first, reason)
        return [Generated(first.generated or [], reason)]

    def preempt(self, first: Sequence) -> None:
        self.suspend(first)
        self._release(first)

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """Copy the state of beam `parent` to `child`, which already holds its blocks."""
        if self.pages is None:
            self._model.fork(parent.slot, child.slot)
        else:
            _show(self.pages, child)
        self.batch.enter(child.slot)

    def suspend(self, first: Sequence) -> None:
        """Suspend the rows of a group, in their slots or, after `_release`, outside the batch."""
        if first.suspended is not None:
            return
        if self.rows is not None and self.rows.is_busy:
            self.rows.suspend(first, first.num_generated)
        else:
            first.generated = self.tokens.close(first.slot, first.num_generated)
            first.suspended = Suspended(self.stops.suspend(first.slot))

    def resume(self, first: Sequence) -> None:
        """Resume the suspended rows of a group in their current slots."""
        if self.rows is not None:
            self.rows.resume(first)
        elif first.suspended is not None:
            self.tokens.resume(first.slot, first.generated or [])
            self.stops.resume(first.slot, first.suspended.place)
            first.suspended = None

    def _release(self, first: Sequence) -> None:
        """Free the model's state of a group that leaves its slots."""
        for row in (first, *first.others) if first.others else (first,):
            self.batch.leave(row.slot)
            self._model.release(row.slot)
        if self._lost:
            self._lost.difference_update(first.group)
        if self.pages is not None and self.pages.moved:
            self.pages.moved.pop(first.slot, None)

    # -- before a step ---------------------------------------------------------------------------

    def prepare(
        self,
        scheduled: SchedulerOutput[Sequence],
        prefilling: Collection[Sequence],
        decode_step: int,
    ) -> None:
        """Set up the chunks of the next step, in addition to the next token of each decoding row.

        prefilling: the groups with slots that receive no token in this step.
        """
        pages, self._waiting = self.pages, prefilling
        for first in prefilling:
            self.suspend(first)
            for row in first.group:
                if self.batch.holds(row.slot):  # it receives no token until it joins again
                    self.batch.leave(row.slot)
                    if pages is not None:
                        pages.moved.pop(row.slot, None)
                    if scheduled.is_decode_step and row not in scheduled.num_scheduled_tokens:
                        self._model.release(row.slot)  # or the model would advance it
                        if pages is None:
                            self._lost.add(row)
        for first in scheduled.prefill_finished:
            if first.suspended is not None:
                self.resume(first)
        if pages is not None:
            for first in scheduled.admitted:
                for row in first.group:
                    _show(pages, row)
            if self._kv_cache is not None:
                pages.copies = self._kv_cache.take_copies()
                pages.num_blocks = self._kv_cache.pool.num_total
            if scheduled.grown:
                pages.moved |= {row.slot: decode_step + row.offset for row in scheduled.grown}
        join, add_part = self.batch.join, self.batch.add_part
        for row, num_tokens in scheduled.num_scheduled_tokens.items():
            more, stop = row.more, row.num_computed_tokens
            if more is None and row.is_decoding and num_tokens == row.num_prompt_tokens == stop:
                join(Chunk(row.slot, row.prompt.tokens, 0))  # the usual case
            elif more is None or more.replayed is None:
                take = join if row.is_decoding else add_part
                take(self._chunk(row, stop - num_tokens, stop))
        for first in scheduled.prefill_finished:
            is_usual = first.num_tokens and not first.others and first.generated is None
            if not is_usual and (first.more is None or first.more.replayed is None):
                for row in first.computed_group:  # later tokens go to the model one by one
                    row.generated = None
                    if not row.num_tokens:  # an empty prompt has no chunk
                        join(Chunk(row.slot, [], 0))

    def _chunk(self, row: Sequence, start: int, stop: int) -> Chunk:
        """Return the tokens start..stop of a row, and any before them that the model lacks.

        A model without pages cannot read cached blocks: a hit saves time by the clock only.
        """
        if start and self.pages is None and (start == row.num_cached_tokens or row in self._lost):
            start = 0
            self._lost.discard(row)
        known = row.known_tokens(start, stop)
        chunk = Chunk(row.slot, known, start)
        scores = None if row.more is None else row.more.prompt_logprobs
        if scores is None or not scores.wants(start, start + len(known)):
            return chunk
        self._scores[row.slot] = scores, start
        return replace(chunk, is_scored=True)

    def _take_scores(self, output: ModelOutput) -> dict[int, str]:
        """Store the prompt log-probabilities of scored chunks; return failures by slot."""
        failed = {}
        for slot, (scores, start) in self._scores.items():
            if slot in output.failed or scores.is_complete:  # scored by another sample of this step
                continue
            try:
                problem = scores.take(start, output.chunk_logits.get(slot, ()))
            except ModelError as error:
                problem = str(error)
            if problem is not None:
                failed[slot] = problem
        return failed

    # -- a step ----------------------------------------------------------------------------------

    def step(self, step: int, verify: Verify | None = None, *, is_decoding: bool = True) -> Decoded:
        """Compute one token for every row that is due one; return what else happened.

        step: its index.  verify: accepts drafts of rows.
        is_decoding: if False, only chunks are computed and no row receives a token.
        """
        batch, rows, pages = self.batch, self.rows, self.pages
        output: ModelOutput | None
        if rows is not None and is_decoding:
            rows.ask(batch)
        if self._is_robbed:
            raise BatchdecodeError(ROBBED)
        try:
            if is_decoding:
                output = self._model.forward(batch)
            else:
                with batch.standing_still():
                    output = self._model.forward(batch)
        except ModelError as error:
            slots = batch.slots.tolist() if is_decoding else []
            slots += [*(chunk.slot for chunk in batch.chunks), *self._lose_writes()]
            output, failed = None, self._failures(dict.fromkeys(slots, str(error)))
        else:
            unscored = self._take_scores(output) if self._scores else {}
            if unscored:
                output = dataclass_replace(output, failed={**output.failed, **unscored})
            failed = self._failures(output.failed) if output.failed else {}
        if batch.chunks:
            batch.chunks = []
            self._scores.clear()
        if pages is not None:
            pages.copies, pages.moves = [], []
            if is_decoding and pages.moved:  # keep the positions of rows that stand still
                pages.moved = {}
        if output is None or not is_decoding:
            uncomputed = frozenset(failed)
            return Decoded(failed=failed, uncomputed=uncomputed) if failed else NOTHING_DECODED
        batch.tokens = tokens = output.tokens
        if rows is not None and rows.is_busy:
            decoded = rows.decode(output, failed, step)
            if verify is not None:
                verify(output, decoded)
            return decoded
        self.tokens.append(tokens)
        stopped = self.stops.advance(tokens)
        if not stopped and not failed:
            return NOTHING_DECODED
        return Decoded(stopped, failed, uncomputed=frozenset(failed))

    def _failures(self, failed: Mapping[int, str | Failure]) -> dict[int, Failure]:
        """Return the model's failures by the slot of each group's first row."""
        first_slots = {} if self.rows is None else self.rows.first_slots
        return {
            first_slots.get(slot, slot): Failure("model-error", why)
            if isinstance(why, str)
            else why
            for slot, why in failed.items()
        }

    def take_streamed(self) -> list[TokenEvent]:
        return [] if self.rows is None else self.rows.take_streamed()

    def _lose_writes(self) -> list[int]:
        """Drop cached blocks whose copy may not have happened; return the slots that read them."""
        pages, kv_cache = self.pages, self._kv_cache
        if pages is None or kv_cache is None or not (pages.moves or pages.copies):
            return []
        blocks = {target // pages.block_size for _, target in pages.moves}
        blocks |= {target for _, target in pages.copies}
        for block in blocks:
            kv_cache.pool.lose(block)
        waiting = [row.slot for first in self._waiting for row in first.group]
        slots = {*self.batch.slots.tolist(), *waiting} - {NO_SLOT}
        tables = [pages.tables, *pages.group_tables]
        return [slot for slot in slots if any(blocks & {*table[slot]} for table in tables)]


def _show(pages: Pages, row: Sequence) -> None:
    pages.tables[row.slot] = row.block_table
    for tables, table in zip(pages.group_tables, row.group_tables, strict=False):
        tables[row.slot] = table
