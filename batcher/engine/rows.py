"""Rows that are not plain: sampled, constrained, with beams, or streamed.

Rows whose state does not fit the tables have a RowState and are handled one by one.
"""

from array import array
from collections.abc import Collection, Iterable, Mapping
from itertools import groupby
from time import perf_counter

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from batcher.decoding.beams import BeamSearch
from batcher.decoding.constraints import (
    CompiledConstraint,
    ConstraintCompiler,
    HealingRow,
    RowConstraint,
    allowed_tokens,
    find_masks,
)
from batcher.decoding.filters import needs_cumulative, sampling_params
from batcher.decoding.output_tokens import OutputTokens
from batcher.decoding.sampling import Masks, Sampler, SamplingRow, row_key
from batcher.decoding.stop_matcher import StopMatcher, TextPiece, TextStream
from batcher.decoding.stops import StopProgress
from batcher.decoding.verification import Look
from batcher.engine.sequence import Decoded, Generated, Sequence, Suspended
from batcher.errors import Failure, InvariantError
from batcher.events import TokenEvent
from batcher.models.base import (
    Batch,
    FloatArray,
    IntArray,
    Model,
    ModelOutput,
    TopLogits,
    eos_token_ids_of,
    join_bytes,
    number_of,
)
from batcher.requests.validation import logit_fields_of
from batcher.result import NUM_DIGITS, FinishReason, TokenLogprob


class RowState(Struct, eq=False):
    """The state of one row in addition to the tables of all rows.

    grammar: the constraint on its output, if any.
    constraint: its position in that grammar, or in the healed end of the prompt.
    stream: the text decoder, if its text is streamed; unstreamed: tokens not streamed yet.
    may_jump: whether a token that is the only one allowed needs no model call.
    has_to_go_on: whether its next token cannot be the last (its output is too short).
    num_given: tokens received.  logprobs: of its tokens, if requested.
    """

    sequence: Sequence
    grammar: CompiledConstraint | None
    constraint: RowConstraint | None
    stream: TextStream | None
    may_jump: bool
    has_to_go_on: bool
    unstreamed: list[int] = []
    num_given: int = 0
    logprobs: list[TokenLogprob] = []


