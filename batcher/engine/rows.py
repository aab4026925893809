"""Rows that ask for more than the model's own tokens: sampled, constrained, beams, streamed.

Those of which more has to be known than tables hold have a RowState, and are looked at one by one.
"""

from array import array
from collections.abc import Callable, Collection, Iterable, Mapping
from itertools import groupby
from time import perf_counter

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from batcher.decoding.beams import BeamSearch, BeamStep
from batcher.decoding.constraints import (
    CompiledConstraint,
    ConstraintCompiler,
    RowConstraint,
    allowed_tokens,
    find_masks,
)
from batcher.decoding.filters import needs_cumulative, sampling_params
from batcher.decoding.healing import HealingRow
from batcher.decoding.output_tokens import OutputTokens
from batcher.decoding.sampling import (
    Masks,
    Sampled,
    Sampler,
    SamplingRow,
    row_key,
)
from batcher.decoding.stop_matcher import StopMatcher
from batcher.decoding.stops import StopAutomaton, StopProgress
from batcher.decoding.streaming import TextPiece, TextStream
from batcher.decoding.verification import Look
from batcher.engine.sequence import Decoded, Generated, Sequence, SuspendedRow, SuspendedRows
from batcher.errors import Failure, InvariantError
from batcher.events import TokenEvent
from batcher.models.base import (
    NO_SLOTS,
    FloatArray,
    IntArray,
    Model,
    ModelOutput,
    Tokenizer,
    eos_token_ids_of,
    join_bytes,
)
from batcher.requests.validation import constraint_fields_of, logit_fields_of
from batcher.result import NUM_DIGITS, FinishReason, TokenLogprob

# What rows that have to be looked at by themselves are, beside being sampled, stopped and cut.


class RowStream:
    """Turns the tokens of a sample into events; one for each state, if it names states."""

    def __init__(self, sequence: Sequence, tokenizer: Tokenizer) -> None:
        self._id, self._index = sequence.id, sequence.index
        self._has_logprobs, self._num_told = sequence.request.logprobs is not None, 0
        self._stream = TextStream(
            sequence.automaton,
            tokenizer,
            skip=len(sequence.healing),
            min_tokens=sequence.request.min_tokens,
            keeps_stop=sequence.request.include_stop_str_in_output,
        )

    def push(
        self, tokens: list[int], step: int, logprobs: list[TokenLogprob], *, num_silent: int = 0
    ) -> list[TokenEvent]:
        """Return the events of the `tokens` a step has given; the first one tells all of them.

        logprobs: of all tokens so far.
        num_silent: how many of the last have no text: EOS, though no stop acts there yet.
        """
        with_text = tokens[: len(tokens) - num_silent]
        pieces = [piece for token in with_text for piece in self._stream.push(token)]
        first, *others = self._events(tokens, pieces or [TextPiece(None, "", 0)], step)
        if self._has_logprobs:
            begin, self._num_told = self._num_told, self._num_told + len(tokens)
            first = replace(first, logprobs=logprobs[begin : self._num_told])
        return [first, *others]

    def finish(self, step: int) -> list[TokenEvent]:
        return self._events([], self._stream.finish(), step)

    def _events(self, tokens: list[int], pieces: list[TextPiece], step: int) -> list[TokenEvent]:
        events: list[TokenEvent] = []
        for state, group in groupby(pieces, lambda piece: piece.state):
            text = "".join(piece.text for piece in group)
            told = [] if events else tokens
            events.append(TokenEvent(step, self._id, self._index, told, text, state))
        return events


