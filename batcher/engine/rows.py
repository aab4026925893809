"""Rows that ask for more than the model's own tokens: sampled, constrained, beams, streamed.

Those of which more has to be known than tables hold have a RowState, and are looked at one by one.
"""

from array import array
from collections.abc import Collection, Iterable, Mapping
from collections.abc import Sequence as Ordered
from itertools import groupby
from time import perf_counter

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from batcher.decoding.beams import BeamSearch
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
from batcher.decoding.sampling import Masks, Sampled, Sampler, SamplingRow, row_key
from batcher.decoding.stop_matcher import StopMatcher
from batcher.decoding.stops import StopProgress
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
    eos_token_ids_of,
    join_bytes,
)
from batcher.request import Request
from batcher.requests.validation import logit_fields_of
from batcher.result import NUM_DIGITS, FinishReason, TokenLogprob

NO_TEXT = TextPiece(None, "", 0)


class RowState(Struct, eq=False):
    """What is known of one row beside that in the tables of all rows.

    grammar: what its output has to keep, if anything.
    constraint: how far it has come in that, or in the end of the prompt that was healed.
    may_jump: whether its choice of a token that is the only one allowed tells and changes nothing.
    has_to_go_on: its next token may not be the last, for want of tokens.
    stream: of its text, if that is told as it comes; untold: tokens it has not been told yet.
    num_given: how many tokens it has been given.
    logprobs: of its tokens; none if they are not asked for.
    """

    sequence: Sequence
    grammar: CompiledConstraint | None
    constraint: RowConstraint | None
    may_jump: bool
    has_to_go_on: bool
    stream: TextStream | None
    untold: list[int] = []
    num_given: int = 0
    logprobs: list[TokenLogprob] = []


