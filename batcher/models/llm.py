"""An adapter that makes a Model of an object that gives the logits after one list of tokens.

The object is asked once a row and step, with the whole prefix; all rows of a step at once.
"""

from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any, Literal, Protocol, TypeVar

import numpy as np

from batcher.errors import BatchdecodeError, Failure
from batcher.foreign import attribute_of, note_raised
from batcher.models.answers import read_logits, read_token_id
from batcher.models.base import Batch, FloatArray, ModelOutput
from batcher.models.calling import Calls
from batcher.models.calls import CallFailure, CallSettings, checked_settings
from batcher.models.prefixes import PrefixModel, extend

T = TypeVar("T")


class LLM(Protocol):
    """What people bring; either method may be `async`, and may be called from several threads.

    Attributes `vocab_size`, `tokenizer` and `settings` are used if it has them.
    """

    def next_token_logits(
        self, prev_token_ids: list[int]
    ) -> Sequence[float] | Awaitable[Sequence[float]]:
        """Return the logits [vocab] of the token after `prev_token_ids`, which may be changed."""

    def get_stop_token_id(self) -> int | Awaitable[int]:
        """Return the token that ends a text."""


class LLMModel(PrefixModel):
    """A Model (see base.py) that asks `llm` for the logits of every row.

    A row whose call has failed for good fails alone.  The stop token is EOS.  It is asked for here,
    and so are, if `llm` does not say its `vocab_size`, the logits after `probe`, to count them;
    without a `probe` those after the stop token alone, until two answers agree.  The first step
    does not ask for these again.

    calls: how it is called.

    Raises:
        BatchdecodeError: no answer to these could be had, or a setting is out of its range.
    """

    gives: Literal["logits"] = "logits"
    eos_token_id: int

    def __init__(
        self,
        llm: LLM,
        name: str | None = None,
        call_settings: CallSettings | None = None,
        probe: Sequence[int] | None = None,
    ) -> None:
        call_settings = checked_settings(call_settings)
        super().__init__(llm, name or type(llm).__qualname__)
        self._llm, self.calls = llm, Calls(call_settings)
        read_eos = partial(read_token_id, None)
        [self.eos_token_id] = self._ask_all("get_stop_token_id", [[]], read_eos)
        self.vocab_size = attribute_of(llm, "vocab_size", None)
        # a prefix, and the logits after it
        self._probed: tuple[list[int], FloatArray] | None = None
        if self.vocab_size is None:
            prefix, num_needed = ([self.eos_token_id], 2) if probe is None else ([*probe], 1)
            self._probed = prefix, self._probe(prefix, num_needed)
            self.vocab_size = self._probed[1].size

    def forward(self, batch: Batch) -> ModelOutput:
        """Return the logits of `batch.logit_slots`, those of rows that failed 0."""
        extend(self._prefixes, batch)
        logit_slots = batch.logit_slots.tolist()
        prefixes = [self._prefixes[slot].copy() for slot in logit_slots]
        answers = self._ask(prefixes) if prefixes else []  # parts of prompts alone ask for nothing
        logits = np.zeros((len(logit_slots), self.vocab_size or 0), np.float32)
        failed: dict[int, str | Failure] = {}
        for row, (slot, answer) in enumerate(zip(logit_slots, answers, strict=True)):
            if isinstance(answer, CallFailure):
                failed[slot] = Failure(answer.code, f"{self.name} {answer}")
                if answer.raised is not None:
                    note_raised(answer.raised)
            else:
                logits[row] = answer
        return ModelOutput(np.zeros(self._num_slots, np.int64), failed, logits)

    def _ask(self, prefixes: list[list[int]]) -> list[FloatArray | CallFailure]:
        """Return the logits after each of `prefixes`, or why there are none."""
        probed, self._probed = self._probed, None
        if probed is None:
            return self._call(prefixes)
        known, logits = probed
        answers = iter(self._call([prefix for prefix in prefixes if prefix != known]))
        return [logits if prefix == known else next(answers) for prefix in prefixes]

    def _call(self, prefixes: list[list[int]]) -> list[FloatArray | CallFailure]:
        function, read = self._llm.next_token_logits, partial(read_logits, self.vocab_size)
        return self.calls.run(function, [[prefix] for prefix in prefixes], read)

    def _probe(self, prefix: list[int], num_needed: int) -> FloatArray:
        """Return the logits after `prefix` once `num_needed` answers have as many of them.

        Raises:
            BatchdecodeError: there are none.
        """

        def read(answer: Any) -> FloatArray:
            logits, eos = read_logits(None, answer), self.eos_token_id
            if logits.size <= eos:
                raise ValueError(f"{logits.size} logits, too few for its stop token {eos}")
            return logits

        found = self._ask_all("next_token_logits", [[prefix]] * num_needed, read)
        for _ in range(self.calls.settings.max_attempts):
            sizes = [logits.size for logits in found]
            size = max(sizes, key=sizes.count)
            if sizes.count(size) >= num_needed:
                return found[sizes.index(size)]
            found += self._ask_all("next_token_logits", [[prefix]], read)
        numbers = ", ".join(map(str, sizes))
        message = f"next_token_logits returned another number of logits each time: {numbers}"
        raise BatchdecodeError(f"{self.name}: {message}")

    def _ask_all(
        self, method: str, arguments: list[list[Any]], read: Callable[[Any], T]
    ) -> list[T]:
        """Return what a method answers to each of `arguments`, or raise a BatchdecodeError."""
        found: list[T] = []
        for answer in self.calls.run(getattr(self._llm, method), arguments, read):
            if isinstance(answer, CallFailure):
                raise answer.fatal(f"{self.name}: {method}")
            found.append(answer)
        return found
