"""What a model's vocabulary makes of constraints and of prompts to be healed, when it is needed."""

from functools import cached_property

from msgspec.structs import replace

from batcher.decoding.constraints import (
    CompiledConstraint,
    ConstraintCompiler,
    constraint_source,
)
from batcher.decoding.healing import VocabularyIndex, heal
from batcher.models.base import Model
from batcher.request import Request

_NO_REQUEST = Request(prompt="")


class Grammars:
    """Compiles constraints, and knows which tokens begin with which bytes."""

    def __init__(self, model: Model) -> None:
        self._model = model

    @property
    def counts(self) -> tuple[int, int]:
        """How many constraints were compiled, and how often one was there already."""
        return self._compiler.num_misses, self._compiler.num_hits

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
        return ConstraintCompiler(model.tokenizer, model.vocab_size or 0, model.eos_token_id)

    def check(self, field: str, value: object) -> None:
        """Make sure that the constraint which `field` of a request states can be compiled.

        Raises:
            GrammarError, MissingGrammarError: it cannot.
        """
        self.compile(replace(_NO_REQUEST, **{field: value}))

    def compile(self, request: Request) -> CompiledConstraint | None:
        """Return the constraint of a request, None if it has none.

        Raises:
            GrammarError, MissingGrammarError: it cannot be compiled.
        """
        source = constraint_source(request)
        return None if source is None else self._compiler.compile(source)

    def heal(self, prompt_tokens: list[int]) -> tuple[list[int], bytes]:
        """Return what the model is to read of a prompt, and the bytes to be generated anew."""
        return heal(prompt_tokens, self.vocabulary)