class RowState(Struct, eq=False):
    """The state of one row beside that in the tables of all rows.

    num_given: how many tokens it has been given.
    grammar: what its output has to keep, if anything.
    constraint: how far it has come in that, or in the end of the prompt that was healed.
    may_jump: whether its choice of a token that is the only one allowed tells and changes nothing.
    has_to_go_on: it may not end yet, for want of tokens.
    logprobs: of its tokens; none if they are not asked for.
    stream: of its text, if that is told as it comes; untold: tokens it has not been told yet.
    """

    sequence: Sequence
    num_given: int = 0
    grammar: CompiledConstraint | None = None
    constraint: RowConstraint | None = None
    may_jump: bool = False
    has_to_go_on: bool = False
    logprobs: list[TokenLogprob] = []
    stream: RowStream | None = None
    untold: list[int] = []

    @property
    def automaton(self) -> StopAutomaton:
        automaton = self.sequence.automaton
        return automaton.endless if self.has_to_go_on else automaton

    def fork(self, sequence: Sequence) -> "RowState":
        constraint = None if self.constraint is None else self.constraint.fork()
        return RowState(
            sequence, self.num_given, self.grammar, constraint, has_to_go_on=self.has_to_go_on
        )

    def check(
        self, generated: Generated, tokenizer: Tokenizer, eos_token_ids: tuple[int, ...]
    ) -> Generated:
        """Return an output of this row with what is to be said of it and its constraint.

        One that EOS has ended is a whole, unless the second look says otherwise; one that was cut,
        if the second look says so, or the grammar where there is no other judge.
        """
        if self.grammar is None or generated.reason == "error":
            return generated
        tokens, unenforced = generated.tokens, self.grammar.unenforced
        is_ended = bool(tokens) and tokens[-1] in eos_token_ids
        kept = tokens[:-1] if is_ended else tokens
        output = join_bytes(kept, tokenizer.token_bytes)
        look = self.grammar.verifier.look(output)
        if unenforced and not look.is_decided:
            look = Look(f"nothing can check {', '.join(unenforced)} in it")
        grammar = self.grammar
        judged = self.grammar.verifier.judge(
            output, look, is_ended=is_ended, accepts=lambda: grammar.accepts(kept)
        )
        return replace(
            generated,
            constraint=judged.constraint,
            constraint_check=judged.check,
            constraint_verified=(unenforced or None) if judged.constraint == "complete" else None,
            failure=judged.failure or generated.failure,
        )


class BeamRows:
    """The beam search of a request, and its rows; beam i is the i-th sequence, its slot slots[i].

    Until the first step only the first row is computed: all beams begin with the same prompt.
    """

    def __init__(self, first: Sequence, eos_token_ids: tuple[int, ...]) -> None:
        request = first.request
        self.sequences = [*first.group]
        self._num_results, self._num_scored = request.n, 1
        self.search = BeamSearch(
            num_beams=request.num_beams,
            num_results=request.n,
            length_penalty=request.length_penalty,
            early_stopping=request.early_stopping,
            max_tokens=request.output_limit,
            num_eos=0 if request.ignore_eos else len(eos_token_ids),
        )

    @property
    def failure(self) -> Failure | None:
        if not self.search.has_failed:
            return None
        return Failure("constraint-error", "no token is left that any beam may go on with")

    @property
    def slots(self) -> list[int]:
        return [sequence.slot for sequence in self.sequences]

    def advance(
        self, scores: dict[int, FloatArray], ends: Callable[[int, int], bool]
    ) -> BeamStep | None:
        """Return how every beam goes on, None if the search is done.

        scores: slot -> [vocab] log-probabilities.  ends: of (slot, token), whether that ends it.
        """
        log_probs = np.stack([scores[slot] for slot in self.slots[: self._num_scored]])
        self._num_scored = len(self.slots)
        return self.search.advance(log_probs, lambda beam, token: ends(self.slots[beam], token))

    def results(self, reason: FinishReason) -> list[Generated]:
        """Return as many outputs as were asked for, best first.

        reason: why the search has ended.
        """
        is_done = reason in {"stop", "length"}
        cut = "length" if is_done else reason
        found = [
            Generated(
                beam.tokens,
                "stop" if beam.has_ended else cut,
                score=None if reason == "error" else round(beam.score, NUM_DIGITS),
            )
            for beam in self.search.results()
        ]
        message = f"beam search found {len(found)} outputs, not {self._num_results}"
        failure = Failure("too-few-outputs", message) if is_done else None
        missing = Generated([], cut, failure=failure)
        return found + [missing] * (self._num_results - len(found))


