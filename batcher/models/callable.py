"""An adapter that makes a Model of any `model_next(batch_prefixes) -> next_tokens`."""

import reprlib
from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from operator import index as to_index
from typing import Any

import numpy as np

from batcher.errors import ModelError, describe
from batcher.models.base import Batch, ModelOutput, Tokenizer
from batcher.request import MAX_INT

ModelNext = Callable[[list[list[int]]], Iterable[int]]


class ByteTokenizer:
    """Ids 0 to 255 are the bytes of UTF-8; larger ids show as U+FFFD."""

    def __init__(self) -> None:
        self.token_bytes: Sequence[bytes] = [bytes([byte]) for byte in range(256)]

    def encode(self, text: str) -> list[int]:
        """Return the bytes of `text`."""
        return list(text.encode())


class CallableModel:
    """A Model (see base.py) that calls `model_next` once a step with the whole prefix of every row.

    model_next: gets a list of token-id lists, prompt and output so far, in slot order, which it may
    keep or change; returns one token id for each.  Attributes `vocab_size`, `eos_token_id`,
    `tokenizer` and `settings` of the callable are used if it has them; otherwise any id is legal,
    nothing is EOS, and text is bytes.
    """

    def __init__(self, model_next: ModelNext, name: str | None = None) -> None:
        self.name = name or str(getattr(model_next, "__qualname__", type(model_next).__qualname__))
        self.settings: dict[str, Any] = getattr(model_next, "settings", {})
        self.vocab_size: int | None = getattr(model_next, "vocab_size", None)
        self.eos_token_id: int | None = getattr(model_next, "eos_token_id", None)
        self.tokenizer: Tokenizer = getattr(model_next, "tokenizer", None) or ByteTokenizer()
        self._model_next = model_next
        self._prefixes: dict[int, list[int]] = {}  # slot -> its tokens
        self._num_slots = 0

    def allocate(self, num_slots: int) -> None:
        """Make room for `num_slots` rows."""
        self._prefixes.clear()
        self._num_slots = num_slots

    def release(self, slot: int) -> None:
        """Forget the row in `slot`."""
        del self._prefixes[slot]

    def forward(self, batch: Batch) -> ModelOutput:
        """Ask the callable for every row's next token.

        Raises:
            ModelError: it raised, or did not return one value for each row.
        """
        slots = batch.slots.tolist()
        self._extend_prefixes(batch, slots)
        answers = self._ask(slots)
        tokens = np.zeros(self._num_slots, np.int64)
        failed = {}
        for slot, answer in zip(slots, answers, strict=True):
            problem = self._problem_with(answer)
            if problem is None:
                tokens[slot] = answer
            else:
                failed[slot] = f"{self.name} returned {problem}"
        return ModelOutput(tokens, failed)

    def _extend_prefixes(self, batch: Batch, slots: list[int]) -> None:
        new_tokens = {
            slot: [token] for slot, token in zip(slots, batch.tokens[slots].tolist(), strict=True)
        }
        for chunk in batch.chunks:
            new_tokens[chunk.slot] = chunk.token_ids
            if chunk.start == 0:
                self._prefixes[chunk.slot] = []
        for slot, token_ids in new_tokens.items():
            self._prefixes[slot] += token_ids

    def _ask(self, slots: list[int]) -> list[Any]:
        prefixes = [self._prefixes[slot].copy() for slot in slots]  # the callable may change them
        try:
            answer = self._model_next(prefixes)
            answers = list(islice(answer, len(slots) + 1)) if isinstance(answer, Iterable) else None
        except (Exception, SystemExit) as error:  # whatever a user's code raises is its failure
            raise ModelError(f"{self.name} raised {describe(error)}") from error
        if answers is None or len(answers) != len(slots):
            raise ModelError(f"{self.name} returned {_count(answers, answer, len(slots))}")
        return answers

    def _problem_with(self, answer: Any) -> str | None:
        """Return what `answer` is instead of a token id; None if it is one."""
        largest = MAX_INT if self.vocab_size is None else self.vocab_size - 1
        try:
            token_id = -1 if isinstance(answer, bool) else to_index(answer)
        except Exception:  # noqa: BLE001 - whatever its own __index__ raises, it is none
            token_id = -1
        if 0 <= token_id <= largest:
            return None
        return f"{_shown(answer)}, which is not a token id, an integer from 0 to {largest}"


def _count(answers: list[Any] | None, answer: Any, num_rows: int) -> str:
    """Return what came back instead of `num_rows` tokens."""
    if answers is None:
        return f"{_shown(answer)}, not a token for each of {num_rows} sequences"
    count = len(answers) if len(answers) < num_rows else f"more than {num_rows}"
    return f"{count} tokens for {num_rows} sequences"


def _shown(answer: Any) -> str:
    """Return a few words that tell what a callable gave, whatever it is."""
    is_huge = isinstance(answer, int) and abs(answer) > MAX_INT  # too long for repr
    return "a huge integer" if is_huge else reprlib.repr(answer)
