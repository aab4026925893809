"""Drafts of a second model: lines, computed token by token, or trees, level by level.

Its cache uses the same block tables as that of the target, so scheduling, sharing, copying and
freeing a block apply to both.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from itertools import takewhile
from operator import eq, truth

import numpy as np
from msgspec.structs import replace

from batcher.errors import InvariantError
from batcher.models.base import Batch, Chunk, FloatArray, ModelOutput, PagedModel, Pages
from batcher.speculation.settings import Proposal, proposal_of
from batcher.tokens import Tokens

Choose = Callable[[FloatArray, list[int]], dict[int, int]]
"""Return the next token of each row that has one, by slot; of logits [rows, vocab], and slots."""


class DraftingRows:
    """Rows of a draft model, by slot, and how much of each is computed."""

    def __init__(
        self, model: PagedModel, num_slots: int, pages: Pages, eos_token_ids: Iterable[int]
    ) -> None:
        self._model, self._theirs = model, pages
        self._eos_token_ids = frozenset(eos_token_ids)
        self._pages = Pages(
            pages.block_size, pages.tables, pages.group_tables, num_blocks=pages.num_blocks
        )
        self._batch = Batch(num_slots, self._pages)
        self._rows: dict[int, list[int]] = {}
        self._num_computed_tokens = [0] * num_slots
        self._drafts: dict[int, list[int]] = {}  # of the current step
        model.allocate_pages(num_slots, pages.num_blocks or None, pages.block_size)

    def open(self, slot: int, tokens: Tokens) -> None:
        self._rows[slot] = [*tokens]

    def extend(self, given: Mapping[int, Sequence[int]]) -> None:
        """Append tokens to rows; forget what was computed for different drafts."""
        for slot, tokens in given.items():
            row, draft = self._rows[slot], self._drafts.pop(slot, ())
            num_same = sum(1 for _ in takewhile(truth, map(eq, draft, tokens)))
            self._num_computed_tokens[slot] = min(
                self._num_computed_tokens[slot], len(row) + num_same
            )
            row += tokens

    def close(self, slot: int, *, has_ended: bool) -> None:  # noqa: ARG002 - as other drafters
        del self._rows[slot]
        self._drafts.pop(slot, None)

    def compute(self, chunks: Iterable[Chunk]) -> None:
        """Compute the prompt chunks that the target computes in this step."""
        self._pages.copies += self._theirs.copies
        for chunk in chunks:
            if chunk.token_ids:
                self._batch.add_part(replace(chunk, is_scored=False))
                self._num_computed_tokens[chunk.slot] = chunk.start + len(chunk.token_ids)
        if self._batch.chunks:
            self._forward([])

    def _stand_still(self, slot: int) -> None:
        self._batch.leave(slot)
        self._model.release(slot)

    def _forward(self, slots: list[int]) -> ModelOutput:
        batch, pages = self._batch, self._pages
        pages.num_blocks = self._theirs.num_blocks
        batch.logit_slots = np.array(slots, np.int64)
        output = self._model.forward(batch)
        batch.chunks, pages.moves, pages.copies, pages.moved = [], [], [], {}
        return output


class DraftModel(DraftingRows):
    """Proposes lines.

    Tokens are chosen as by the target: with the same settings, constraints and, as `look_ahead`
    decides, noise; see Speculator.
    """

    def __init__(
        self,
        model: PagedModel,
        num_slots: int,
        pages: Pages,
        eos_token_ids: Iterable[int],
        look_ahead: Callable[[list[int]], AbstractContextManager[Choose]],
    ) -> None:
        super().__init__(model, num_slots, pages, eos_token_ids)
        self._look_ahead = look_ahead

    def propose(self, num_wanted: Mapping[int, int]) -> dict[int, Proposal]:
        """Return the model's continuation of the wanted length, by slot."""
        drafts: dict[int, list[int]] = {slot: [] for slot in sorted(num_wanted)}
        self._drafts = drafts
        active = [*drafts]
        with self._look_ahead(active) as choose:
            for slot in active:
                start = self._num_computed_tokens[slot]
                self._batch.join(Chunk(slot, self._rows[slot][start:], start))
            while active:
                logits = self._forward(active).logits
                chosen = {} if logits is None else choose(logits, active)
                goes_on = []
                for slot in active:
                    row, draft = self._rows[slot], drafts[slot]
                    self._num_computed_tokens[slot] = len(row) + len(draft)
                    if slot in chosen:
                        draft.append(chosen[slot])
                        self._batch.tokens[slot] = chosen[slot]
                    has_token = slot in chosen and chosen[slot] not in self._eos_token_ids
                    if has_token and len(draft) < num_wanted[slot]:
                        goes_on.append(slot)
                        self._pages.moved[slot] = len(row) + len(draft) - 1
                    else:
                        self._stand_still(slot)
                active = goes_on
        return {slot: Proposal(draft.copy()) for slot, draft in drafts.items()}


