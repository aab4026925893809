"""Logs of real step times, and traces of them: what each step computed and how long it took."""

from array import array
from collections.abc import Iterable
from operator import add
from typing import Annotated, Any

import msgspec
import numpy as np
from msgspec import Meta, Struct

from batcher.errors import BatchdecodeError
from batcher.events import StepsEvent

Positive = Annotated[int, Meta(ge=1, le=2**40)]
NotNegative = Annotated[int, Meta(ge=0, le=2**53)]  # as far as floats are exact

TRACED_STEPS = b'"event":"steps"'
_FIELDS = "num_tokens, num_sequences, kv_read, seconds, prefill_work or chunks, and maybe time"
_NUM_COLUMNS = 5


class StepLine(Struct, frozen=True, forbid_unknown_fields=True):
    """A line of a log: one step; see StepTime for the first four.

    chunks: [context, tokens] of each prompt that was computed, in place of prefill_work.
    seconds: how long it took.  time: when it began.
    """

    num_tokens: Positive
    num_sequences: Positive
    kv_read: NotNegative
    seconds: Annotated[float, Meta(gt=0, le=1e6)]
    prefill_work: NotNegative | None = None
    chunks: list[tuple[NotNegative, Positive]] | None = None
    time: float | None = None

    @property
    def work(self) -> int:
        """The prefill_work, given or counted."""
        if self.chunks is None:
            return self.prefill_work or 0
        return sum(tokens * (2 * context + tokens) for context, tokens in self.chunks)


class StepLog(Struct, frozen=True):
    """Steps as columns [steps] float64: what they computed, and how long they took."""

    num_tokens: Any
    num_sequences: Any
    kv_read: Any
    prefill_work: Any
    seconds: Any

    @property
    def num_steps(self) -> int:
        """How many there are."""
        return len(self.seconds)

    def part(self, chosen: Any) -> "StepLog":
        """Return the steps that a slice, or a mask [steps] bool, chooses."""
        return StepLog(*(getattr(self, name)[chosen] for name in self.__struct_fields__))


def read_step_log(lines: Iterable[tuple[int, bytes]], name: str) -> StepLog:
    """Return the steps of a log, given as (line number, line); `name` is that of the file.

    Raises:
        BatchdecodeError: a line is no step, contradicts itself, or begins before the one above it.
    """
    decoder = msgspec.json.Decoder(StepLine)
    values = array("d")
    last = float("-inf")
    for number, text in lines:
        try:
            line = decoder.decode(text)
        except (ValueError, RecursionError) as error:  # the other: nested too deeply
            said = str(error).replace(" - at `$.", " at `")
            if not said.startswith("JSON"):
                said = said[:1].lower() + said[1:]
            raise BatchdecodeError(f"{name}:{number}: {said}; fields: {_FIELDS}") from None
        if fault := _contradiction(line, last):
            raise BatchdecodeError(f"{name}:{number}: {fault}")
        last = last if line.time is None else line.time
        values.extend((line.num_tokens, line.num_sequences, line.kv_read, line.work, line.seconds))
    table = np.frombuffer(values).reshape(-1, _NUM_COLUMNS) if values else np.empty((0, 5))
    return StepLog(*np.ascontiguousarray(table.T))


def read_traced_steps(lines: Iterable[tuple[int, bytes]], name: str) -> StepLog:
    """Return the steps of a trace, of a run with times on the wall; as `read_step_log`.

    Raises:
        BatchdecodeError: a line is damaged, or the trace does not tell how long steps took.
    """
    decoder = msgspec.json.Decoder(StepsEvent)
    table: list[tuple[float, ...]] = []
    for number, text in lines:
        if TRACED_STEPS not in text:
            continue
        try:
            told = decoder.decode(text)
        except (ValueError, RecursionError) as error:  # the other: nested too deeply
            raise BatchdecodeError(f"{name}:{number}: no line of a trace: {error}") from None
        if told.seconds is None or told.kv_read is None or told.prefill_work is None:
            raise BatchdecodeError(
                f"{name}:{number}: its steps were not timed; that takes a run with --profile wall"
            )
        columns = told.rows, told.kv_read, told.prefill_work, told.seconds
        tokens = map(add, told.decodes, told.prefills)
        try:
            steps = [*zip(tokens, *columns, strict=True)]
        except ValueError:
            raise BatchdecodeError(f"{name}:{number}: lists of steps differ in length") from None
        table += [step for step in steps if step[0] > 0 and step[-1] > 0]  # what computed anything
    if not table:
        raise BatchdecodeError(
            f"{name}: no steps; a run with --profile wall and --trace tells them"
        )
    return StepLog(*np.array(table, np.float64).T.copy())


def _contradiction(line: StepLine, last: float) -> str | None:
    """Return what is wrong with a line whose values are each allowed; None if nothing is."""
    if (line.prefill_work is None) == (line.chunks is None):
        return "one of prefill_work and chunks is needed, and only one"
    if line.time is not None and line.time < last:
        return f"time goes back from {last:g} to {line.time:g}"
    if line.num_sequences > line.num_tokens:
        return (
            f"num_sequences {line.num_sequences} with num_tokens {line.num_tokens}: "
            "each sequence computes a token at least"
        )
    if line.num_tokens > line.num_sequences and not line.work:
        return (
            f"num_tokens {line.num_tokens} of {line.num_sequences} sequences, but no prompt: "
            "a sequence that decodes computes one token"
        )
    if line.chunks is not None and sum(tokens for _, tokens in line.chunks) > line.num_tokens:
        return f"chunks have more than the {line.num_tokens} of num_tokens"
    return None