def make_row_state(
    sequence: Sequence, grammars: ConstraintCompiler, tokenizer: Tokenizer | None
) -> RowState | None:
    """Return the row of a sequence that has just got its slot; None if it needs none.

    tokenizer: if samples are told as they come; of those that compete, nothing can be told.
    """
    request = sequence.request
    grammar = grammars.of_row(request)
    constraint: RowConstraint | None = None
    if grammar is not None:
        constraint = grammar.new_row()
    elif sequence.healing:
        constraint = HealingRow(grammars.vocabulary, sequence.healing)
    stream = None
    is_sure = sequence.role == "sample" and request.best_of is None and request.output_limit > 0
    if tokenizer is not None and is_sure:
        stream = RowStream(sequence, tokenizer)
    each_counts = (
        needs_cumulative(request)
        or request.mirostat
        or request.allowed_token_ids
        or request.bad_words
        or sequence.role == "beam"
    )
    row = RowState(
        sequence,
        grammar=grammar,
        constraint=constraint,
        may_jump=not each_counts,
        has_to_go_on=request.min_tokens > 1,
        stream=stream,
    )
    is_needed = (
        constraint is not None
        or row.has_to_go_on
        or needs_cumulative(request)
        or stream is not None
        or sequence.role == "beam"
    )
    return row if is_needed else None


def sampling_row(sequence: Sequence, eos_token_ids: tuple[int, ...]) -> SamplingRow:
    """Return what the sampler has to know of a sequence that has just got its slot."""
    request = sequence.request
    own_id = sequence.id if request.id is None else request.id  # whatever the engine calls it
    stop = request.stop_token
    stop_ids = [] if stop is None else [stop] if isinstance(stop, int) else stop
    if not request.ignore_eos:
        stop_ids = [*stop_ids, *eos_token_ids]
    return SamplingRow(
        sampling_params(request),
        row_key(request.seed, own_id, sequence.index),
        sequence.prompt.tokens,
        stop_token_ids=tuple(dict.fromkeys(stop_ids)),
        partner=partner_slot(sequence),
        is_beam=sequence.role == "beam",
        is_constrained=bool(sequence.healing or constraint_fields_of(request)),
    )


def partner_slot(sequence: Sequence) -> int | None:
    return next((c.slot for c in sequence.others if c.role == "negative"), None)


