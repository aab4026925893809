"""Drafts of a second model, which computes a row's next tokens, in a line one after the other.

Its cache is in the same blocks as that of the model it drafts for: a block has room for both, so
what is scheduled, shared, copied and freed for one is for the other.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from itertools import takewhile
from operator import eq, truth

import numpy as np
from msgspec.structs import replace

from batcher.engine.decoded import Choose
from batcher.models.base import Batch, Chunk, ModelOutput, PagedModel, Pages
from batcher.speculation.proposal import Proposal
from batcher.tokens import Tokens

LookAhead = Callable[[list[int]], AbstractContextManager[Choose]]
"""Let rows in these slots be given tokens inside that are not theirs afterwards."""


class DraftingRows:
    """Rows of a model that drafts, by slot, and how much of each it has computed.

    pages: of the other model.  shares_cells: whether what that has computed is also computed here.
    """

    def __init__(
        self,
        model: PagedModel,
        num_slots: int,
        pages: Pages,
        eos_token_ids: Iterable[int],
        *,
        shares_cells: bool = False,
    ) -> None:
        self._model, self._shares_cells = model, shares_cells
        self._eos_token_ids = frozenset(eos_token_ids)
        self._theirs = pages
        self._pages = Pages(
            pages.block_size, pages.tables, pages.group_tables, num_blocks=pages.num_blocks
        )
        self._batch = Batch(num_slots, self._pages)
        self._rows: dict[int, list[int]] = {}
        self._num_computed_tokens = [0] * num_slots
        self._drafts: dict[int, list[int]] = {}  # those of the current step
        if not shares_cells:
            model.allocate_pages(num_slots, pages.num_blocks or None, pages.block_size)

    def open(self, slot: int, tokens: Tokens) -> None:
        """Begin a row that has `tokens`, of which `compute` has been told."""
        self._rows[slot] = [*tokens]

    def extend(self, given: Mapping[int, Sequence[int]]) -> None:
        """Let rows have been given tokens; what is computed of drafts that differ is undone."""
        for slot, tokens in given.items():
            row, draft = self._rows[slot], self._drafts.pop(slot, ())
            num_same = sum(1 for _ in takewhile(truth, map(eq, draft, tokens)))
            self._num_computed_tokens[slot] = min(
                self._num_computed_tokens[slot], len(row) + num_same
            )
            row += tokens

    def close(self, slot: int, *, has_ended: bool) -> None:  # noqa: ARG002 - as other drafters
        """Forget the row in `slot`."""
        del self._rows[slot]
        self._drafts.pop(slot, None)

    def compute(self, chunks: Iterable[Chunk]) -> None:
        """Compute what the step computes of prompts, as the other model does."""
        if self._shares_cells:
            return
        self._pages.copies += self._theirs.copies
        for chunk in chunks:
            if chunk.token_ids:
                self._batch.add_part(replace(chunk, is_scored=False))
                self._num_computed_tokens[chunk.slot] = chunk.start + len(chunk.token_ids)
        if self._batch.chunks:
            self._forward([])

    def _start(self, slot: int) -> int:
        """Return from which token on the model is to compute a row."""
        return len(self._rows[slot]) - 1 if self._shares_cells else self._num_computed_tokens[slot]

    def _take_over(self) -> None:
        """Do what is to be done with shared cells before anything is written: for both models.

        In a call of its own: if a later one fails, it is done, and the other model goes on alone.
        """
        own, theirs = self._pages, self._theirs
        if self._shares_cells and (theirs.moves or theirs.copies):
            own.moves, own.copies = theirs.moves, theirs.copies
            self._forward([])
            theirs.moves, theirs.copies = [], []

    def _stand_still(self, slot: int) -> None:
        """Compute nothing more of a row in this step."""
        self._batch.leave(slot)
        self._model.release(slot)

    def _forward(self, slots: list[int]) -> ModelOutput:
        """Compute what the batch has, with the logits of those in `slots`, which yield."""
        batch, pages = self._batch, self._pages
        pages.num_blocks = self._theirs.num_blocks
        batch.logit_slots = np.array(slots, np.int64)
        output = self._model.forward(batch)
        batch.chunks, pages.moves, pages.copies, pages.moved = [], [], [], {}
        return output


class DraftModel(DraftingRows):
    """Proposes lines.

    Tokens are chosen from the logits as from those of the other model: with the same settings, and
    what constraints allow; with which noise is for `look_ahead` to say, see SpeculatingRows.
    """

    def __init__(
        self,
        model: PagedModel,
        num_slots: int,
        pages: Pages,
        look_ahead: LookAhead,
        eos_token_ids: Iterable[int],
        *,
        shares_cells: bool = False,
    ) -> None:
        super().__init__(model, num_slots, pages, eos_token_ids, shares_cells=shares_cells)
        self._look_ahead = look_ahead

    def propose(self, num_wanted: Mapping[int, int]) -> dict[int, Proposal]:
        """Return what the model goes on with, as many tokens as are wanted, by slot."""
        drafts: dict[int, list[int]] = {slot: [] for slot in sorted(num_wanted)}
        self._drafts = drafts
        active = [*drafts]
        self._take_over()
        with self._look_ahead(active) as choose:
            for slot in active:
                start = self._start(slot)
                self._batch.join(Chunk(slot, self._rows[slot][start:], start))
            while active:
                logits = self._forward(active).logits
                chosen = {} if logits is None else choose(logits, active)
                for slot in active:
                    self._num_computed_tokens[slot] = len(self._rows[slot]) + len(drafts[slot])
                    if slot in chosen:
                        drafts[slot].append(chosen[slot])
                        self._batch.tokens[slot] = chosen[slot]
                active = self._going_on(active, chosen, num_wanted)
        return {slot: Proposal(draft.copy()) for slot, draft in drafts.items()}

    def _going_on(
        self, active: list[int], chosen: Mapping[int, int], num_wanted: Mapping[int, int]
    ) -> list[int]:
        """Return the slots whose drafts go on, after letting the others stand still."""
        goes_on = []
        for slot in active:
            draft = self._drafts[slot]
            has_token = slot in chosen and chosen[slot] not in self._eos_token_ids
            if has_token and len(draft) < num_wanted[slot]:
                goes_on.append(slot)
                self._pages.moved[slot] = len(self._rows[slot]) + len(draft) - 1
            else:
                self._stand_still(slot)
        return goes_on
