"""What a row has to be looked at for by itself: all but being sampled, stopped and cut."""

from msgspec import Struct
from msgspec.structs import replace

from batcher.decoding.constraints import CompiledConstraint, RowConstraint
from batcher.decoding.healing import HealingRow
from batcher.decoding.machine import StateMachine
from batcher.decoding.sampling.noise import row_key
from batcher.decoding.sampling.params import needs_cumulative, sampling_params
from batcher.decoding.sampling.sampler import SamplingRow
from batcher.errors import Failure, InvariantError
from batcher.models.base import Tokenizer, join_bytes
from batcher.request import Request, TokenLogprob
from batcher.rows.generated import Generated
from batcher.rows.grammars import Grammars
from batcher.rows.row_stream import RowStream
from batcher.sequence import Sequence
from batcher.validation import constraint_fields_of


class Row(Struct, eq=False):
    """The state of one row beside that in the tables of all rows.

    num_tokens: how many it has generated.
    grammar: what its output has to keep, if anything.
    constraint: how far it has come in that, or in the end of the prompt that was healed.
    has_to_go_on: it may not end yet, for want of tokens.
    logprobs: of its tokens; none if they are not asked for.
    stream: of its text, if that is told as it comes; untold: tokens it has not been told yet.
    """

    sequence: Sequence
    num_tokens: int = 0
    grammar: CompiledConstraint | None = None
    constraint: RowConstraint | None = None
    has_to_go_on: bool = False
    logprobs: list[TokenLogprob] = []
    stream: RowStream | None = None
    untold: list[int] = []

    @property
    def machine(self) -> StateMachine:
        """What the row is watched for now."""
        machine = self.sequence.machine
        return machine.endless if self.has_to_go_on else machine

    @property
    def needs_cumulative(self) -> bool:
        """Whether its result tells the log-probability of the whole output."""
        return needs_cumulative(self.sequence.request)

    @property
    def may_jump(self) -> bool:
        """Whether its choice of a token that is the only one allowed tells and changes nothing."""
        request = self.sequence.request
        return not (
            self.needs_cumulative
            or request.mirostat
            or request.allowed_token_ids
            or request.bad_words
            or self.sequence.role == "beam"
        )

    def follow(self, token: int) -> None:
        """Move the constraint on by a token that it allows."""
        if self.constraint is None:
            raise InvariantError("a row without a constraint cannot follow one")
        self.constraint.advance(token)
        if not self.constraint.is_active:
            self.constraint = None

    def fork(self, sequence: Sequence) -> "Row":
        """Return the row of `sequence`, a beam that goes on from this one."""
        constraint = None if self.constraint is None else self.constraint.fork()
        return Row(
            sequence, self.num_tokens, self.grammar, constraint, has_to_go_on=self.has_to_go_on
        )

    def check(
        self, generated: Generated, tokenizer: Tokenizer, eos_token_id: int | None
    ) -> Generated:
        """Return an output of this row with what is to be said of it and its constraint.

        One that EOS has ended is a whole, unless the second look says otherwise; one that was cut,
        if the second look says so, or the grammar where there is no other judge.
        """
        if self.grammar is None or generated.reason == "error":
            return generated
        tokens = generated.tokens
        is_ended = tokens[-1:] == [eos_token_id]
        kept = tokens[:-1] if is_ended else tokens
        output = join_bytes(kept, tokenizer.token_bytes)
        look = self.grammar.verifier.look(output)
        is_whole = is_ended or self.grammar.accepts(kept)
        if look.is_decided:
            is_whole = look.problem is None
        problem = look.problem if is_ended or not self.grammar.verifier.can_begin(output) else None
        generated = replace(
            generated,
            constraint="complete" if is_whole else "incomplete",
            constraint_check=None if look.is_decided or not is_whole else "none",
        )
        if problem is None:
            return generated
        failure = Failure("constraint-error", f"the output breaks its constraint: {problem}")
        return replace(generated, failure=failure)


def make_row(sequence: Sequence, grammars: Grammars, stream: RowStream | None) -> Row | None:
    """Return the row of a sequence that has just got its slot; None if it needs none."""
    request = sequence.request
    grammar = grammars.of_row(request)
    constraint: RowConstraint | None = None
    if grammar is not None:
        constraint = grammar.new_row()
    elif sequence.healing:
        constraint = HealingRow(grammars.vocabulary, sequence.healing)
    row = Row(
        sequence,
        grammar=grammar,
        constraint=constraint,
        has_to_go_on=request.min_tokens > 1,
        stream=stream,
    )
    is_needed = (
        constraint is not None
        or row.has_to_go_on
        or row.needs_cumulative
        or stream is not None
        or sequence.role == "beam"
    )
    return row if is_needed else None


def sampling_row(sequence: Sequence, eos_token_id: int | None) -> SamplingRow:
    """Return what the sampler has to know of a sequence that has just got its slot."""
    request = sequence.request
    return SamplingRow(
        sampling_params(request),
        row_key(request.seed, sequence.id, sequence.index),
        sequence.prompt_tokens,
        stop_token_ids=_stop_token_ids(request, eos_token_id),
        partner=partner_slot(sequence),
        is_beam=sequence.role == "beam",
        is_constrained=bool(sequence.healing or constraint_fields_of(request)),
    )


def partner_slot(sequence: Sequence) -> int | None:
    """Return the slot of the negative prompt's row beside that of a sequence, if it has one."""
    return next((c.slot for c in sequence.companions if c.role == "negative"), None)


def _stop_token_ids(request: Request, eos_token_id: int | None) -> tuple[int, ...]:
    """Return the single tokens that would end the output."""
    stop = request.stop_token
    ids = [] if stop is None else [stop] if isinstance(stop, int) else stop
    if eos_token_id is not None and not request.ignore_eos:
        ids = [*ids, eos_token_id]
    return tuple(dict.fromkeys(ids))
