"""The decoding side of every row: which tokens it is given, and when its output has ended.

Rows that ask for nothing but the model's own tokens until a stop take the fast path: nothing is
done for any of them in a step.  What a row may ask for beside that is in row_decoder.py.
"""

from collections.abc import Mapping
from functools import cached_property
from typing import TYPE_CHECKING

from batcher.decoding.output_tokens import OutputTokens
from batcher.decoding.stop_matcher import FREE_LINE, StopMatcher
from batcher.engine.decoded import NO_DRAFTS, NOTHING_DECODED, Decoded, Generated
from batcher.engine.sequence import Sequence
from batcher.engine.suspended import SuspendedRow, SuspendedRows
from batcher.errors import Failure
from batcher.events import TokenEvent
from batcher.models.base import Model, ModelOutput, eos_token_ids_of
from batcher.request import ConstraintField
from batcher.result import FinishReason
from batcher.settings import GRAMMAR_TIMEOUT
from batcher.tokens import Tokens

if TYPE_CHECKING:
    from array import array

    from batcher.decoding.constraints import ConstraintCompiler, ConstraintTimes
    from batcher.engine.row_decoder import RowDecoder
    from batcher.engine.speculating_rows import SpeculatingRows
    from batcher.speculation.proposal import Proposal


class Decoder:
    """The tokens of all rows, and their stops.

    is_streaming: whether the text of each sample is told as it comes.
    speculates: whether sequences may be given drafts.
    grammar_timeout: seconds of processor time for a constraint.
    strict_constraints: whether masks have to enforce all of one.
    rows: those that ask for more, once there has been any; speculating: the same, if sequences may
    be given drafts.
    """

    def __init__(
        self,
        model: Model,
        num_slots: int,
        *,
        is_streaming: bool,
        speculates: bool = False,
        grammar_timeout: float = GRAMMAR_TIMEOUT,
        strict_constraints: bool = False,
    ) -> None:
        self._grammar_timeout, self._strict_constraints = grammar_timeout, strict_constraints
        self._model, self._num_slots, self._is_streaming = model, num_slots, is_streaming
        self._tokens = OutputTokens(num_slots)
        self._stops = StopMatcher(num_slots, model.vocab_size, model.tokenizer)
        self.rows: RowDecoder | None = None
        self.speculating: SpeculatingRows | None = None
        if speculates:
            self.rows = self.speculating = self._make_speculating()
        elif is_streaming or model.gives == "logits":
            self.rows = self._make_rows()

    @property
    def _of_rows(
        self,
    ) -> "tuple[Model, int, ConstraintCompiler, OutputTokens, StopMatcher]":
        return self._model, self._num_slots, self.grammars, self._tokens, self._stops

    @cached_property
    def grammars(self) -> "ConstraintCompiler":
        """What constraints and healed prompts come to with this model."""
        from batcher.decoding.constraints import (  # noqa: PLC0415 - not for plain rows
            ConstraintCompiler,
        )

        model = self._model
        vocab_size = model.vocab_size or len(model.tokenizer.token_bytes)
        return ConstraintCompiler(
            model.tokenizer,
            vocab_size,
            eos_token_ids_of(model),
            self._grammar_timeout,
            is_strict=self._strict_constraints,
        )

    def check_constraint(self, field: ConstraintField, value: object) -> None:
        """Make sure that the constraint which `field` of a request states can be compiled.

        Raises:
            GrammarError, MissingGrammarError: it cannot.
        """
        self.grammars.check(field, value)

    @property
    def constraint_counts(self) -> tuple[int, int]:
        """How many constraints were compiled, and for how many rows one was there already."""
        return self.grammars.counts if "grammars" in vars(self) else (0, 0)

    @property
    def constraint_times(self) -> "ConstraintTimes | None":
        """What constraints have taken; None if none was asked for."""
        return self.grammars.times if "grammars" in vars(self) else None

    def heal(self, prompt_tokens: Tokens) -> tuple[list[int], bytes]:
        """Return what the model is to read of a prompt, and the bytes to be generated anew."""
        return self.grammars.vocabulary.heal(prompt_tokens)

    def _make_rows(self) -> "RowDecoder":
        from batcher.engine.row_decoder import RowDecoder  # noqa: PLC0415 - not for plain rows

        return RowDecoder(*self._of_rows, is_streaming=self._is_streaming)

    def _make_speculating(self) -> "SpeculatingRows":
        from batcher.engine.speculating_rows import SpeculatingRows  # noqa: PLC0415 - seldom

        return SpeculatingRows(*self._of_rows, is_streaming=self._is_streaming)

    # -- a row comes and goes --------------------------------------------------------------------

    def open(self, first: Sequence) -> list[int]:
        """Begin the row of a group, or its first beam; return the tokens it has from the outset.

        Those are what its constraint allows nothing beside.
        """
        rows = self.rows
        if first.extras is not None:
            rows = self.rows = rows or self._make_rows()
        elif rows is None or not rows.takes_plain:
            slot, tokens, stops = first.slot, self._tokens, self._stops
            tokens.first_rows[slot] = tokens.row
            state = stops.starts.get(first.automaton)
            if state is None:
                stops.open(slot, first.automaton)
            else:
                stops.states[slot] = state
                stops.watched.add(slot)
            return []
        return rows.open(first)

    def close(self, first: Sequence, num_tokens: int, reason: FinishReason) -> list[Generated]:
        """Forget the rows of a group; return its output, or those of its beams.

        num_tokens: how many of the row's tokens are its output; beams know that themselves.
        """
        rows, slot = self.rows, first.slot
        if rows is not None and rows.is_busy:
            return rows.close(rows.suspend(first, num_tokens), reason)
        self._stops.watched.discard(slot)
        self._stops.states[slot] = FREE_LINE
        return [Generated(self._tokens.close(slot, num_tokens), reason)]

    def read(self, slot: int, start: int, stop: int) -> "array[int]":
        """Return tokens number `start` to `stop`, exclusive, of those the row in `slot` has."""
        if self.rows is not None and self.rows.is_busy:
            return self.rows.read(slot, start, stop)
        return self._tokens.read(slot, start, stop)

    # -- a row is out of the batch for a while ---------------------------------------------------

    def suspend(self, first: Sequence, num_tokens: int) -> SuspendedRows:
        """Take the rows of a group out of their slots, to be resumed in others, or closed.

        num_tokens: how many of the row's tokens are its output; beams know that themselves.
        """
        if self.rows is not None and self.rows.is_busy:
            return self.rows.suspend(first, num_tokens)
        tokens = self._tokens.close(first.slot, num_tokens)
        return SuspendedRows([tokens], [SuspendedRow(self._stops.suspend(first.slot))])

    def resume(self, first: Sequence, suspended: SuspendedRows) -> None:
        """Let suspended rows go on in the slots that their group has by now."""
        if self.rows is not None:
            self.rows.resume(first, suspended)
        else:
            self._tokens.resume(first.slot, suspended.tokens[0])
            self._stops.resume(first.slot, suspended.rows[0].place)

    def close_suspended(self, suspended: SuspendedRows, reason: FinishReason) -> list[Generated]:
        """Return what suspended rows had generated: the row's output, or those of its beams."""
        if self.rows is not None:
            return self.rows.close(suspended, reason)
        return [Generated(suspended.tokens[0], reason)]

    # -- a step ----------------------------------------------------------------------------------

    def decode(
        self, output: ModelOutput, step: int, drafts: "Mapping[int, Proposal]" = NO_DRAFTS
    ) -> Decoded:
        """Take in what the model gave in `step`; writes the tokens that were chosen into it.

        drafts: of each row that speculates, perhaps none, in the order of the batch.
        """
        if self.rows is not None and self.rows.is_busy:
            failed = self._failures(output.failed)
            if self.speculating is not None:
                return self.speculating.decode(output, failed, step, drafts)
            return self.rows.decode(output, failed, step)
        tokens = output.tokens
        self._tokens.append(tokens)
        stopped = self._stops.advance(tokens)
        if stopped or output.failed:
            return Decoded(stopped, self._failures(output.failed), {}, [])
        return NOTHING_DECODED

    def fail(self, failed: Mapping[int, str | Failure]) -> Decoded:
        """Return the outcome of a step in which the model failed these rows, and gave no other."""
        return Decoded([], self._failures(failed), {}, [])

    def _failures(self, failed: Mapping[int, str | Failure]) -> dict[int, Failure]:
        """Return what the model says went wrong, by the slots of the first rows of groups."""
        first_slots = {} if self.rows is None else self.rows.first_slots
        return {
            first_slots.get(slot, slot): Failure("model-error", why)
            if isinstance(why, str)
            else why
            for slot, why in failed.items()
        }

    def take_streamed(self) -> list[TokenEvent]:
        """Return what was told of samples since the last call."""
        return [] if self.rows is None else self.rows.take_streamed()