class RowDecoder:
    """Decodes the rows of a batch in which some rows are not plain.

    tokens, stops: of all rows, shared with the ModelRunner.
    may_speculate: whether rows may have drafts, which needs logits.
    first_slots: the slot of another row of a group -> the slot of its first row.
    takes_plain: whether plain rows are opened here as well.
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
        self._gives, self._may_speculate = model.gives, may_speculate
        self._num_top = 0 if may_speculate else number_of(model, "num_top_logits") or 0
        self._is_streaming, self._step = is_streaming, 0
        self.takes_plain = model.gives == "logits" or is_streaming or may_speculate
        self.vocab_size = model.vocab_size or 0
        self.sampler = Sampler(num_slots, self.vocab_size, model.tokenizer)
        self._masks: Masks | None = None  # of the next step
        self._states: dict[int, RowState] = {}  # by slot, of rows that are not plain
        self._searches: dict[int, BeamSearch] = {}  # by the slot of the first beam
        self._streamed: list[TokenEvent] = []

    @property
    def is_busy(self) -> bool:
        return bool(self._states) or not self.sampler.is_idle

    # -- a row comes and goes --------------------------------------------------------------------

    def open(self, first: Sequence) -> list[int]:
        """Start the rows of a group; return the tokens that its constraint forces at the start.

        All beams start from one prompt, so only the first beam is computed until the first fork.
        """
        slot, request, is_beam = first.slot, first.request, first.role == "beam"
        skip, min_tokens = len(first.healing), request.min_tokens
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
            keeps = request.include_stop_str_in_output
            stream = TextStream(
                first.automaton, self._tokenizer, skip=skip, min_tokens=min_tokens, keeps_stop=keeps
            )
        is_sampled = self._gives == "logits" or (self._may_speculate and first.speculates)
        if first.more is not None or stream is not None:
            grammar, has_sums = self._grammars.of_row(request), needs_cumulative(request)
            if grammar is not None:
                constraint = grammar.new_row()
            elif first.healing:
                constraint = HealingRow(self._grammars.vocabulary, first.healing)
            needs_each = constraint is not None or min_tokens > 1 or has_sums or is_beam
            is_sampled |= constraint is not None or bool(logit_fields_of(request))
            if needs_each or stream is not None:
                is_told = has_sums or is_beam or request.mirostat or request.bad_words
                may_jump = not (is_told or request.allowed_token_ids)
                row = RowState(first, grammar, constraint, stream, may_jump, min_tokens > 1)
        if is_sampled and self._gives != "tokens":
            stops = [] if request.stop_token is None else request.stop_token
            stop_ids = [stops] if isinstance(stops, int) else [*stops]
            if not request.ignore_eos:
                stop_ids += self.eos_token_ids
            own_id = first.id if request.id is None else request.id  # not its name in the engine
            sampling = SamplingRow(
                sampling_params(request),
                row_key(request.seed, own_id, first.index),
                first.prompt.tokens,
                stop_token_ids=tuple(dict.fromkeys(stop_ids)),
                partner=first.others[0].slot if first.others and not is_beam else None,
                is_beam=is_beam,
            )
            if self._num_top and not is_beam:
                is_constrained = constraint is not None
                is_narrow = sampling.params.is_narrow(self._num_top, is_constrained=is_constrained)
                sampling = sampling._replace(is_narrow=is_narrow)
            self.sampler.open(slot, sampling)
        if row is None:
            self._stops.open(slot, first.automaton)
            return []
        self._states[slot] = row
        automaton = first.automaton.endless if row.has_to_go_on else first.automaton
        self._stops.open(slot, automaton, StopProgress(skip=skip))
        if constraint is not None:
            row.unstreamed = self._force(slot, row, constraint)
        return row.unstreamed

    def read(self, slot: int, start: int, stop: int) -> "array[int]":
        first_slot = self.first_slots.get(slot, slot)
        search = self._searches.get(first_slot)
        if search is None:
            return self._tokens.read(first_slot, start, stop)
        slots = [beam.slot for beam in self._states[first_slot].sequence.group]
        beams = dict(zip(slots, search.running_tokens(), strict=False))
        return array("q", beams.get(slot, ())[start:stop])  # empty if not computed yet

    def suspend(self, first: Sequence, num_tokens: int) -> None:
        """Move the state of a group's rows from the tables to the sequences."""
        rows, search = [first], self._searches.pop(first.slot, None)
        if search is None:
            tokens = [self._tokens.close(first.slot, num_tokens)] * first.num_slots
        else:
            tokens, rows = search.running_tokens(), [*first.group]
        for row in rows:
            slot, own = row.slot, search if row is first else None
            place, sampling = self._stops.suspend(slot), self.sampler.suspend(slot)
            row.suspended = Suspended(place, self._states.pop(slot, None), sampling, own)
        for row, generated in zip(first.group, tokens, strict=False):
            row.generated = generated
        for other in first.others:
            self.first_slots.pop(other.slot, None)

    def resume(self, first: Sequence) -> None:
        for row in first.group:
            suspended, row.suspended = row.suspended, None
            if row is not first:
                self.first_slots[row.slot] = first.slot
            if suspended is None:
                continue
            if suspended.search is not None:
                self._searches[first.slot] = suspended.search
            elif row is first:
                self._tokens.resume(row.slot, row.generated or [])
            self._stops.resume(row.slot, suspended.place)
            if suspended.state is not None:
                self._states[row.slot] = suspended.state
            if suspended.sampling is not None:
                has_partner = suspended.sampling.row.partner is not None
                partner = first.others[0].slot if has_partner else None
                self.sampler.resume(row.slot, suspended.sampling, partner)

    def close(self, first: Sequence, reason: FinishReason) -> list[Generated]:
        """Return the outputs of a suspended group: for beams, the requested number, best first.

        reason: why the group ended.
        """
        suspended = first.suspended
        if suspended is None:
            raise InvariantError(f"{first.id!r} is closed and not suspended")
        search, state = suspended.search, suspended.state
        outputs = [Generated(first.generated or [], reason)]
        if state is None:
            return outputs
        request, cut = state.sequence.request, reason
        if search is not None:
            found, failure = search.results(), None
            if reason in {"stop", "length"}:
                message = f"beam search found {len(found)} outputs, not {request.n}"
                cut, failure = "length", Failure("too-few-outputs", message)
            outputs = [
                Generated(
                    beam.tokens,
                    "stop" if beam.has_ended else cut,
                    score=None if reason == "error" else round(beam.score, NUM_DIGITS),
                )
                for beam in found
            ]
            outputs += [Generated([], cut, failure=failure)] * (request.n - len(found))
        elif needs_cumulative(request) and suspended.sampling is not None:
            logprobs = None if request.logprobs is None else state.logprobs
            total = round(suspended.sampling.cumulative_logprob, NUM_DIGITS)
            outputs = [replace(outputs[0], logprobs=logprobs, cumulative_logprob=total)]
        if state.stream is not None:
            self._stream(state, [])
            self._stream(state, [], state.stream.finish())
        if state.grammar is None or reason == "error":
            return outputs
        return [self._checked(state.grammar, output) for output in outputs]

    def _checked(self, grammar: CompiledConstraint, generated: Generated) -> Generated:
        """Return an output with the outcome of its constraint.

        An output that EOS ended is complete unless the later check rejects it.  An output that was
        cut is complete if the later check, or without one the grammar, accepts it.
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

    def ask(self, batch: Batch) -> None:
        """State the rows whose logits the next step needs, and how a model edits them."""
        sampler = self.sampler
        batch.logit_slots, batch.top_slots = sampler.slots, sampler.narrow_slots
        if not sampler.is_idle:
            self._masks = self.masks_of(self.constraints_of(self._states))
        batch.edits = sampler.edits(self._masks) if batch.top_slots.size else None

    def decode(self, output: ModelOutput, failed: dict[int, Failure], step: int) -> Decoded:
        """Choose the tokens of `step` and write them to the model's output.

        failed: failures of the model, by the slot of each group's first row.
        """
        self._step, decoded = step, Decoded(failed=failed, uncomputed=frozenset(failed))
        self.give(output.tokens, output.logits, decoded, output.failed, top=output.top_logits)
        return decoded

    def give(
        self,
        tokens: IntArray,
        logits: FloatArray | None,
        decoded: Decoded,
        skip: Collection[int] = (),
        some: list[int] | None = None,
        top: TopLogits | None = None,
    ) -> None:
        """Give every row, or some rows, the next token, exactly as a step of their own would.

        tokens: [num_slots] the model's choice; overwritten by sampled tokens.  decoded: receives
        stops, failures and forks.  logits, skip, some, top: as in Sampler.sample; `some` ascends.
        """
        sampler, first_slots, failed = self.sampler, self.first_slots, decoded.failed
        if not sampler.is_idle:
            slots = sampler.slots if some is None else np.array(some)
            if logits is None:
                if slots.size:
                    raise InvariantError("the model gave no logits")
                logits = np.zeros((0, self.vocab_size), np.float32)
            masks = self._masks if some is None else self.masks_of(self.constraints_of(some))
            sampled = sampler.sample(logits, masks, skip, None if some is None else slots, top)
            if top is not None:
                slots = np.concatenate([slots, sampler.narrow_slots])
            tokens[slots] = sampled.tokens[slots]
            for slot, failure in sampled.failed.items():
                state = self._states.get(slot)
                why = state.constraint.failure if state and state.constraint else None
                told = failure if why is None else Failure("constraint-error", why)
                failed.setdefault(first_slots.get(slot, slot), told)
            for slot, logprob in sampled.logprobs.items():
                self._states[slot].logprobs.append(logprob)
            for first_slot in self._searches if some is None else ():
                if first_slot not in failed:
                    self._search(first_slot, sampled.beam_scores, tokens, decoded)
        rows, is_over = self._states, {*failed, *decoded.stopped}  # these have no token
        if some is None:
            self._tokens.append(tokens)
            decoded.stopped.extend(self._stops.advance(tokens))
        else:
            some = [slot for slot in some if slot not in is_over]
            self._tokens.append_more(np.array(some, np.int64), tokens[some])
            decoded.stopped.extend(self._stops.advance_some(some, tokens))
            rows = {slot: rows[slot] for slot in some if slot in rows}
        if is_over:
            going_on = [slot for slot in rows if first_slots.get(slot, slot) not in is_over]
            rows = {slot: rows[slot] for slot in going_on}
        if not rows:
            return
        # rows with a state, one by one
        stopped, token_of, eos_token_ids = {*decoded.stopped}, tokens.tolist(), self.eos_token_ids
        moved = {
            slot: row.constraint
            for slot, row in rows.items()
            if row.constraint and slot not in stopped and token_of[slot] not in eos_token_ids
        }
        for slot, constraint in moved.items():
            constraint.advance(token_of[slot])
        if moved:
            began = perf_counter()
            find_masks(moved.values())
            self._grammars.times.masks += perf_counter() - began
        for slot, row in rows.items():
            given, num_silent = [token_of[slot]], 0
            self._count(slot, row, 1)
            if slot in moved:
                if moved[slot].may_force:
                    given += self._force(slot, row, moved[slot])
                    if len(given) > 1:
                        decoded.jumps[slot] = given
            elif row.constraint and slot not in stopped:
                decoded.stopped.append(slot)  # EOS below min_tokens was the only token left
                num_silent = 1
            if row.stream is not None:
                self._stream(row, given, num_silent=num_silent)

    def take_streamed(self) -> list[TokenEvent]:
        streamed, self._streamed = self._streamed, []
        return streamed

    def constraints_of(self, slots: Iterable[int]) -> dict[int, RowConstraint]:
        """Return the constraints of those rows that have one."""
        rows = ((slot, self._states.get(slot)) for slot in slots)
        return {slot: row.constraint for slot, row in rows if row and row.constraint}

    def masks_of(self, constraints: Mapping[int, RowConstraint]) -> Masks | None:
        """Return the allowed tokens by slot, or None without constraints."""
        if not constraints:
            return None
        began, times = perf_counter(), self._grammars.times
        allowed = allowed_tokens([*constraints.values()], self.vocab_size)
        times.masks += perf_counter() - began
        times.num_masks += len(constraints)
        return Masks(np.array([*constraints]), allowed)

    def _search(
        self, first: int, scores: Mapping[int, FloatArray], tokens: IntArray, decoded: Decoded
    ) -> None:
        """Advance the beams of the group whose first slot is given; arguments as in `give`."""
        search, group = self._searches[first], self._states[first].sequence.group
        slots = [beam.slot for beam in group]

        def ends(beam: int, token: int) -> bool:
            is_end = self._states[slots[beam]].constraint and token in self.eos_token_ids
            return bool(is_end) or self._stops.would_end(slots[beam], token)

        step = search.advance(np.stack([scores[slot] for slot in slots if slot in scores]), ends)
        if step is None:
            decoded.stopped.append(first)
            if search.has_failed:
                message = "no allowed token is left for any beam"
                decoded.failed[first] = Failure("constraint-error", message)
            return
        for beam, parent in enumerate(step.parents):
            if parent != beam:
                source, target = slots[parent], slots[beam]
                row = self._states[source]
                constraint = row.constraint and row.constraint.fork()
                self._states[target] = replace(row, sequence=group[beam], constraint=constraint)
                self._stops.fork(source, target)
                self.sampler.fork(source, target)
                decoded.forks.append((source, target))
        tokens[slots] = step.tokens
        self.sampler.extend({slot: [token] for slot, token in zip(slots, step.tokens, strict=True)})

    def _count(self, slot: int, row: RowState, number: int) -> None:
        """Count new tokens of a row; start to watch it once its next token can be the last."""
        row.num_given += number
        if row.has_to_go_on and row.num_given + 1 >= row.sequence.request.min_tokens:
            row.has_to_go_on = False
            self._stops.switch(slot, row.sequence.automaton)

    def _stream(
        self, row: RowState, tokens: list[int], rest: Iterable[TextPiece] = (), num_silent: int = 0
    ) -> None:
        """Stream tokens and the text that is final by now; the first event has all tokens.

        rest: text that was held back until the end.
        num_silent: trailing tokens without text: EOS where no stop applies yet.
        """
        tokens, row.unstreamed, pieces = row.unstreamed + tokens, [], [*rest]
        if row.stream is not None:
            for token in tokens[: len(tokens) - num_silent]:
                pieces += row.stream.push(token)
        if tokens and not pieces:
            pieces = [TextPiece(None, "", 0)]
        sequence, logprobs = row.sequence, None
        if sequence.request.logprobs is not None and tokens:
            logprobs = row.logprobs[-len(tokens) :]
        for state, group in groupby(pieces, lambda piece: piece.state):
            told = tokens, "".join(piece.text for piece in group), state, logprobs
            self._streamed.append(TokenEvent(self._step, sequence.id, sequence.index, *told))
            tokens, logprobs = [], None

    def _force(self, slot: int, row: RowState, constraint: RowConstraint) -> list[int]:
        """Advance a row over the tokens that its constraint forces next, and return them.

        The last token of a row is left to the model, since a row ends in a step.  A constraint
        without further requirements is dropped.
        """
        forced: list[int] = []
        request = row.sequence.request
        while row.may_jump:
            most = request.output_limit - 1 - row.num_given
            if row.has_to_go_on:  # until it may end
                most = min(most, request.min_tokens - 1 - row.num_given)
            tokens = constraint.forced_tokens(most) if most > 0 else ()
            num_read = self._stops.advance_row(slot, tokens)
            if num_read:
                constraint.advance_forced(num_read)
                self._count(slot, row, num_read)
                forced += tokens[:num_read]
            if not tokens or num_read < len(tokens):
                break
        if not constraint.is_active:
            row.constraint = None
        if forced:
            self._tokens.extend(slot, forced)
            self.sampler.extend({slot: forced})
        return forced
