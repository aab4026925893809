"""Rows that are given several tokens in a step: drafts are verified one after the other.

A draft is accepted if it is the token that the row is given, which is chosen exactly as by a step
of its own: so drafts change no token.  Noise is keyed, so what drafts with a model may draw with
the same (Daliri et al., "Coupling without Communication and Drafter-Invariant Speculative
Decoding", 2024).
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import accumulate
from typing import NamedTuple

import numpy as np

from batcher.decoding.constraints.rows import allowed_tokens
from batcher.engine.decoded import NO_DRAFTS, Choose, Decoded
from batcher.engine.row_decoder import RowDecoder, masks_of
from batcher.errors import Failure, InvariantError
from batcher.models.base import FloatArray, IntArray, ModelOutput


class _Verified(NamedTuple):
    """The drafts of a step, and what is known of them.

    drafts: by slot.  logits: [drafts, vocab] after each.  starts: slot -> the row in these after
    its first draft.  tokens: [num_slots] those of the step, gets the last of each row.
    decoded: gets what comes of it.
    """

    drafts: Mapping[int, list[int]]
    starts: Mapping[int, int]
    logits: FloatArray
    tokens: IntArray
    decoded: Decoded


class SpeculatingRows(RowDecoder):
    """A RowDecoder of which some rows are given drafts; their tokens are chosen from logits."""

    _may_speculate = True

    # -- before a step ---------------------------------------------------------------------------

    @contextmanager
    def look_ahead(self, slots: list[int]) -> Iterator[Choose]:
        """Let rows in these slots be given tokens inside that are not theirs afterwards."""
        sampler = self._sampler
        if sampler is None:
            raise InvariantError("no row has logits")
        constraints = {slot: row.fork() for slot, row in self._constraints(slots).items()}

        def choose(logits: FloatArray, some: list[int]) -> dict[int, int]:
            own = {slot: constraints[slot] for slot in some if slot in constraints}
            sampled = sampler.sample(logits, masks_of(own, logits), (), np.array(some))
            tokens = zip(some, sampled.tokens[some].tolist(), strict=True)
            chosen = {slot: token for slot, token in tokens if slot not in sampled.failed}
            for slot, constraint in own.items():
                if slot in chosen and chosen[slot] not in self._eos_token_ids:
                    constraint.advance(chosen[slot])
            return chosen

        with sampler.undone(np.array(slots)):
            yield choose

    def cut_draft(self, slot: int, draft: list[int]) -> list[int]:
        """Return as much of a draft as the row in `slot` may be given."""
        state, vocab_size = self._states.get(slot), self._vocab_size
        constraint = None if state is None or state.constraint is None else state.constraint.fork()
        for number, token in enumerate(draft):
            if not 0 <= token < vocab_size:
                return draft[:number]
            if constraint is not None and constraint.is_active:
                if not allowed_tokens([constraint], vocab_size)[0, token]:
                    return draft[:number]
                if token in self._eos_token_ids:  # which no constraint reads
                    return draft[: number + 1]
                constraint.advance(token)
        return draft

    # -- after it --------------------------------------------------------------------------------

    def decode(
        self,
        output: ModelOutput,
        failed: dict[int, Failure],
        step: int,
        drafts: Mapping[int, list[int]] = NO_DRAFTS,
    ) -> Decoded:
        """Take in what the model gave in `step`; writes the last token of each row into it.

        drafts: of each row that speculates, perhaps none, in the order of the batch.
        """
        decoded = super().decode(output, failed, step)
        return self._verify(output, drafts, decoded) if drafts else decoded

    def _verify(
        self, output: ModelOutput, drafts: Mapping[int, list[int]], decoded: Decoded
    ) -> Decoded:
        """Let rows go on along their drafts, as long as these are what they are given."""
        tokens, logits = output.tokens, output.draft_logits
        slots = [*drafts]
        given = {slot: [token] for slot, token in zip(slots, tokens[slots].tolist(), strict=True)}
        ends = accumulate(map(len, drafts.values()))
        starts = {slot: end - len(drafts[slot]) for slot, end in zip(slots, ends, strict=True)}
        is_over = {*decoded.stopped, *decoded.failed, *decoded.jumps}
        rows = [slot for slot, draft in drafts.items() if draft and slot not in is_over]
        going_on = Decoded(
            [*decoded.stopped], {**decoded.failed}, {**decoded.jumps}, decoded.forks, {}, given
        )
        if rows:
            if logits is None:
                raise InvariantError("the model gave no logits of drafts")
            verified = _Verified(drafts, starts, logits, tokens, going_on)
            self._go_on_one_by_one(sorted(self._go_on_at_once(rows, verified)), verified)
        for slot, jump in going_on.jumps.items():
            if slot in given:
                given[slot] += jump[1:]
        return going_on

    def _go_on_at_once(self, rows: list[int], verified: "_Verified") -> list[int]:
        """Let rows go on of which nothing but their position changes what they are given.

        Returns the other rows.
        """
        drafts, starts, logits, tokens, decoded = verified
        sampler, states = self._sampler, self._states
        if sampler is None:
            return rows
        quick = [slot for slot in rows if slot not in states and sampler.is_memoryless(slot)]
        counts = np.array([len(drafts[slot]) for slot in quick], np.int64)
        if not quick:
            return rows
        firsts = counts.cumsum() - counts
        numbers = np.arange(counts.sum()) - firsts.repeat(counts)
        places = np.array([starts[slot] for slot in quick], np.int64).repeat(counts) + numbers
        wanted = logits if len(places) == len(logits) else logits[places]
        slots = np.array(quick)
        chosen = sampler.choose_ahead(slots.repeat(counts), numbers, wanted)
        if chosen is None:
            return rows
        drafted = np.array([token for slot in quick for token in drafts[slot]], np.int64)
        before = np.empty_like(chosen)
        before[1:] = chosen[:-1]
        before[firsts] = tokens[slots]
        wrong = np.where(drafted == before, counts.repeat(counts), numbers)
        num_right = np.minimum.reduceat(wrong, firsts)
        all_chosen = chosen.tolist()
        for slot, first, num in zip(quick, firsts.tolist(), num_right.tolist(), strict=True):
            if not num:
                continue
            more = all_chosen[first : first + num]
            num_read = self._stops.advance_row(slot, more)
            del more[num_read + 1 :]
            tokens[slot] = more[-1]
            if num_read < num:
                decoded.stopped.extend(self._stops.advance_some([slot], tokens))
            self._tokens.extend(slot, more)
            decoded.given[slot].extend(more)
            decoded.num_accepted[slot] = len(more)
        sampler.move_on(slots, np.array([decoded.num_accepted.get(slot, 0) for slot in quick]))
        done = {*quick}
        return [slot for slot in rows if slot not in done]

    def _go_on_one_by_one(self, rows: list[int], verified: "_Verified") -> None:
        """Let rows go on draft by draft, each as by a step of its own."""
        drafts, starts, logits, tokens, decoded = verified
        sampler, failed, given, number = self._sampler, decoded.failed, decoded.given, 0
        while sampler is not None:
            is_over = {*decoded.stopped, *failed, *decoded.jumps}
            rows = [
                slot
                for slot in rows
                if slot not in is_over and drafts[slot][number : number + 1] == given[slot][-1:]
            ]
            if not rows:
                break
            states = {slot: self._states[slot] for slot in rows if slot in self._states}
            for slot, row in states.items():
                if row.has_to_go_on:
                    self._let_end(slot, row)
            places = [starts[slot] + number for slot in rows]
            sampled = self._sample(sampler, logits[places], failed, (), np.array(rows))
            number += 1
            decoded.num_accepted.update(dict.fromkeys(rows, number))
            rows = [slot for slot in rows if slot not in failed]
            tokens[rows] = sampled.tokens[rows]
            for slot in rows:
                token = tokens.item(slot)
                given[slot].append(token)
                self._tokens.extend(slot, [token])
            decoded.stopped.extend(self._stops.advance_some(rows, tokens))
            looked_at = [(slot, states[slot]) for slot in rows if slot in states]
            decoded.jumps.update(
                self._look_at_rows(looked_at, tokens, failed.keys(), decoded.stopped)
            )
