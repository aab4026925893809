"""What rows that have to be looked at by themselves are, beside being sampled, stopped and cut."""

from collections.abc import Callable
from itertools import groupby

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from batcher.decoding.beams import BeamSearch, BeamStep
from batcher.decoding.constraints import (
    CompiledConstraint,
    ConstraintCompiler,
    RowConstraint,
)
from batcher.decoding.filters import needs_cumulative, sampling_params
from batcher.decoding.healing import HealingRow
from batcher.decoding.sampling import SamplingRow, row_key
from batcher.decoding.stops import StopAutomaton
from batcher.decoding.streaming import TextPiece, TextStream
from batcher.decoding.verification import Look
from batcher.engine.decoded import Generated
from batcher.engine.sequence import Sequence
from batcher.errors import Failure
from batcher.events import TokenEvent
from batcher.models.base import FloatArray, Tokenizer, join_bytes
from batcher.requests.validation import constraint_fields_of
from batcher.result import NUM_DIGITS, FinishReason, TokenLogprob


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
        """Return the events of what was kept back until nothing more came."""
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
        """What the row is watched for now."""
        automaton = self.sequence.automaton
        return automaton.endless if self.has_to_go_on else automaton

    def fork(self, sequence: Sequence) -> "RowState":
        """Return the row of `sequence`, a beam that goes on from this one."""
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
        states = self.grammar.states
        judged = self.grammar.verifier.judge(
            output, look, is_ended=is_ended, accepts=lambda: states.accepts(kept)
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
        """Why the search had to give up, if it had."""
        if not self.search.has_failed:
            return None
        return Failure("constraint-error", "no token is left that any beam may go on with")

    @property
    def slots(self) -> list[int]:
        """The slots of the sequences, in their order."""
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
        sequence.prompt_tokens,
        stop_token_ids=tuple(dict.fromkeys(stop_ids)),
        partner=partner_slot(sequence),
        is_beam=sequence.role == "beam",
        is_constrained=bool(sequence.healing or constraint_fields_of(request)),
    )


def partner_slot(sequence: Sequence) -> int | None:
    """Return the slot of the negative prompt's row beside that of a sequence, if it has one."""
    return next((c.slot for c in sequence.others if c.role == "negative"), None)
