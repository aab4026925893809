"""What a request needs of the model and the batch, and whether they have it."""

from collections.abc import Callable, Iterator
from typing import Any, Literal, get_args

from msgspec import Struct
from msgspec.structs import replace

from batcher.errors import (
    BatchdecodeError,
    EncodingError,
    FieldProblem,
    GrammarError,
    Path,
    not_encoded,
)
from batcher.request import PromptSegment, Request

ConstraintField = Literal["json_schema", "regex", "choice", "lark", "gbnf"]
CONSTRAINT_FIELDS: tuple[ConstraintField, ...] = get_args(ConstraintField)

# Each field that a model which gives only tokens cannot serve, and the values that ask for nothing.
# The cuts (top_k and the like) are not here: without a temperature they change nothing.
LOGIT_FIELDS: dict[str, tuple[object, ...]] = {
    "temperature": (0,),
    "repetition_penalty": (1,),
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "logit_bias": (None, {}),
    "allowed_token_ids": (None,),
    "bad_words": (None, []),
    "min_tokens": (0,),
    "cfg_scale": (1,),
    "logprobs": (None,),
    "num_beams": (1,),
    **dict.fromkeys(CONSTRAINT_FIELDS, (None,)),
    "heal": (False,),
}


class ModelCapabilities(Struct, frozen=True):
    """What requests are checked against: a model and a batch, as far as they are known.

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

    def can_encode(self, prompt: object) -> bool:
        """Return whether a prompt, if it is a text, can be encoded."""
        if self.encode is None or not isinstance(prompt, str):
            return True
        try:
            self.encode(prompt)
        except EncodingError:
            return False
        return True


def num_slots_needed(request: Request) -> int:
    """Return how many slots one admission of `request` takes.

    Those are its beams, or a sample and the negative prompt beside it; samples are admitted one by
    one.
    """
    if request.num_beams > 1:
        return request.num_beams
    return 1 if request.cfg_scale == 1 else 2


def logit_fields_of(request: Request) -> list[str]:
    """Return the fields of a valid `request` that need logits; [] if tokens will do."""
    return [name for name, idle in LOGIT_FIELDS.items() if getattr(request, name) not in idle]


def constraint_fields_of(request: Request) -> list[ConstraintField]:
    """Return the fields of `request` that state a constraint; a valid one has one at the most."""
    return [name for name in CONSTRAINT_FIELDS if getattr(request, name) is not None]


def find_unserved(request: Request, capabilities: ModelCapabilities) -> Iterator[FieldProblem]:
    """Yield what the valid `request` asks for and `capabilities` cannot give."""
    if not capabilities.gives_logits:
        for name in logit_fields_of(request):
            message = f"`{name}` needs a model that gives logits; this one gives only tokens"
            yield FieldProblem("unsupported-model", (name,), message)
    if request.prompt_logprobs is not None and not capabilities.scores_prompts:
        message = (
            "`prompt_logprobs` needs a model that gives the logits after every token of a prompt; "
            "this one gives only those after the last"
        )
        hint = "leave it out, and in rows of completions `echo` or `logprobs`"
        yield FieldProblem("unsupported-model", ("prompt_logprobs",), message, hint)
    needed = num_slots_needed(request)
    if capabilities.num_slots is not None and needed > capabilities.num_slots:
        name = "num_beams" if request.num_beams > 1 else "cfg_scale"
        message = (
            f"`{name}` {getattr(request, name)} needs {needed} slots at once, "
            f"and the batch has {capabilities.num_slots}"
        )
        yield FieldProblem("too-few-slots", (name,), message, f"use a batch of {needed} or more")
    for field in constraint_fields_of(request):
        yield from _find_uncompiled(field, getattr(request, field), capabilities)
    if capabilities.encode is not None:
        for path, text in _texts_of(request):
            try:
                capabilities.encode(text)
            except EncodingError as error:
                yield not_encoded(path, error)


def _texts_of(request: Request) -> Iterator[tuple[Path, str]]:
    """Yield the texts that are to be encoded, each with its path."""
    for name in ("prompt", "negative_prompt"):
        prompt = getattr(request, name)
        if isinstance(prompt, str):
            yield (name,), prompt
        elif isinstance(prompt, list):
            for index, segment in enumerate(prompt):
                if isinstance(segment, PromptSegment) and segment.text is not None:
                    yield (name, index, "text"), segment.text


def _find_uncompiled(
    name: ConstraintField, constraint: object, capabilities: ModelCapabilities
) -> Iterator[FieldProblem]:
    if not capabilities.has_eos:
        message = f"`{name}` needs a model that has an end-of-sequence token; this one has none"
        yield FieldProblem("unsupported-model", (name,), message)
    elif capabilities.check_constraint is not None:
        try:
            capabilities.check_constraint(name, constraint)
        except GrammarError as error:
            problem = FieldProblem("invalid-grammar", error.path, "")
            yield replace(problem, message=f"`{problem.field}`: {error}")
        except BatchdecodeError as error:
            yield FieldProblem("unsupported-model", (name,), f"`{name}`: {error}")
