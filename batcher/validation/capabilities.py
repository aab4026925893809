"""What requests are checked against: what a model and a batch can decode."""

from collections.abc import Callable
from typing import Any

from msgspec import Struct

from batcher.request import MAX_INT, ConstraintField


class ModelCapabilities(Struct, frozen=True):
    """What a model and a batch can decode, as far as they are known.

    vocab_size: one more than the largest token id the model knows, None if it takes any.
    num_slots: of the batch, None if that is not known.
    gives_logits: whether the model does; scores_prompts: those after every token of a prompt, too.
    has_eos: whether the model has an end-of-sequence token.
    check_constraint: compiles a constraint, given the field and its value; raises GrammarError if
    that is wrong, and another BatchdecodeError where nothing can be compiled.  None if constraints
    are not to be compiled.
    """

    vocab_size: int | None = None
    num_slots: int | None = None
    gives_logits: bool = True
    scores_prompts: bool = True
    has_eos: bool = True
    check_constraint: Callable[[ConstraintField, object], None] | None = None
    chat_template: Callable[[list[dict[str, str]]], Any] | None = None
    encode: Callable[[str], object] | None = None

    @property
    def largest_token(self) -> int:
        """The largest token id that may be named."""
        return MAX_INT if self.vocab_size is None else self.vocab_size - 1
