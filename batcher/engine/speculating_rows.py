"""Rows that are given several tokens in a step: drafts are verified one after the other.

A draft is accepted if it is the token that the row is given, which is chosen exactly as by a step
of its own: so drafts change no token.  Noise is keyed, so what drafts with a model may draw with
the same (Daliri et al., "Coupling without Communication and Drafter-Invariant Speculative
Decoding", 2024).  What draws with noise of its own changes the choice itself, which accepts or
replaces the draft (batcher/decoding/sampling.py); all else is the same.  Of a tree of
drafts, a row goes along those that it is given as far as there are any (Miao et al., "SpecInfer",
2024).
"""

from collections.abc import Container, Iterator, Mapping
from contextlib import contextmanager
from itertools import chain
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from batcher.decoding.constraints import RowConstraint, allowed_tokens
from batcher.decoding.output_tokens import NO_TOKEN
from batcher.decoding.sampling import Masks, Sampler
from batcher.engine.rows import RowDecoder
from batcher.engine.sequence import NO_DRAFTS, Decoded
from batcher.errors import Failure, InvariantError
from batcher.models.base import FloatArray, IntArray, ModelOutput
from batcher.speculation.draft_model import Choose
from batcher.speculation.proposal import Proposal


class _Drafted(NamedTuple):
    """Rows with drafts, and what the model says of them.

    slots, counts: [rows] where each is, and how many drafts it has, at least one.
    firsts: [rows] where its drafts begin.
    tokens: [drafts] those of one row after the other.  logits: [drafts, vocab] after each.
    proposals: slot -> the same drafts; there may be more.
    """

    slots: IntArray
    counts: IntArray
    firsts: IntArray
    tokens: IntArray
    logits: FloatArray
    proposals: Mapping[int, Proposal]

    @classmethod
    def of(cls, proposals: Mapping[int, Proposal], logits: FloatArray) -> "_Drafted":
        """Return the rows that have drafts, of some by slot."""
        some = {slot: own.tokens for slot, own in proposals.items() if own.tokens}
        counts = np.fromiter(map(len, some.values()), np.int64, len(some))
        tokens = np.array([*chain.from_iterable(some.values())], np.int64)
        firsts = counts.cumsum() - counts
        return cls(np.array([*some], np.int64), counts, firsts, tokens, logits, proposals)

    @property
    def trees(self) -> dict[int, Proposal]:
        """The drafts of those rows, by number, that have a tree of them."""
        proposals = map(self.proposals.__getitem__, self.slots.tolist())
        return {row: own for row, own in enumerate(proposals) if own.parents}

    def ahead(self, trees: Mapping[int, Proposal]) -> IntArray:
        """Return [drafts] how many there are on the way to each."""
        ahead: IntArray = np.arange(len(self.tokens)) - self.firsts.repeat(self.counts)
        for row, tree in trees.items():
            first = self.firsts[row]
            ahead[first : first + len(tree)] = np.array(tree.depths) - 1
        return ahead

    def ways(
        self, chosen: IntArray, before: IntArray, trees: Mapping[int, Proposal]
    ) -> tuple[IntArray, IntArray]:
        """Return the drafts that each row is given: [longest, rows] which, and [rows] how many.

        chosen: [drafts] what is given after each.  before: [rows] what each row was given first.
        """
        firsts, counts = self.firsts, self.counts
        given = np.empty_like(chosen)
        given[1:] = chosen[:-1]
        given[firsts] = before
        numbers = np.arange(len(chosen)) - firsts.repeat(counts)
        wrong = np.where(self.tokens == given, counts.repeat(counts), numbers)
        num_right = np.minimum.reduceat(wrong, firsts)
        ways = {}
        for row, tree in trees.items():
            after = chosen[firsts[row] :].tolist()
            ways[row] = tree.way(before.item(row), after)
            num_right[row] = len(ways[row])
        places = np.minimum(firsts + np.arange(num_right.max())[:, None], len(chosen) - 1)
        for row, way in ways.items():
            places[: len(way), row] = firsts[row] + np.array(way, np.int64) - 1
        return places, num_right

    def only(self, is_wanted: NDArray[np.bool_]) -> "_Drafted":
        if is_wanted.all():
            return self
        is_theirs, counts = is_wanted.repeat(self.counts), self.counts[is_wanted]
        return _Drafted(
            self.slots[is_wanted],
            counts,
            counts.cumsum() - counts,
            self.tokens[is_theirs],
            self.logits[is_theirs],
            self.proposals,
        )