class RowDecoder:
    """The rows of a batch of which some ask for more, and all that those need beside the tables.

    tokens, stops: of all rows, shared with the ModelRunner.
    may_speculate: whether rows may be given drafts, which takes logits.
    first_slots: slot of another row of a group -> that of its first row.
    takes_plain: whether rows that ask for nothing more are given to it, too.
    sampler: None if the model gives tokens only.
    """

    def __init__(
        self,
        model: Model,
        num_slots: int,
        grammars: ConstraintCompiler,
        tokens: OutputTokens,
        stops: StopMatcher,
        *,
        is_streaming: bool,
        may_speculate: bool,
    ) -> None:
        self.first_slots: dict[int, int] = {}
        self._grammars, self._tokens, self._stops = grammars, tokens, stops
        self._tokenizer, self.eos_token_ids = model.tokenizer, eos_token_ids_of(model)
        self._samples_all, self._may_speculate = model.gives == "logits", may_speculate
        self._is_streaming, self._step = is_streaming, 0
        self.takes_plain = self._samples_all or is_streaming or may_speculate
        self.vocab_size = model.vocab_size or 0
        self.sampler: Sampler | None = None
        if model.gives != "tokens" and model.vocab_size is not None:
            self.sampler = Sampler(num_slots, model.vocab_size, model.tokenizer)
        self._states: dict[int, RowState] = {}  # of rows that have to be looked at, by slot
        self._searches: dict[int, BeamSearch] = {}  # by the slot of the first beam
        self._streamed: list[TokenEvent] = []

    @property
    def is_busy(self) -> bool:
        return bool(self._states) or not (self.sampler is None or self.sampler.is_idle)

    @property
    def logit_slots(self) -> IntArray:
        """[logit rows] the slots whose logits are needed, ascending."""
        sampler = self.sampler
        return NO_SLOTS if sampler is None or sampler.is_idle else sampler.slots

    # -- a row comes and goes --------------------------------------------------------------------

    def open(self, first: Sequence) -> list[int]:
        """Begin the rows of a group; return the tokens that it has from the outset.

        Of beams the first row alone is computed until the first step: all begin with one prompt.
        """
        slot, request, is_beam = first.slot, first.request, first.role == "beam"
        for other in first.others:
            self.first_slots[other.slot] = slot
        if is_beam:
            self._searches[slot] = BeamSearch(
                num_beams=request.num_beams,
                num_results=request.n,
                length_penalty=request.length_penalty,
                early_stopping=request.early_stopping,
                max_tokens=request.output_limit,
                num_eos=0 if request.ignore_eos else len(self.eos_token_ids),
            )
        else:
            self._tokens.first_rows[slot] = self._tokens.row
        row, stream = None, None
        constraint: RowConstraint | None = None
        is_streamed = self._is_streaming and first.is_streamed and first.role == "sample"
        if is_streamed and request.best_of is None and request.output_limit > 0:
            stream = TextStream(
                first.automaton,
                self._tokenizer,
                skip=len(first.healing),
                min_tokens=request.min_tokens,
                keeps_stop=request.include_stop_str_in_output,
            )
        is_sampled = self._samples_all or (self._may_speculate and first.speculates)
        if first.more is not None or stream is not None:
            grammar, sums = self._grammars.of_row(request), needs_cumulative(request)
            has_to_go_on = request.min_tokens > 1
            if grammar is not None:
                constraint = grammar.new_row()
            elif first.healing:
                constraint = HealingRow(self._grammars.vocabulary, first.healing)
            needs_logits = constraint is not None or bool(logit_fields_of(request))
            is_sampled |= first.more is not None and needs_logits
            if constraint is not None or stream is not None or has_to_go_on or sums or is_beam:
                each_counts = sums or is_beam or request.mirostat or request.bad_words
                may_jump = not (each_counts or request.allowed_token_ids)
                row = RowState(first, grammar, constraint, may_jump, has_to_go_on, stream)
        if self.sampler is not None and is_sampled:
            stops = [] if request.stop_token is None else request.stop_token
            stop_ids = [stops] if isinstance(stops, int) else [*stops]
            if not request.ignore_eos:
                stop_ids += self.eos_token_ids
            own_id = first.id if request.id is None else request.id  # whatever the engine calls it
            sampling = SamplingRow(
                sampling_params(request),
                row_key(request.seed, own_id, first.index),
                first.prompt.tokens,
                stop_token_ids=tuple(dict.fromkeys(stop_ids)),
                partner=_partner_slot(first),
                is_beam=is_beam,
            )
            self.sampler.open(slot, sampling)
        if row is None:
            self._stops.open(slot, first.automaton)
            return []
        self._states[slot] = row
        automaton = first.automaton.endless if row.has_to_go_on else first.automaton
        self._stops.open(slot, automaton, StopProgress(skip=len(first.healing)))
        row.untold = [] if constraint is None else self._force(slot, row, constraint)
        if row.untold:
            self._extend({slot: row.untold})
        return row.untold

    def read(self, slot: int, start: int, stop: int) -> "array[int]":
        first_slot = self.first_slots.get(slot, slot)
        search = self._searches.get(first_slot)
        if search is None:
            return self._tokens.read(first_slot, start, stop)
        slots = _slots(self._states[first_slot].sequence)
        beams = dict(zip(slots, search.running_tokens(), strict=False))
        return array("q", beams.get(slot, ())[start:stop])  # none if it has not been computed

    def suspend(self, first: Sequence, num_tokens: int) -> SuspendedRows:
        slot, slots, sampler, rows = first.slot, [first.slot], self.sampler, []
        search = self._searches.pop(slot, None)
        if search is None:
            tokens = [self._tokens.close(slot, num_tokens)] * first.num_slots
        else:
            tokens, slots = search.running_tokens(), _slots(first)
        for own in slots:
            sampling = None if sampler is None else sampler.suspend(own)
            state = self._states.pop(own, None)
            rows.append(SuspendedRow(self._stops.suspend(own), state, sampling))
        for other in first.others:
            self.first_slots.pop(other.slot, None)
        return SuspendedRows(tokens, rows, search)

    def resume(self, first: Sequence, suspended: SuspendedRows) -> None:
        if suspended.search is None:
            self._tokens.resume(first.slot, suspended.tokens[0])
        else:
            self._searches[first.slot] = suspended.search
        for other in first.others:
            self.first_slots[other.slot] = first.slot
        for sequence, row in zip((first, *first.others), suspended.rows, strict=False):
            self._stops.resume(sequence.slot, row.place)
            if row.state is not None:
                self._states[sequence.slot] = row.state
            if row.sampling is not None and self.sampler is not None:
                self.sampler.resume(sequence.slot, row.sampling, _partner_slot(sequence))

    def close(self, suspended: SuspendedRows, reason: FinishReason) -> list[Generated]:
        """Return the output of a group, or as many as its beams were asked for, best first.

        reason: why it has ended.
        """
        row, search = suspended.rows[0], suspended.search
        generated = Generated(suspended.tokens[0], reason)
        if row.state is None:
            return [generated]
        state, request = row.state, row.state.sequence.request
        if state.stream is not None:
            if state.untold:
                self._tell(state, state.stream, [])
            self._add_events(state, [], state.stream.finish())
        if request.logprobs is not None:
            generated = replace(generated, logprobs=state.logprobs)
        if row.sampling is not None and needs_cumulative(request):
            logprob = round(row.sampling.cumulative_logprob, NUM_DIGITS)
            generated = replace(generated, cumulative_logprob=logprob)
        outputs = [generated] if search is None else _found(search, request, reason)
        if state.grammar is None or reason == "error":
            return outputs
        return [self._checked(state.grammar, output) for output in outputs]

    def _checked(self, grammar: CompiledConstraint, generated: Generated) -> Generated:
        """Return an output with what is to be said of it and its constraint.

        One that EOS has ended is a whole, unless the second look says otherwise; one that was cut,
        if the second look says so, or the grammar where there is no other judge.
        """
        tokens, unenforced = generated.tokens, grammar.unenforced
        is_ended = bool(tokens) and tokens[-1] in self.eos_token_ids
        kept = tokens[:-1] if is_ended else tokens
        output = join_bytes(kept, self._tokenizer.token_bytes)
        look = grammar.verifier.look(output)
        if unenforced and not look.is_decided:
            look = Look(f"nothing can check {', '.join(unenforced)} in it")
        judged = grammar.verifier.judge(
            output, look, is_ended=is_ended, accepts=lambda: grammar.accepts(kept)
        )
        return replace(
            generated,
            constraint=judged.constraint,
            constraint_check=judged.check,
            constraint_verified=(unenforced or None) if judged.constraint == "complete" else None,
            failure=judged.failure or generated.failure,
        )

    # -- a step ----------------------------------------------------------------------------------

    def decode(self, output: ModelOutput, failed: dict[int, Failure], step: int) -> Decoded:
        """Take in what the model gave in `step`; writes the tokens that were chosen into it.

        failed: what the model says went wrong, by the slots of the first rows of groups.
        """
        tokens, self._step = output.tokens, step
        stopped: list[int] = []
        forks: list[tuple[int, int]] = []
        sampler, first_slots = self.sampler, self.first_slots
        if sampler is not None and not sampler.is_idle:
            if output.logits is None:
                raise InvariantError("the model gave no logits")
            sampled = self._sample(sampler, output.logits, failed, output.failed)
            tokens[sampler.slots] = sampled.tokens[sampler.slots]
            if self._searches:
                stopped, forks = self._search(sampler, sampled, tokens, failed)
        self._tokens.append(tokens)
        rows, is_over = self._states, {*failed, *stopped}  # those have no token
        if is_over:
            rows = {
                slot: row
                for slot, row in rows.items()
                if first_slots.get(slot, slot) not in is_over
            }
        stopped += self._stops.advance(tokens)
        return Decoded(stopped, failed, self._look_at(rows, tokens, stopped), forks)

    def decode_more(
        self, slots: list[int], logits: FloatArray, tokens: IntArray, decoded: Decoded
    ) -> list[int]:
        """Give some rows another token each in this step, as by a step of its own.

        slots: [rows] ascending, of rows that are alone.  logits: [rows, vocab].
        tokens: [num_slots], gets those that are chosen.  decoded: gets what that leads to.
        Returns the slots of those for which there was a token.
        """
        if self.sampler is None:
            raise InvariantError("rows without logits")
        sampled = self._sample(self.sampler, logits, decoded.failed, (), np.array(slots))
        slots = [slot for slot in slots if slot not in decoded.failed]
        tokens[slots] = sampled.tokens[slots]
        self._tokens.append_more(np.array(slots, np.int64), tokens[None, slots])
        decoded.stopped.extend(self._stops.advance_some(slots, tokens))
        rows = {slot: self._states[slot] for slot in slots if slot in self._states}
        decoded.jumps.update(self._look_at(rows, tokens, decoded.stopped))
        return slots

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
        constraints = self.constraints_of(self._states if some is None else some.tolist())
        sampled = sampler.sample(logits, self.masks_of(constraints), skip, some)
        for slot, failure in sampled.failed.items():
            why = constraints[slot].failure if slot in constraints else None
            told = failure if why is None else Failure("constraint-error", why)
            failed.setdefault(self.first_slots.get(slot, slot), told)
        for slot, logprob in sampled.logprobs.items():
            self._states[slot].logprobs.append(logprob)
        return sampled

    def constraints_of(self, slots: Iterable[int]) -> dict[int, RowConstraint]:
        """Return the constraints of rows, of those that have one."""
        rows = ((slot, self._states.get(slot)) for slot in slots)
        return {
            slot: row.constraint
            for slot, row in rows
            if row is not None and row.constraint is not None
        }

    def masks_of(self, constraints: Mapping[int, RowConstraint]) -> Masks | None:
        """Return what constraints leave, by slot; None if there are none."""
        if not constraints:
            return None
        began, times = perf_counter(), self._grammars.times
        allowed = allowed_tokens([*constraints.values()], self.vocab_size)
        times.masks += perf_counter() - began
        times.num_masks += len(constraints)
        return Masks(np.array([*constraints]), allowed)

    def _search(
        self, sampler: Sampler, sampled: Sampled, tokens: IntArray, failed: dict[int, Failure]
    ) -> tuple[list[int], list[tuple[int, int]]]:
        """Let every request's beams go on; return (slots of the first that are done, forks).

        tokens: gets those that were chosen.
        """
        done, forks, scores = [], [], sampled.beam_scores
        for first_slot, search in self._searches.items():
            if first_slot in failed:
                continue
            group = self._states[first_slot].sequence.group
            slots = [beam.slot for beam in group]
            log_probs = np.stack([scores[slot] for slot in slots if slot in scores])
            step = search.advance(log_probs, lambda beam, token: self._ends(slots[beam], token))  # noqa: B023
            if step is None:
                done.append(first_slot)
                if search.has_failed:
                    message = "no token is left that any beam may go on with"
                    failed[first_slot] = Failure("constraint-error", message)
                continue
            for beam, parent in enumerate(step.parents):
                if parent != beam:
                    source, target = slots[parent], slots[beam]
                    row = self._states[source]
                    own = None if row.constraint is None else row.constraint.fork()
                    self._states[target] = replace(row, sequence=group[beam], constraint=own)
                    self._stops.fork(source, target)
                    sampler.fork(source, target)
                    forks.append((source, target))
            tokens[slots] = step.tokens
            sampler.extend({slot: [token] for slot, token in zip(slots, step.tokens, strict=True)})
        return done, forks

    def _ends(self, slot: int, token: int) -> bool:
        is_end = self._states[slot].constraint is not None and token in self.eos_token_ids
        return is_end or self._stops.would_end(slot, token)

    def _look_at(
        self, rows: Mapping[int, RowState], given: IntArray, stopped: list[int]
    ) -> dict[int, list[int]]:
        """Move on rows that have to be looked at; return the tokens of those that jump.

        rows: by slot, each with a token.  given: [num_slots] the tokens of the step.
        stopped: gets those that end for want of tokens.
        """
        jumps: dict[int, list[int]] = {}
        has_stopped, token_of = {*stopped}, given.tolist()
        moved: dict[int, RowConstraint] = {}
        for slot, row in rows.items():
            if row.constraint is None or slot in has_stopped:
                continue
            if token_of[slot] not in self.eos_token_ids:
                row.constraint.advance(token_of[slot])
                moved[slot] = row.constraint
        if moved:
            began = perf_counter()
            find_masks(moved.values())
            self._grammars.times.masks += perf_counter() - began
        for slot, row in rows.items():
            tokens, num_silent = [token_of[slot]], 0
            self._count(slot, row, 1)
            if slot in moved:
                if moved[slot].may_force:
                    tokens += self._force(slot, row, moved[slot])
                    if len(tokens) > 1:
                        jumps[slot] = tokens
            elif row.constraint is not None and slot not in has_stopped:
                stopped.append(slot)  # EOS below min_tokens: nothing else is left
                num_silent = 1
            if row.stream is not None:
                self._tell(row, row.stream, tokens, num_silent)
        if jumps:
            self._extend({slot: tokens[1:] for slot, tokens in jumps.items()})
        return jumps

    def _count(self, slot: int, row: RowState, number: int) -> None:
        """Note that a row was given tokens; watch for its end once the next may be the last."""
        row.num_given += number
        if row.has_to_go_on and row.num_given + 1 >= row.sequence.request.min_tokens:
            row.has_to_go_on = False
            self._stops.switch(slot, row.sequence.automaton)

    def _tell(
        self, row: RowState, stream: TextStream, tokens: list[int], num_silent: int = 0
    ) -> None:
        """Tell the tokens of a step, and the text that is certain by now.

        num_silent: how many of the last have no text: EOS, though no stop acts there yet.
        """
        tokens, row.untold = row.untold + tokens, []
        with_text = tokens[: len(tokens) - num_silent]
        pieces = [piece for token in with_text for piece in stream.push(token)]
        self._add_events(row, tokens, pieces or [NO_TEXT])

    def _add_events(self, row: RowState, tokens: list[int], pieces: list[TextPiece]) -> None:
        """Tell pieces of text by their states; the first event tells all tokens."""
        sequence, logprobs = row.sequence, None
        if tokens and sequence.request.logprobs is not None:
            logprobs = row.logprobs[-len(tokens) :]
        for state, group in groupby(pieces, lambda piece: piece.state):
            text = "".join(piece.text for piece in group)
            told = self._step, sequence.id, sequence.index, tokens, text, state, logprobs
            self._streamed.append(TokenEvent(*told))
            tokens, logprobs = [], None

    def _extend(self, given: dict[int, list[int]]) -> None:
        for slot, tokens in given.items():
            self._tokens.extend(slot, tokens)
        if self.sampler is not None:
            self.sampler.extend(given)

    def _force(self, slot: int, row: RowState, constraint: RowConstraint) -> list[int]:
        """Return the tokens that are the only ones allowed next in a row, after moving it on.

        The last token of a row, and one that ends it, are left to the model: a row ends in a step.
        A constraint that asks for nothing more is dropped.
        """
        forced: list[int] = []
        request = row.sequence.request
        while row.may_jump:
            most = request.output_limit - 1 - row.num_given
            tokens: Ordered[int] = constraint.forced_tokens(most) if most > 0 else ()
            if row.has_to_go_on:  # up to where it may end
                tokens = tokens[: request.min_tokens - 1 - row.num_given]
            num_read = self._stops.advance_row(slot, tokens)
            if num_read:
                constraint.advance_forced(num_read)
                self._count(slot, row, num_read)
                forced += tokens[:num_read]
            if not tokens or num_read < len(tokens):
                break
        if not constraint.is_active:
            row.constraint = None
        return forced


def _slots(first: Sequence) -> list[int]:
    return [row.slot for row in first.group]


def _partner_slot(sequence: Sequence) -> int | None:
    return next((row.slot for row in sequence.others if row.role == "negative"), None)


def _found(search: BeamSearch, request: Request, reason: FinishReason) -> list[Generated]:
    """Return what a search has found, which has ended for that reason."""
    is_done = reason in {"stop", "length"}
    cut = "length" if is_done else reason
    found = [
        Generated(
            beam.tokens,
            "stop" if beam.has_ended else cut,
            score=None if reason == "error" else round(beam.score, NUM_DIGITS),
        )
        for beam in search.results()
    ]
    message = f"beam search found {len(found)} outputs, not {request.n}"
    failure = Failure("too-few-outputs", message) if is_done else None
    return found + [Generated([], cut, failure=failure)] * (request.n - len(found))
