"""What a model's vocabulary makes of constraints and of prompts to be healed, when it is needed."""

from functools import cached_property

from batcher.decoding.constraints import (
    CompiledConstraint,
    ConstraintCompiler,
    constraint_source,
    stated_source,
)
from batcher.decoding.healing import VocabularyIndex, heal
from batcher.models.base import Model
from batcher.request import ConstraintField, Request
from batcher.tokens import Tokens


class Grammars:
    """Compiles constraints, and knows which tokens begin with which bytes.

    timeout: seconds of processor time for a constraint.
    """

    def __init__(self, model: Model, timeout: float) -> None:
        self._model, self._timeout = model, timeout
        self._num_rows = 0  # that were given a constraint

    @property
    def counts(self) -> tuple[int, int]:
        """How many constraints were compiled, and for how many rows one was there already."""
        num_compiled = self._compiler.num_misses
        return num_compiled, max(0, self._num_rows - num_compiled)

    @cached_property
    def vocabulary(self) -> VocabularyIndex:
        """The tokens by their bytes."""
        model = self._model
        token_bytes = model.tokenizer.token_bytes
        return VocabularyIndex(
            token_bytes, model.vocab_size or len(token_bytes), model.eos_token_id
        )

    @cached_property
    def _compiler(self) -> ConstraintCompiler:
        model = self._model
        return ConstraintCompiler(
            model.tokenizer, model.vocab_size or 0, model.eos_token_id, self._timeout
        )

    def check(self, field: ConstraintField, value: object) -> None:
        """Make sure that the constraint which `field` of a request states can be compiled.

        Raises:
            GrammarError, MissingGrammarError: it cannot.
        """
        self._compiler.compile(stated_source(field, value))

    def of_row(self, request: Request) -> CompiledConstraint | None:
        """Return the constraint of a row of `request`, None if it has none.

        Raises:
            GrammarError, MissingGrammarError: it cannot be compiled.
        """
        source = constraint_source(request)
        if source is None:
            return None
        self._num_rows += 1
        return self._compiler.compile(source)

    def heal(self, prompt_tokens: Tokens) -> tuple[list[int], bytes]:
        """Return what the model is to read of a prompt, and the bytes to be generated anew."""
        return heal(prompt_tokens, self.vocabulary)