class SpeculatingRows(RowDecoder):
    """A RowDecoder of which some rows are given drafts; their tokens are chosen from logits."""

    _may_speculate = True

    # -- before a step ---------------------------------------------------------------------------

    @contextmanager
    def look_ahead(self, slots: list[int], *, is_drawn_apart: bool = False) -> Iterator[Choose]:
        """Let rows in these slots be given tokens inside that are not theirs afterwards.

        They are given those that they would be given by these logits, with the same noise, or with
        noise of its own, so that the step accepts or replaces them.  Their constraints stay where
        they are.
        """
        sampler, at = self._sampling, np.array(slots)
        constraints = {slot: row.fork() for slot, row in self._constraints(slots).items()}

        def choose(logits: FloatArray, some: list[int]) -> dict[int, int]:
            own = {slot: constraints[slot] for slot in some if slot in constraints}
            sampled = sampler.sample(logits, self._masks_of(own, logits), (), np.array(some))
            tokens = zip(some, sampled.tokens[some].tolist(), strict=True)
            chosen = {slot: token for slot, token in tokens if slot not in sampled.failed}
            for slot, constraint in own.items():
                if slot in chosen and chosen[slot] not in self._eos_token_ids:
                    constraint.advance(chosen[slot])
            return chosen

        with sampler.drafting(at) if is_drawn_apart else sampler.undone(at):
            yield choose

    @property
    def _sampling(self) -> Sampler:
        if self._sampler is None:
            raise InvariantError("no row has logits")
        return self._sampler

    def best_after(
        self, logits: FloatArray, ways: Mapping[int, list[int]], num_best: int
    ) -> dict[int, list[int]]:
        """Return the tokens that rows would be given behind some others, which they are not given.

        First the one that each would be given, then that without it, and so on, as many as are
        wanted or left.

        logits: [rows, vocab].  ways: slot -> those others, of all rows equally many.
        """
        sampler, slots = self._sampling, np.array([*ways])
        constraints = {slot: row.fork() for slot, row in self._constraints(ways).items()}
        for slot, constraint in constraints.items():
            for token in ways[slot]:
                constraint.advance(token)
        allowed = np.ones(logits.shape, np.bool_)
        masks = self._masks_of(constraints, logits)
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

    def cut(self, proposals: dict[int, Proposal]) -> dict[int, Proposal]:
        """Return as much of what is proposed, by slot, as the rows may be given."""
        constraints = self._constraints(proposals) if self._states else {}
        tokens = [*chain.from_iterable([own.tokens for own in proposals.values()])]
        are_tokens = not tokens or 0 <= min(tokens) <= max(tokens) < self._vocab_size
        if are_tokens and not constraints:
            return proposals
        return {slot: self._cut(own, constraints.get(slot)) for slot, own in proposals.items()}

    def _cut(self, proposal: Proposal, constraint: RowConstraint | None) -> Proposal:
        tokens, parents, vocab_size = proposal.tokens, proposal.parents, self._vocab_size
        after = {0: None if constraint is None else constraint.fork()}
        kept = []
        follows = zip(tokens, parents or range(len(tokens)), strict=True)
        for draft, (token, parent) in enumerate(follows, 1):
            if parent not in after or not 0 <= token < vocab_size:
                continue
            constraint = after[parent]
            if constraint is not None and constraint.is_active:
                if not allowed_tokens([constraint], vocab_size)[0, token]:
                    continue
                if token in self._eos_token_ids:  # which no constraint reads
                    kept.append(draft)
                    continue
                constraint = constraint.fork() if parents else constraint
                constraint.advance(token)
            after[draft] = constraint
            kept.append(draft)
        return proposal if len(kept) == len(tokens) else proposal.only(kept)

    # -- after it --------------------------------------------------------------------------------

    def decode(
        self,
        output: ModelOutput,
        failed: dict[int, Failure],
        step: int,
        drafts: Mapping[int, Proposal] = NO_DRAFTS,
    ) -> Decoded:
        decoded = super().decode(output, failed, step)
        if drafts:
            decoded = self._verify(output, drafts, decoded)
            self._sampling.forget_drafts()
        return decoded

    def _verify(
        self, output: ModelOutput, drafts: Mapping[int, Proposal], decoded: Decoded
    ) -> Decoded:
        """Let rows go on along their drafts, as long as these are what they are given."""
        tokens, slots = output.tokens, [*drafts]
        given = {slot: [token] for slot, token in zip(slots, tokens[slots].tolist(), strict=True)}
        going_on = Decoded(
            [*decoded.stopped], {**decoded.failed}, {**decoded.jumps}, decoded.forks, {}, given
        )
        if any(drafts.values()):
            if output.draft_logits is None:
                raise InvariantError("the model gave no logits of drafts")
            drafted = _Drafted.of(drafts, output.draft_logits)
            over = _over(going_on)
            if over:
                drafted = drafted.only(_are_outside(drafted.slots, over))
            # rows are quick that are given what nothing but their position changes
            is_quick = np.zeros(len(drafted.slots), np.bool_)
            if self._sampler is not None:
                is_quick = self._sampler.is_memoryless[drafted.slots]
                if self._states:
                    is_quick &= _are_outside(drafted.slots, self._states)
            if not self._go_on_at_once(drafted.only(is_quick), tokens, going_on):
                is_quick[:] = False
            if not is_quick.all():
                self._go_on_one_by_one(drafted.only(~is_quick), tokens, going_on)
        for slot, jump in going_on.jumps.items():
            if slot in given:
                given[slot] += jump[1:]
        return going_on

    def _go_on_at_once(self, quick: _Drafted, tokens: IntArray, decoded: Decoded) -> bool:
        """Let rows go on of which nothing but their position changes what they are given.

        tokens: [num_slots] those of the step, gets the last of each row.  decoded: gets the rest.
        Returns whether that could be done: logits may be of no use.
        """
        slots = quick.slots
        if not len(slots):
            return False
        sampler = self._sampling
        trees = quick.trees
        chosen = sampler.choose_ahead(slots.repeat(quick.counts), quick.ahead(trees), quick.logits)
        if chosen is None:
            return False
        places, num_right = quick.ways(chosen, tokens[slots], trees)
        more = chosen[places]  # [most of a row, rows]
        num_read = self._stops.advance_rows(slots, more, num_right)
        num_given = np.minimum(num_read + 1, num_right)  # one that ends a row is given, but unread
        is_given = num_given > 0
        tokens[slots[is_given]] = more[(num_given - 1)[is_given], is_given.nonzero()[0]]
        has_ended = num_read < num_right
        if has_ended.any():
            decoded.stopped.extend(self._stops.advance_some(slots[has_ended].tolist(), tokens))
        is_more = np.arange(len(more))[:, None] < num_given
        self._tokens.append_more(slots, np.where(is_more, more, NO_TOKEN))
        sampler.move_on(slots, num_given)
        of_rows = zip(slots.tolist(), num_given.tolist(), more.T.tolist(), strict=True)
        for slot, num, row in of_rows:
            if num:
                decoded.given[slot] += row[:num]
                decoded.num_accepted[slot] = num
        for row in trees:
            way = places[: num_given[row], row] - quick.firsts[row] + 1
            decoded.ways[slots.item(row)] = way.tolist()
        return True

    def _go_on_one_by_one(self, drafted: _Drafted, tokens: IntArray, decoded: Decoded) -> None:
        """Let rows go on draft by draft, each as by a step of its own; arguments: as above."""
        sampler, failed, given, number = self._sampler, decoded.failed, decoded.given, 0
        proposals = drafted.proposals
        starts = dict(zip(drafted.slots.tolist(), drafted.firsts.tolist(), strict=True))
        rows = sorted(starts)
        at = dict.fromkeys(rows, 0)  # the draft that each was given last
        while sampler is not None:
            is_over = _over(decoded)
            at = {slot: proposals[slot].child(at[slot], given[slot][-1]) for slot in rows}
            rows = [slot for slot in rows if at[slot] and slot not in is_over]
            if not rows:
                break
            states = {slot: self._states[slot] for slot in rows if slot in self._states}
            for slot, row in states.items():
                if row.has_to_go_on:
                    self._let_end(slot, row)
            logits = drafted.logits[[starts[slot] + at[slot] - 1 for slot in rows]]
            sampled = self._sample(sampler, logits, failed, (), np.array(rows))
            number += 1
            decoded.num_accepted.update(dict.fromkeys(rows, number))
            for slot in rows:
                if proposals[slot].parents:
                    decoded.ways.setdefault(slot, []).append(at[slot])
            rows = [slot for slot in rows if slot not in failed]
            tokens[rows] = sampled.tokens[rows]
            self._tokens.append_more(np.array(rows, np.int64), tokens[None, rows])
            for slot in rows:
                given[slot].append(tokens.item(slot))
            decoded.stopped.extend(self._stops.advance_some(rows, tokens))
            looked_at = [(slot, states[slot]) for slot in rows if slot in states]
            decoded.jumps.update(
                self._look_at_rows(looked_at, tokens, failed.keys(), decoded.stopped)
            )


def _over(decoded: Decoded) -> set[int]:
    return {*decoded.stopped, *decoded.failed, *decoded.jumps}


def _are_outside(slots: IntArray, some: Container[int]) -> NDArray[np.bool_]:
    return np.array([slot not in some for slot in slots.tolist()], np.bool_)
