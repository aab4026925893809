"""A Model that somebody else wrote, with its answers looked at before the engine believes them."""

from array import array
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from batcher.errors import (
    RUN_ERROR_CODES,
    Failure,
    InvariantError,
    LostModelError,
    ModelError,
    describe,
    writable,
)
from batcher.foreign import attribute_of, calling, child_ends_here, note_raised, raised
from batcher.models.answers import shown
from batcher.models.base import (
    Batch,
    Chunk,
    FloatArray,
    IntArray,
    Model,
    ModelOutput,
    OutputKind,
    Tokenizer,
    can_page,
    can_score,
    can_verify,
    can_verify_trees,
)
from batcher.models.prefixes import Prefixes, extend
from batcher.request import MAX_INT


class CheckedModel:
    """Passes everything on to `inner`; an answer that is none fails the rows it is about.

    If `inner` has no `fork`, it is handed the whole prefix of a forked row, as that of a new one;
    in pages, there is nothing to fork.
    """

    def __init__(self, inner: Model) -> None:
        self.inner = inner
        self.gives: OutputKind = attribute_of(inner, "gives", "tokens")
        self.is_paged, self.scores_prompts = can_page(inner), can_score(inner)
        self.verifies_drafts, self.verifies_trees = can_verify(inner), can_verify_trees(inner)
        self.recomputes_drafts = attribute_of(inner, "recomputes_drafts", None) is True
        self._has_fork = callable(attribute_of(inner, "fork", None))
        self._prefixes: Prefixes | None = None
        self._forked: set[int] = set()  # slots whose rows `inner` has not been told of
        self.name, self.settings = inner.name, inner.settings
        self.tokenizer: Tokenizer = inner.tokenizer
        self.vocab_size, self.eos_token_id = inner.vocab_size, inner.eos_token_id
        self._num_slots, self._is_paging = 0, False

    def allocate(self, num_slots: int) -> None:
        """Make room for `num_slots` rows.

        Raises:
            RaisedError: the model raised.
        """
        self._begin(num_slots, None if self._has_fork else {})
        with calling(f"{self.name} cannot make room for {num_slots} rows:"):
            self.inner.allocate(num_slots)

    def allocate_pages(self, num_slots: int, num_blocks: int | None, block_size: int) -> None:
        """Make room for `num_slots` rows in `num_blocks` blocks.

        Raises:
            RaisedError: the model raised.
        """
        self._begin(num_slots, None)
        self._is_paging = True
        if not can_page(self.inner):
            raise InvariantError(f"{self.name} is not paged")
        count = "blocks" if num_blocks is None else f"{num_blocks} blocks"
        room = f"{num_slots} rows in {count} of {block_size} tokens"
        with calling(f"{self.name} cannot make room for {room}:"):
            self.inner.allocate_pages(num_slots, num_blocks, block_size)

    def _begin(self, num_slots: int, prefixes: Prefixes | None) -> None:
        self._num_slots, self._prefixes, self._is_paging = num_slots, prefixes, False
        self._forked.clear()

    def fork(self, source: int, target: int) -> None:
        """Let the row in `target` be what the one in `source` is.

        Raises:
            RaisedError: the model raised; nobody knows what its rows hold now.
        """
        if self._prefixes is not None:
            if target in self._prefixes:
                self.release(target)
            self._prefixes[target] = self._prefixes[source].copy()
            self._forked.add(target)
            return
        if self._is_paging:
            return
        with calling(f"{self.name} cannot fork slot {source}:"):
            self.inner.fork(source, target)

    def release(self, slot: int) -> None:
        """Forget the row in `slot`.

        Raises:
            RaisedError: the model raised; nobody knows what its rows hold now.
        """
        if self._prefixes is not None:
            self._prefixes.pop(slot, None)
            if slot in self._forked:
                self._forked.remove(slot)
                return
        with calling(f"{self.name} cannot release slot {slot}:"):
            self.inner.release(slot)

    def forward(self, batch: Batch) -> ModelOutput:
        """Return the model's answer, with token ids out of range among its failures.

        Raises:
            ModelError: the model raised, or did not return one integer for each slot, and logits
            for each of `batch.logit_slots` and after each draft.
        """
        slots, logit_slots = batch.slots, batch.logit_slots  # the model may change the batch
        token_slots = slots
        computed = {*slots.tolist(), *(chunk.slot for chunk in batch.chunks)}
        if logit_slots.size:
            is_token_slot = np.ones(self._num_slots, np.bool_)
            is_token_slot[logit_slots] = False
            token_slots = slots[is_token_slot[slots]]
        if self._prefixes is not None:
            self._hand_over_forks(batch, self._prefixes)
        if any(isinstance(chunk.token_ids, array) for chunk in batch.chunks):
            batch.chunks = [replace(chunk, token_ids=[*chunk.token_ids]) for chunk in batch.chunks]
        chunks = list(batch.chunks)  # as above
        num_drafts = sum(chunk.num_drafts for chunk in chunks)
        try:
            with child_ends_here():
                output = self.inner.forward(batch)
            failed = {slot: _read_failure(why) for slot, why in dict(output.failed).items()}
            answered = np.asarray(output.tokens) if token_slots.size else None
            logits = np.asarray(output.logits) if logit_slots.size else None
            after_drafts = np.asarray(output.draft_logits) if num_drafts else None
            scores = dict(output.chunk_logits) if any(chunk.is_scored for chunk in chunks) else {}
        except (KeyboardInterrupt, LostModelError):
            raise
        except ModelError as error:
            raise ModelError(describe(error).removeprefix("ModelError: ")) from error
        except BaseException as error:  # whatever another's code raises is its failure
            note_raised(raised(error))
            raise ModelError(f"{self.name} raised {describe(error)}") from error
        if not failed.keys() <= computed:
            raise ModelError(f"{self.name} failed rows that it was not asked for: {list(failed)}")
        tokens = np.zeros(self._num_slots, np.int64)
        if answered is not None:
            failed = self._take_tokens(answered, token_slots, tokens) | failed
        checked_scores = {
            chunk.slot: self._pieces(scores.get(chunk.slot, ()), len(chunk.token_ids))
            for chunk in chunks
            if chunk.is_scored
        }
        checked = None if logits is None else self._logits(logits, logit_slots.size)
        if after_drafts is not None:
            after_drafts = self._logits(after_drafts, num_drafts, "drafts")
        return ModelOutput(tokens, failed, checked, checked_scores, after_drafts)

    def _pieces(self, pieces: Iterable[Any], num_tokens: int) -> Iterator[FloatArray]:
        """Yield the answered logits after each token of a chunk, as the engine takes them.

        Raises:
            ModelError: they are no such logits, or not one row for each token.
        """
        num_left = num_tokens
        try:
            for answered in pieces:
                piece = np.asarray(answered)
                num_left -= len(piece)
                yield self._logits(piece, len(piece))
        except (ModelError, LostModelError, KeyboardInterrupt, GeneratorExit):
            raise
        except BaseException as error:  # as in forward
            raise ModelError(f"{self.name} raised {describe(error)}") from error
        if num_left:
            found = f"logits of {num_tokens - num_left} tokens"
            raise ModelError(f"{self.name} returned {found}, not of the {num_tokens} of the chunk")

    def _hand_over_forks(self, batch: Batch, prefixes: Prefixes) -> None:
        """Make new rows of those that were forked, for a model that has no fork."""
        extend(prefixes, batch)
        due = {slot for slot in self._forked if batch.holds(slot)}
        if due:
            chunks = {chunk.slot: chunk for chunk in batch.chunks}
            chunks |= {slot: Chunk(slot, prefixes[slot].copy(), 0) for slot in due}
            batch.chunks = [chunks[slot] for slot in sorted(chunks)]
            self._forked -= due

    def _take_tokens(
        self, answered: NDArray[Any], slots: IntArray, tokens: IntArray
    ) -> dict[int, str | Failure]:
        """Put the good ones of the answered tokens into `tokens`; return what the others are."""
        if answered.shape != (self._num_slots,) or answered.dtype.kind not in "iu":
            shape = f"{answered.dtype} {list(answered.shape)}"
            raise ModelError(f"{self.name} returned {shape}, not integers [{self._num_slots}]")
        largest = MAX_INT if self.vocab_size is None else self.vocab_size - 1
        is_good = (answered[slots] >= 0) & (answered[slots] <= largest)
        tokens[slots[is_good]] = answered[slots[is_good]]
        return {
            slot: f"{self.name} returned {answered[slot]}, which is no token id from 0 to {largest}"
            for slot in slots[~is_good].tolist()
        }

    def _logits(self, answered: NDArray[Any], num_rows: int, whose: str = "") -> FloatArray:
        """Return the answered logits as [rows, vocab] float32."""
        if answered.shape != (num_rows, self.vocab_size) or answered.dtype.kind not in "iuf":
            shape = f"{answered.dtype} {list(answered.shape)}"
            wanted = f"[{num_rows}, {self.vocab_size}]"
            kind = f"logits of {whose}" if whose else "logits"
            raise ModelError(f"{self.name} returned {kind} {shape}, not numbers {wanted}")
        with np.errstate(over="ignore"):  # what is too large becomes infinite
            return np.ascontiguousarray(answered, np.float32)


def _read_failure(why: Any) -> str | Failure:
    """Return why a row failed, as text that can be written whatever the model says."""
    if isinstance(why, Failure) and why.code in RUN_ERROR_CODES:
        return Failure(why.code, writable(why.message))
    return writable(why) if isinstance(why, str) else shown(why)
