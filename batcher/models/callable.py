"""An adapter that makes a Model of any `model_next(batch_prefixes) -> next_tokens`."""

from collections.abc import Callable, Iterable
from itertools import islice
from typing import Any

import numpy as np

from batcher.errors import Failure, ModelError, describe
from batcher.foreign import attribute_of, child_ends_here, note_raised, raised
from batcher.models.answers import read_logits, read_token_id, shown
from batcher.models.base import Batch, ModelOutput
from batcher.models.prefixes import PrefixModel, extend

ModelNext = Callable[[list[list[int]]], Iterable[Any]]


class CallableModel(PrefixModel):
    """A Model (see base.py) that calls `model_next` once a step with the whole prefix of every row.

    model_next: gets a list of token-id lists, prompt and output so far, in slot order, which it may
    keep or change; returns one token id for each or, if its attribute `gives` is "logits", the
    logits [vocab] of each.  Attributes `vocab_size` (which one that gives logits must have),
    `eos_token_id`, `tokenizer` and `settings` of the callable are used if it has them; otherwise
    any id is legal, nothing is EOS, and text is bytes.
    """

    KINDS = ("tokens", "logits")  # of what it may say that it gives

    def __init__(self, model_next: ModelNext, name: str | None = None) -> None:
        super().__init__(
            model_next,
            name or str(getattr(model_next, "__qualname__", type(model_next).__qualname__)),
        )
        self.gives = attribute_of(model_next, "gives", "tokens")
        self.vocab_size = attribute_of(model_next, "vocab_size", None)
        self.eos_token_id = attribute_of(model_next, "eos_token_id", None)
        self._model_next = model_next

    def forward(self, batch: Batch) -> ModelOutput:
        """Ask the callable for every row's next token, or logits.

        Raises:
            ModelError: it raised, or did not return one value for each row.
        """
        extend(self._prefixes, batch)
        slots = batch.slots.tolist()
        if not slots:  # parts of prompts alone
            return ModelOutput(np.zeros(self._num_slots, np.int64))
        answers = self._ask([self._prefixes[slot].copy() for slot in slots])
        has_logits = self.gives == "logits"  # the engine wants those of every row then
        tokens = np.zeros(self._num_slots, np.int64)
        logits = np.zeros((len(slots), self.vocab_size or 0), np.float32) if has_logits else None
        failed: dict[int, str | Failure] = {}
        for row, (slot, answer) in enumerate(zip(slots, answers, strict=True)):
            try:
                if logits is None:
                    tokens[slot] = read_token_id(self.vocab_size, answer)
                else:
                    logits[row] = read_logits(self.vocab_size, answer)
            except ValueError as error:
                failed[slot] = f"{self.name} returned {error}"
        return ModelOutput(tokens, failed, logits)

    def _ask(self, prefixes: list[list[int]]) -> list[Any]:
        """Return what the callable answers for each of `prefixes`; raises what `forward` does."""
        num_rows = len(prefixes)  # the callable may change the list
        try:
            with child_ends_here():
                answer = self._model_next(prefixes)
                is_list = isinstance(answer, Iterable)
                answers = list(islice(answer, num_rows + 1)) if is_list else None
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # whatever a user's code raises is its failure
            note_raised(raised(error))
            raise ModelError(f"{self.name} raised {describe(error)}") from error
        if answers is None:
            instead = f"{shown(answer)}, not a token for each of {num_rows} sequences"
            raise ModelError(f"{self.name} returned {instead}")
        if len(answers) != num_rows:
            count = len(answers) if len(answers) < num_rows else f"more than {num_rows}"
            raise ModelError(f"{self.name} returned {count} tokens for {num_rows} sequences")
        return answers