class DraftTreeModel(DraftingRows):
    """Proposes trees: the best first tokens, each followed by its best continuation alone.

    The first draft matters most, since deeper ones count only if it is accepted; so trees branch
    there. Tokens are the best under the same noise as in a DraftModel, so the first branch of a
    tree is its line.

    Each level is computed together with those before it, as a tree: as many calls as for a line, of
    more tokens, of which nothing is kept.

    model: verifies trees. best_after: see Speculator.
    """

    def __init__(
        self,
        model: PagedModel,
        num_slots: int,
        pages: Pages,
        eos_token_ids: Iterable[int],
        best_after: Callable[[FloatArray, Mapping[int, list[int]], int], dict[int, list[int]]],
        num_branches: int,
    ) -> None:
        super().__init__(model, num_slots, pages, eos_token_ids)
        self._best_after, self._num_branches = best_after, num_branches

    def propose(self, num_wanted: Mapping[int, int]) -> dict[int, Proposal]:
        drafts: dict[int, tuple[list[int], list[int]]]  # tokens and parents
        drafts = {slot: ([], []) for slot in sorted(num_wanted)}
        # the active branches: their last draft, 0 before the first, and all tokens on the way
        branches: dict[int, list[tuple[int, list[int]]]] = {slot: [(0, [])] for slot in drafts}
        num_best, num_levels = self._num_branches, 0
        while branches:
            # the index in the logits before the first draft of each row; that after a draft is as
            # many places further as its number
            firsts: dict[int, int] = {}
            num_logits = 0
            for slot in branches:
                row, proposal = self._rows[slot], proposal_of(*drafts[slot])
                start = len(row) - 1 if proposal else self._num_computed_tokens[slot]
                tokens, parents = row[start:] + proposal.tokens, proposal.parents
                self._batch.join(
                    Chunk(slot, tokens, start, num_drafts=len(proposal), draft_parents=parents)
                )
                self._num_computed_tokens[slot] = len(row)
                firsts[slot] = num_logits - bool(proposal)
                num_logits += len(proposal) or 1
            output = self._forward([] if num_levels else [*branches])
            logits = output.draft_logits if num_levels else output.logits
            if logits is None:
                raise InvariantError(f"{self._model.name} gave no logits")
            best: dict[int, list[list[int]]] = {slot: [] for slot in branches}
            for number in range(max(map(len, branches.values()))):
                some = {slot: own[number] for slot, own in branches.items() if number < len(own)}
                places = [firsts[slot] + end for slot, (end, _) in some.items()]
                ways = {slot: way for slot, (_, way) in some.items()}
                for slot, tokens in self._best_after(logits[places], ways, num_best).items():
                    best[slot].append(tokens)
            num_best, num_levels = 1, num_levels + 1
            for slot, own in [*branches.items()]:
                (tokens, ends), size, going_on = drafts[slot], num_wanted[slot], []
                for (end, way), found in zip(own, best[slot], strict=True):
                    for token in found[: size - len(tokens)]:
                        tokens.append(token)
                        ends.append(end)
                        if token not in self._eos_token_ids:
                            going_on.append((len(tokens), [*way, token]))
                branches[slot] = going_on
                is_full = len(tokens) == size or num_levels * self._num_branches >= size
                if is_full or not going_on:
                    del branches[slot]
                    self._stand_still(slot)
        return {slot: proposal_of(*drafts[slot]) for slot in drafts}
