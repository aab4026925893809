"""The batch and the model: which rows a step computes, with which tokens, and what comes back."""

from collections.abc import Collection
from dataclasses import replace as dataclass_replace
from typing import cast
from weakref import WeakValueDictionary

from msgspec.structs import replace

from batcher.decoding.prompt_logprobs import PromptLogprobs
from batcher.engine.decoded import NOTHING_DECODED, Decoded, Generated, SuspendedRows
from batcher.engine.decoder import Decoder
from batcher.errors import BatchdecodeError, Failure, ModelError
from batcher.models.base import Batch, Chunk, Model, ModelOutput, Pages, can_page
from batcher.result import FinishReason
from batcher.scheduling.kv_cache import KVCache
from batcher.scheduling.plan import StepPlan
from batcher.scheduling.running import rows_of
from batcher.sequence import Sequence

ROBBED = "another engine has taken the model, which has only one cache"

# Who has a model, by the model's id, which is its own as long as the runner lives.
_RUNNERS: "WeakValueDictionary[int, ModelRunner]" = WeakValueDictionary()


class ModelRunner:
    """Has a model compute rows; takes the model from the runner that had it, as it has one cache.

    A row that a step gives no token is suspended in the decoder, whether it waits for the rest of
    its prompt or was preempted.  A leader and its companions begin, wait and stop together.
    """

    def __init__(
        self, model: Model, num_slots: int, kv_cache: KVCache | None, *, is_streaming: bool
    ) -> None:
        self.decoder = Decoder(model, num_slots, is_streaming=is_streaming)
        self._model = model
        self._is_robbed = False
        self._kv_cache = kv_cache
        self._pages: Pages | None = None
        self._suspended: dict[Sequence, SuspendedRows] = {}
        self._lost: set[Sequence] = set()  # of which the model has nothing any more
        self._scores: dict[int, tuple[PromptLogprobs, int]] = {}  # by slot, of this step's chunks
        holder = getattr(model, "inner", model)  # a check around it is made anew
        previous = _RUNNERS.get(id(holder))
        if previous is not None:
            previous._is_robbed = True  # noqa: SLF001 - of the same class
        _RUNNERS[id(holder)] = self
        if kv_cache is not None and can_page(model):
            pool, block_size = kv_cache.pool, kv_cache.block_size
            self._pages = Pages(block_size, [[] for _ in range(num_slots)])
            self._pages.num_blocks = pool.num_total
            model.allocate_pages(num_slots, pool.num_total or None, block_size)
        else:
            model.allocate(num_slots)
        self._batch = Batch(num_slots, self._pages)

    @property
    def has_pages(self) -> bool:
        """Whether the model reads and writes what rows have computed through their blocks."""
        return self._pages is not None

    # -- a row comes, waits and goes -------------------------------------------------------------

    def open(self, leader: Sequence) -> int:
        """Begin the rows of a leader that has slots for the first time.

        Returns how many tokens are the row's from the outset, because nothing else is allowed.
        """
        forced = self.decoder.open(leader)
        if forced:
            for row in leader.rows:
                row.generated = forced
        return len(forced)

    def note_jump(self, leader: Sequence) -> None:
        """Take note that a leader has several tokens that the model does not know of."""
        generated = self.decoder.read(leader.slot, 0, leader.num_generated)
        for row in leader.rows:
            row.generated = generated

    def suspend(self, leader: Sequence, num_generated: int) -> None:
        """Let the rows of a leader wait: in their slots, or elsewhere after `release`.

        num_generated: how many tokens the row has generated.
        """
        if leader in self._suspended:
            return
        suspended = self.decoder.suspend(leader, num_generated)
        self._suspended[leader] = suspended
        for row, tokens in zip(leader.rows, suspended.tokens, strict=False):
            row.generated = tokens

    def release(self, leader: Sequence) -> None:
        """Let the model forget the rows of a leader, which leaves its slots."""
        for row in leader.rows:
            self._batch.leave(row.slot)
            self._model.release(row.slot)
        if self._lost:
            self._lost.difference_update(leader.rows)

    def stop(self, leader: Sequence, num_generated: int, reason: FinishReason) -> list[Generated]:
        """Forget `leader` and its companions; return its output, or those of its beams.

        num_generated: how many of the row's tokens are its output; beams know that themselves.
        """
        if leader in self._suspended:
            return self.decoder.close_suspended(self._suspended.pop(leader), reason)
        if leader.role == "beam":
            return self.decoder.close_beams(leader.slot, reason)
        return [self.decoder.close(leader.slot, num_generated, reason)]

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """Let `child`, which holds its blocks by now, go on from what there is of `parent`."""
        if self._pages is None:
            self._model.fork(parent.slot, child.slot)
        else:
            self._pages.tables[child.slot] = child.table
        self._batch.enter(child.slot)

    # -- a step ----------------------------------------------------------------------------------

    def prepare(self, plan: StepPlan, waiting: Collection[Sequence]) -> None:
        """Take in what the next step computes beside the next token of each decoding row.

        waiting: leaders with slots that the step gives no token.
        """
        if waiting:
            self._hold_all(plan, waiting)
        begun: list[Sequence] = plan.begun  # type: ignore[assignment]  # the engine has no others
        if self._suspended:
            for leader in begun:
                suspended = self._suspended.pop(leader, None)
                if suspended is not None:
                    self.decoder.resume(leader, suspended)
        if self._pages is not None:
            self._turn_pages(plan, self._pages)
        self._take_chunks(plan)
        for leader in begun:
            is_usual = leader.num_tokens and not leader.companions and leader.generated is None
            if not is_usual and leader.known is None:
                self._begin(leader)

    def _hold_all(self, plan: StepPlan, waiting: Collection[Sequence]) -> None:
        """Suspend the rows that are given no token."""
        has_chunk = {chunk.sequence for chunk in plan.chunks}
        for leader in waiting:
            self.suspend(leader, leader.num_generated)
            for row in leader.rows:
                self._hold(row, is_computed=row in has_chunk or not plan.decodes)

    def _begin(self, leader: Sequence) -> None:
        """Let every further token of a leader's rows go to the model by itself."""
        for row in cast(tuple[Sequence, ...], rows_of(leader)):
            row.generated = None
            if not row.num_tokens:  # an empty prompt, of which there is no chunk
                self._batch.join(Chunk(row.slot, [], 0))

    def _take_chunks(self, plan: StepPlan) -> None:
        """Put the chunks of a plan into the batch."""
        batch = self._batch
        for computed, start, num_tokens in plan.chunks:
            row: Sequence = computed  # type: ignore[assignment]  # as above
            if row.known is None:
                if start or num_tokens < row.num_prompt_tokens:
                    chunk = self._chunk(row, start, num_tokens)
                else:
                    chunk = Chunk(row.slot, row.known_tokens(0, num_tokens), 0)
                if row.prompt_logprobs is not None:
                    chunk = self._scored(chunk, row.prompt_logprobs)
                take = batch.join if row.is_decoding else batch.add_part
                take(chunk)

    def _scored(self, chunk: Chunk, scores: PromptLogprobs) -> Chunk:
        """Return `chunk` as one that is scored, if it tells more of a prompt than is known."""
        if not scores.wants(chunk.start, chunk.start + len(chunk.token_ids)):
            return chunk
        self._scores[chunk.slot] = scores, chunk.start
        return replace(chunk, is_scored=True)

    def _take_scores(self, output: ModelOutput) -> dict[int, str]:
        """Take in the logits of scored chunks; return by slot which fail, and why."""
        failed = {}
        for slot, (scores, start) in self._scores.items():
            if slot in output.failed or scores.is_complete:  # by another sample of this step
                continue
            try:
                problem = scores.take(start, output.chunk_logits.get(slot, ()))
            except ModelError as error:
                problem = str(error)
            if problem is not None:
                failed[slot] = problem
        return failed

    def _hold(self, row: Sequence, *, is_computed: bool) -> None:
        """Let a row yield no token until it joins the batch again."""
        if not self._batch.holds(row.slot):
            return
        self._batch.leave(row.slot)
        if not is_computed:  # or the model would go on with it
            self._model.release(row.slot)
            if self._pages is None:
                self._lost.add(row)

    def _turn_pages(self, plan: StepPlan, pages: Pages) -> None:
        """Tell the model where the tokens of its rows are."""
        for leader in cast(list[Sequence], plan.admitted):
            for row in leader.rows:
                pages.tables[row.slot] = row.table
        if self._kv_cache is not None:
            pages.copies = self._kv_cache.take_copies()
            pages.num_blocks = self._kv_cache.pool.num_total
        for grown in plan.grown:
            pages.moved[grown.slot] = plan.decode_step + grown.offset

    def _chunk(self, row: Sequence, start: int, num_tokens: int) -> Chunk:
        """Return a planned chunk; with all that is before it, if the model does not have that."""
        stop = start + num_tokens
        if start and self._pages is None and (start == row.num_cached or row in self._lost):
            start = 0
            self._lost.discard(row)
        return Chunk(row.slot, row.known_tokens(start, stop), start)

    def step(self, step: int) -> Decoded:
        """Compute one token for every row that is not held; return what that means for them.

        step: its number.

        Raises:
            BatchdecodeError: another runner has taken the model.
        """
        batch, decoder = self._batch, self.decoder
        batch.logit_slots = decoder.logit_slots
        if self._is_robbed:
            raise BatchdecodeError(ROBBED)
        try:
            output = self._model.forward(batch)
        except ModelError as error:
            slots = [*batch.slots.tolist(), *(chunk.slot for chunk in batch.chunks)]
            self._forget_step()
            return decoder.fail(dict.fromkeys(slots, str(error)))
        if self._scores:
            failed = self._take_scores(output)
            if failed:
                output = dataclass_replace(output, failed={**output.failed, **failed})
        if batch.chunks or self._pages is not None:
            self._forget_step()
        batch.tokens = output.tokens
        return decoder.decode(output, step)

    def compute_prompts(self) -> Decoded:
        """Compute the chunks of the step, and give nobody a token; return what failed.

        Raises:
            BatchdecodeError: another runner has taken the model.
        """
        batch, decoder = self._batch, self.decoder
        if self._is_robbed:
            raise BatchdecodeError(ROBBED)
        failed: dict[int, str | Failure]
        try:
            with batch.standing_still():
                output = self._model.forward(batch)
                failed = {**output.failed, **self._take_scores(output)}
        except ModelError as error:
            failed = dict.fromkeys((chunk.slot for chunk in batch.chunks), str(error))
        self._forget_step()
        return decoder.fail(failed) if failed else NOTHING_DECODED

    def _forget_step(self) -> None:
        """Forget what was for one step alone."""
        if self._batch.chunks:
            self._batch.chunks = []
            self._scores.clear()
        pages = self._pages
        if pages is not None and (pages.moved or pages.copies):
            pages.moved, pages.copies = {}, []