class RowDecoder:
    """The rows of a batch of which some ask for more, and all that those need beside the tables.

    tokens, stops: of all rows, shared with the ModelRunner.
    first_slots: slot of another row of a group -> that of its first row.
    takes_plain: whether rows that ask for nothing more are given to it, too.
    """

    _may_speculate = False  # whether rows may be given drafts, which takes logits

    def __init__(
        self,
        model: Model,
        num_slots: int,
        grammars: ConstraintCompiler,
        tokens: OutputTokens,
        stops: StopMatcher,
        *,
        is_streaming: bool,
    ) -> None:
        self.first_slots: dict[int, int] = {}
        self._grammars, self._tokens, self._stops = grammars, tokens, stops
        self._tokenizer, self._eos_token_ids = model.tokenizer, eos_token_ids_of(model)
        self._samples_all, self._is_streaming = model.gives == "logits", is_streaming
        self.takes_plain = self._samples_all or is_streaming or self._may_speculate
        self._vocab_size = model.vocab_size or 0
        self._sampler: Sampler | None = None
        if model.gives != "tokens" and model.vocab_size is not None:
            self._sampler = Sampler(num_slots, model.vocab_size, model.tokenizer)
        self._states: dict[int, RowState] = {}  # of rows that have to be looked at, by slot
        self._beams: dict[int, BeamRows] = {}  # by the slot of the first one
        self._streamed: list[TokenEvent] = []
        self._step = 0

    @property
    def is_busy(self) -> bool:
        return bool(self._states) or not (self._sampler is None or self._sampler.is_idle)

    @property
    def logit_slots(self) -> IntArray:
        """[logit rows] the slots whose logits are needed, ascending."""
        sampler = self._sampler
        return NO_SLOTS if sampler is None or sampler.is_idle else sampler.slots

    # -- a row comes and goes --------------------------------------------------------------------

    def open(self, first: Sequence) -> list[int]:
        slot = first.slot
        if first.role == "beam":
            self._beams[slot] = BeamRows(first, self._eos_token_ids)
        else:
            self._tokens.first_rows[slot] = self._tokens.row
        for other in first.others:
            self.first_slots[other.slot] = slot
        row, is_streamed = None, self._is_streaming and first.is_streamed
        if is_streamed or first.more is not None:
            row = make_row_state(first, self._grammars, self._tokenizer if is_streamed else None)
        is_sampled = (row is not None and row.constraint is not None) or (
            first.more is not None and bool(logit_fields_of(first.request))
        )
        is_sampled |= self._samples_all or (self._may_speculate and first.speculates)
        if self._sampler is not None and is_sampled:
            self._sampler.open(slot, sampling_row(first, self._eos_token_ids))
        if row is None:
            self._stops.open(slot, first.automaton)
            return []
        self._states[slot] = row
        self._stops.open(slot, row.automaton, StopProgress(skip=len(first.healing)))
        if row.constraint is None:
            return []
        forced = row.untold = self._force(slot, row, row.constraint)
        if forced:
            self._extend({slot: forced})
        return forced

    def read(self, slot: int, start: int, stop: int) -> "array[int]":
        first_slot = self.first_slots.get(slot, slot)
        if first_slot in self._beams:
            beams = self._beams[first_slot]
            rows = dict(zip(beams.slots, beams.search.running_tokens(), strict=False))
            return array("q", rows.get(slot, ())[start:stop])  # none if it has not been computed
        return self._tokens.read(first_slot, start, stop)

    # -- a row is out of the batch for a while ---------------------------------------------------

    def suspend(self, first: Sequence, num_tokens: int) -> SuspendedRows:
        slot = first.slot
        if first.role == "beam":
            beams = self._beams.pop(slot)
            rows = [self._suspend_row(beam_slot) for beam_slot in beams.slots]
            return SuspendedRows(beams.search.running_tokens(), rows, beams)
        tokens = [self._tokens.close(slot, num_tokens)]
        return SuspendedRows(tokens * first.num_slots, [self._suspend_row(slot)])

    def resume(self, first: Sequence, suspended: SuspendedRows) -> None:
        slot = first.slot
        if suspended.beams is None:
            self._tokens.resume(slot, suspended.tokens[0])
        else:
            self._beams[slot] = suspended.beams
        for other in first.others:
            self.first_slots[other.slot] = slot
        for sequence, row in zip((first, *first.others), suspended.rows, strict=False):
            self._stops.resume(sequence.slot, row.place)
            if row.state is not None:
                self._states[sequence.slot] = row.state
            if row.sampling is not None and self._sampler is not None:
                self._sampler.resume(sequence.slot, row.sampling, partner_slot(sequence))

    def close(self, suspended: SuspendedRows, reason: FinishReason) -> list[Generated]:
        row, beams = suspended.rows[0], suspended.beams
        generated = Generated(suspended.tokens[0], reason)
        if row.state is None:
            return [generated]
        state, request = row.state, row.state.sequence.request
        if beams is None:
            if state.stream is not None:
                if state.untold:
                    self._streamed += state.stream.push(state.untold, self._step, state.logprobs)
                self._streamed += state.stream.finish(self._step)
            if request.logprobs is not None:
                generated = replace(generated, logprobs=state.logprobs)
            if row.sampling is not None and needs_cumulative(request):
                logprob = round(row.sampling.cumulative_logprob, NUM_DIGITS)
                generated = replace(generated, cumulative_logprob=logprob)
        return [
            state.check(output, self._tokenizer, self._eos_token_ids)
            for output in ([generated] if beams is None else beams.results(reason))
        ]

    def _suspend_row(self, slot: int) -> SuspendedRow:
        if self.first_slots:
            self.first_slots = {s: first for s, first in self.first_slots.items() if first != slot}
        sampling = None if self._sampler is None else self._sampler.suspend(slot)
        return SuspendedRow(self._stops.suspend(slot), self._states.pop(slot, None), sampling)

    # -- a step ----------------------------------------------------------------------------------

    def decode(
        self,
        output: ModelOutput,
        failed: dict[int, Failure],
        step: int,
    ) -> Decoded:
        """Take in what the model gave in `step`; writes the tokens that were chosen into it.

        failed: what the model says went wrong, by the slots of the first rows of groups.
        """
        tokens, self._step = output.tokens, step
        stopped: list[int] = []
        forks: list[tuple[int, int]] = []
        for slot, row in self._states.items():
            if row.has_to_go_on:
                self._let_end(slot, row)
        sampler = self._sampler
        if sampler is not None and not sampler.is_idle:
            if output.logits is None:
                raise InvariantError("the model gave no logits")
            sampled = self._sample(sampler, output.logits, failed, output.failed)
            tokens[sampler.slots] = sampled.tokens[sampler.slots]
            if self._beams:
                stopped, forks = self._search(sampler, sampled, tokens, failed)
        self._tokens.append(tokens)
        is_over = {*failed, *stopped}  # those have no token
        stopped += self._stops.advance(tokens)
        jumps = self._look_at_rows(self._states.items(), tokens, is_over, stopped)
        return Decoded(stopped, failed, jumps, forks)

    def take_streamed(self) -> list[TokenEvent]:
        streamed, self._streamed = self._streamed, []
        return streamed

    def _sample(
        self,
        sampler: Sampler,
        logits: FloatArray,
        failed: dict[int, Failure],
        skip: Collection[int],
        some: IntArray | None = None,
    ) -> Sampled:
        """Choose the tokens of the rows with logits; add the rows for which there is none.

        logits, skip, some: as the sampler wants them.
        """
        slots = self._states if some is None else some.tolist()
        constraints = self._constraints(slots)
        sampled = sampler.sample(logits, self._masks_of(constraints, logits), skip, some)
        for slot, failure in sampled.failed.items():
            why = constraints[slot].failure if slot in constraints else None
            told = failure if why is None else Failure("constraint-error", why)
            failed.setdefault(self.first_slots.get(slot, slot), told)
        for slot, logprob in sampled.logprobs.items():
            self._states[slot].logprobs.append(logprob)
        return sampled

    def _masks_of(
        self, constraints: Mapping[int, RowConstraint], logits: FloatArray
    ) -> Masks | None:
        """Return what constraints leave, by slot; None if there are none."""
        if not constraints:
            return None
        began, times = perf_counter(), self._grammars.times
        allowed = allowed_tokens([*constraints.values()], logits.shape[1])
        times.masks += perf_counter() - began
        times.num_masks += len(constraints)
        return Masks(np.array([*constraints]), allowed)

    def _constraints(self, slots: Iterable[int]) -> dict[int, RowConstraint]:
        states = self._states
        return {
            slot: row.constraint
            for slot in slots
            if (row := states.get(slot)) is not None and row.constraint is not None
        }

    def _search(
        self, sampler: Sampler, sampled: Sampled, tokens: IntArray, failed: dict[int, Failure]
    ) -> tuple[list[int], list[tuple[int, int]]]:
        """Let every request's beams go on; return (slots of the first that are done, forks).

        tokens: gets those that were chosen.
        """
        done, forks = [], []
        for first_slot, beams in self._beams.items():
            if first_slot in failed:
                continue
            step = beams.advance(sampled.beam_scores, self._would_end)
            if step is None:
                done.append(first_slot)
                if beams.failure is not None:
                    failed[first_slot] = beams.failure
                continue
            slots = beams.slots
            for beam, parent in enumerate(step.parents):
                if parent != beam:
                    source, target = slots[parent], slots[beam]
                    self._states[target] = self._states[source].fork(beams.sequences[beam])
                    self._stops.fork(source, target)
                    sampler.fork(source, target)
                    forks.append((source, target))
            tokens[slots] = step.tokens
            sampler.extend({slot: [token] for slot, token in zip(slots, step.tokens, strict=True)})
        return done, forks

    def _let_end(self, slot: int, row: RowState) -> None:
        """Watch for the end of a row that had to go on if its next token may be the last."""
        if row.num_given + 1 >= row.sequence.request.min_tokens:
            row.has_to_go_on = False
            self._stops.switch(slot, row.automaton)

    def _would_end(self, slot: int, token: int) -> bool:
        row = self._states[slot]
        is_end = row.constraint is not None and token in self._eos_token_ids
        return is_end or self._stops.would_end(slot, token)

    def _look_at_rows(
        self,
        rows: Iterable[tuple[int, RowState]],
        given: IntArray,
        is_over: Collection[int],
        stopped: list[int],
    ) -> dict[int, list[int]]:
        """Move on the rows that have to be looked at; return the tokens of those that jump.

        rows: by slot.  given: [num_slots] the tokens of the step.
        is_over: the first slots of groups with none.
        stopped: gets those that end for want of tokens.
        """
        jumps: dict[int, list[int]] = {}
        has_stopped, first_slots, token_of = {*stopped}, self.first_slots, given.tolist()
        moved: list[RowConstraint] = []
        for slot, row in rows:
            if row.constraint is None or slot in has_stopped:
                continue
            is_out = is_over and first_slots.get(slot, slot) in is_over
            if not is_out and token_of[slot] not in self._eos_token_ids:
                row.constraint.advance(token_of[slot])
                moved.append(row.constraint)
        if moved:
            began = perf_counter()
            find_masks(moved)
            self._grammars.times.masks += perf_counter() - began
        for slot, row in rows:
            if is_over and first_slots.get(slot, slot) in is_over:
                continue
            row.num_given += 1
            tokens, constraint = [token_of[slot]], row.constraint
            if constraint is not None and slot not in has_stopped:
                if tokens[0] in self._eos_token_ids:  # below min_tokens: nothing else is left
                    stopped.append(slot)
                    self._tell(row, tokens, num_silent=1)
                    continue
                if constraint.may_force:
                    tokens += self._force(slot, row, constraint)
                    if len(tokens) > 1:
                        jumps[slot] = tokens
            if row.stream is not None:
                self._tell(row, tokens)
        if jumps:
            self._extend({slot: tokens[1:] for slot, tokens in jumps.items()})
        return jumps

    def _tell(self, row: RowState, tokens: list[int], num_silent: int = 0) -> None:
        if row.stream is not None:
            told = row.untold + tokens
            self._streamed += row.stream.push(told, self._step, row.logprobs, num_silent=num_silent)
            row.untold = []

    def _extend(self, given: dict[int, list[int]]) -> None:
        for slot, tokens in given.items():
            self._tokens.extend(slot, tokens)
        if self._sampler is not None:
            self._sampler.extend(given)

    def _force(self, slot: int, row: RowState, constraint: RowConstraint) -> list[int]:
        """Return the tokens that are the only ones allowed next in a row, after moving it on.

        The last token of a row, and one that ends it, are left to the model: a row ends in a step.
        A constraint that asks for nothing more is dropped.
        """
        forced: list[int] = []
        request = row.sequence.request
        while row.may_jump:
            most = request.output_limit - 1 - row.num_given
            tokens = constraint.forced_tokens(most) if most > 0 else ()
            if not tokens:
                break
            if row.has_to_go_on:
                self._let_end(slot, row)
            if row.has_to_go_on:  # up to where it may end
                tokens = tokens[: request.min_tokens - 1 - row.num_given]
            num_read = self._stops.advance_row(slot, tokens)
            if num_read:
                constraint.advance_forced(num_read)
                row.num_given += num_read
                forced += tokens[:num_read]
            if num_read < len(tokens):
                break
        if not constraint.is_active:
            row.constraint = None
        return forced
