"""The decoding side of every row: which tokens it is given, and when its output has ended.

Rows that ask for nothing but the model's own tokens until a stop take the fast path: nothing is
done for any of them in a step.  What a row may ask for beside that is in row_decoder.py.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from batcher.decoding.grammars import Grammars
from batcher.decoding.output_tokens import OutputTokens
from batcher.decoding.stops.matcher import StopMatcher
from batcher.engine.decoded import (
    NOTHING_DECODED,
    Decoded,
    Generated,
    SuspendedRow,
    SuspendedRows,
    as_failure,
)
from batcher.errors import Failure
from batcher.events import TokenEvent
from batcher.models.base import NO_SLOTS, IntArray, Model, ModelOutput
from batcher.result import FinishReason
from batcher.sequence import Sequence

if TYPE_CHECKING:
    from batcher.engine.row_decoder import RowDecoder


class Decoder:
    """The tokens of all rows, and their stops.

    is_streaming: whether the text of each sample is told as it comes.
    grammars: what constraints and healed prompts come to with this model.
    """

    def __init__(self, model: Model, num_slots: int, *, is_streaming: bool) -> None:
        self.grammars = Grammars(model)
        self._model, self._num_slots, self._is_streaming = model, num_slots, is_streaming
        self._tokens = OutputTokens(num_slots)
        self._stops = StopMatcher(num_slots, model.vocab_size, model.tokenizer)
        self._rows: RowDecoder | None = None
        if is_streaming or model.gives == "logits":
            self._rows = self._make_rows()

    def _make_rows(self) -> "RowDecoder":
        from batcher.engine.row_decoder import RowDecoder  # noqa: PLC0415 - plain rows start without

        return RowDecoder(
            self._model,
            self._num_slots,
            self.grammars,
            self._tokens,
            self._stops,
            is_streaming=self._is_streaming,
        )

    @property
    def logit_slots(self) -> IntArray:
        """[logit rows] the slots whose logits are needed, ascending."""
        return NO_SLOTS if self._rows is None else self._rows.logit_slots

    # -- a row comes and goes --------------------------------------------------------------------

    def open(self, leader: Sequence) -> list[int]:
        """Begin the row of `leader`, or its first beam; return the tokens it has from the outset.

        Those are what its constraint allows nothing beside.
        """
        rows = self._rows
        if not leader.is_plain:
            rows = self._rows = rows or self._make_rows()
        elif rows is None or not rows.takes_plain:
            self._tokens.open(leader.slot)
            self._stops.open(leader.slot, leader.automaton)
            return []
        return rows.open(leader)

    def close(self, slot: int, num_tokens: int, reason: FinishReason) -> Generated:
        """Return the first `num_tokens` tokens of the row in `slot`, and forget the row."""
        if self._rows is not None and self._rows.is_busy:
            return self._rows.close(slot, num_tokens, reason)
        self._stops.close(slot)
        return Generated(self._tokens.close(slot, num_tokens), reason)

    def close_beams(self, slot: int, reason: FinishReason) -> list[Generated]:
        """Return the best beams of the request whose leader is in `slot`, and forget its rows."""
        rows = self._rows = self._rows or self._make_rows()
        return rows.close_beams(slot, reason)

    def read(self, slot: int, start: int, stop: int) -> list[int]:
        """Return tokens number `start` to `stop`, exclusive, of those the row in `slot` has."""
        if self._rows is not None and self._rows.is_busy:
            return self._rows.read(slot, start, stop)
        return self._tokens.read(slot, start, stop)

    # -- a row is out of the batch for a while ---------------------------------------------------

    def suspend(self, leader: Sequence, num_tokens: int) -> SuspendedRows:
        """Take the rows of `leader` out of their slots, to be resumed in others, or closed.

        num_tokens: how many of the row's tokens are its output; beams know that themselves.
        """
        if self._rows is not None and self._rows.is_busy:
            return self._rows.suspend(leader, num_tokens)
        tokens = self._tokens.close(leader.slot, num_tokens)
        return SuspendedRows([tokens], [SuspendedRow(self._stops.suspend(leader.slot))])

    def resume(self, leader: Sequence, suspended: SuspendedRows) -> None:
        """Let suspended rows go on in the slots that `leader` and its companions have by now."""
        if self._rows is not None:
            self._rows.resume(leader, suspended)
        else:
            self._tokens.resume(leader.slot, suspended.tokens[0])
            self._stops.resume(leader.slot, suspended.rows[0].place)

    def close_suspended(self, suspended: SuspendedRows, reason: FinishReason) -> list[Generated]:
        """Return what suspended rows had generated: the row's output, or those of its beams."""
        if self._rows is not None:
            return self._rows.close_suspended(suspended, reason)
        return [Generated(suspended.tokens[0], reason)]

    # -- a step ----------------------------------------------------------------------------------

    def decode(self, output: ModelOutput, step: int) -> Decoded:
        """Take in what the model gave in `step`; writes the tokens that were chosen into it."""
        if self._rows is not None and self._rows.is_busy:
            return self._rows.decode(output, step)
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
        if self._rows is not None:
            return self._rows.failures(failed)
        return {slot: as_failure(why) for slot, why in failed.items()}

    def take_streamed(self) -> list[TokenEvent]:
        """Return what was told of samples since the last call."""
        return [] if self._rows is None else self._rows.take_streamed()
