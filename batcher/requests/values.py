"""The checks of single values and of prompts, and how a message shows a value.

Rule: a check works on any value whatever, because a Request built by hand may hold anything.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, cast

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from batcher.errors import FieldProblem, Path
from batcher.fields import Range, expected_of, fields_of, range_of
from batcher.request import (
    MAX_INT,
    MAX_SEGMENTS_LENGTH,
    REQUEST_FIELDS,
    Bias,
    ConstraintField,
    PromptSegment,
    Transition,
)

MAX_SHOWN = 40  # characters of a value or a name that a message quotes
MAX_BAD_WORDS_LENGTH = 1024  # all of one request together, in UTF-8 bytes
HUGE = 10**MAX_SHOWN

_LOGIT_BIAS = cast(Range, range_of(Bias))


class ModelCapabilities(Struct, frozen=True):
    """What a model and a batch can decode, as far as they are known.

    vocab_size: one more than the largest token id the model knows, None if it takes any.
    num_slots: of the batch, None if that is not known.
    gives_logits: whether the model does; scores_prompts: those after every token of a prompt, too.
    has_eos: whether the model has an end-of-sequence token.
    check_constraint: compiles a constraint, given the field and its value; raises GrammarError if
    that is wrong, and another BatchdecodeError where nothing can be compiled.  None if constraints
    are not to be compiled.
    encode_with_special: encodes a text in which special tokens are special, with what stands
    before every text; None if the model's tokenizer cannot.
    takes_chats: whether a text is what a user says, of which the chat template makes the prompt.
    defaults: of fields that a row does not give; they go before those of the fields.
    served: the fields that a server is sent, or that need no sending; None of a model.
    models: those of which each request has to name one.
    """

    vocab_size: int | None = None
    num_slots: int | None = None
    gives_logits: bool = True
    scores_prompts: bool = True
    has_eos: bool = True
    check_constraint: Callable[[ConstraintField, object], None] | None = None
    chat_template: Callable[..., Any] | None = None
    encode_with_special: Callable[[str], list[int]] | None = None
    takes_chats: bool = False
    defaults: Mapping[str, Any] = {}
    encode: Callable[[str], object] | None = None
    served: frozenset[str] | None = None
    models: tuple[str, ...] = ()

    @property
    def largest_token(self) -> int:
        """The largest token id that may be named."""
        return MAX_INT if self.vocab_size is None else self.vocab_size - 1


_INTEGER = re.compile(r"-?(0|[1-9][0-9]*)")
_NUMBER = re.compile(rf"{_INTEGER.pattern}(\.[0-9]+)?([eE][-+]?[0-9]+)?")

Problems = Iterator[FieldProblem]
Check = Callable[[Any, Path, ModelCapabilities], Problems]


def show(value: object) -> str:
    """Return `value` as a message quotes it: JSON where that is short, else its kind."""
    if isinstance(value, str):
        return f'"{cut(value)}"'
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, int):
        return str(value) if abs(value) < HUGE else "a huge integer"
    if isinstance(value, float):
        return repr(float(value))
    if isinstance(value, dict | PromptSegment | Transition):
        return "an object"
    return "a list" if isinstance(value, list) else f"a {type(value).__name__}"


def cut(text: str) -> str:
    """Return `text`, or its beginning if it is too long for a message."""
    return text if len(text) <= MAX_SHOWN else text[:MAX_SHOWN] + "…"


def quote(path: Path) -> str:
    """Return the field at `path` as a message names it."""
    return f"`{FieldProblem('', path, '').field}`"


def wrong(code: str, path: Path, expected: str, value: object) -> FieldProblem:
    """Return the problem that `value` is not what is expected at `path`."""
    is_quoted = isinstance(value, str) and _would_be(expected, value)
    hint = "remove the quotes" if is_quoted else None
    return FieldProblem(code, path, f"{quote(path)} must be {expected}, not {show(value)}", hint)


def _would_be(expected: str, text: str) -> bool:
    """Return whether `text` would be of the kind that is expected if it had no quotes."""
    if "number" in expected:
        return _NUMBER.fullmatch(text) is not None
    if "integer" in expected or "token id" in expected:
        return _INTEGER.fullmatch(text) is not None
    return "true or false" in expected and text in ("true", "false")


def misfit(record: type[Struct], given: Mapping[str, Any]) -> str | None:
    """Return what the first of the `given` values must be that a field of `record` cannot hold.

    None if there is none, or the fault lies inside a list or an object.
    """
    kinds = {field.name: field.type for field in msgspec.structs.fields(record)}
    for name, value in given.items():
        try:
            msgspec.convert(value, kinds.get(name, Any))
        except msgspec.ValidationError:
            if isinstance(value, list | dict):
                return None
            return f"{name} must be {expected_of(kinds[name])}, not {show(value)}"
    return None


def check_object(value: object, path: Path, _: ModelCapabilities) -> Problems:
    """Yield the problem of what is no object."""
    if value is not None and not isinstance(value, dict):
        yield wrong("invalid-type", path, "an object", value)


def check_choice(value: object, path: Path, choices: Sequence[object]) -> Problems:
    """Yield the problem of what is none of the `choices`."""
    *names, last = ["true or false"] if choices == [True, False] else map(show, choices)
    expected = f"{', '.join(names)} or {last}" if names else last
    if not isinstance(value, tuple(set(map(type, choices)))):
        yield wrong("invalid-type", path, expected, value)
    elif value not in choices:
        yield wrong("invalid-value", path, expected, value)


def check_string(value: object, path: Path, expected: str) -> Problems:
    """Yield the problem of what is no text."""
    if not isinstance(value, str):
        yield wrong("invalid-type", path, expected, value)
    elif not is_text(value):
        message = f"{quote(path)} holds a lone surrogate, which stands for no character"
        yield FieldProblem("invalid-text", path, message)


def check_strings(values: object, path: Path) -> Problems:
    """Yield the problems of what is no list of texts."""
    if not isinstance(values, list):
        yield wrong("invalid-type", path, "a list of strings", values)
        return
    for index, value in enumerate(values):
        yield from check_string(value, (*path, index), "a string")


def check_number(value: object, path: Path, allowed: Range) -> Problems:
    """Yield the problem of what is not a number of the range."""
    is_kind = is_integer(value) or (isinstance(value, float) and not allowed.is_integer)
    if not is_kind:
        yield wrong("invalid-type", path, allowed.expected, value)
    elif not allowed.holds(value):  # type: ignore[arg-type]  # known to be a number
        yield wrong("invalid-value", path, allowed.expected, value)


def check_text_or_tokens(
    value: object, path: Path, capabilities: ModelCapabilities, if_several: str
) -> Problems:
    """Yield the problems of what is neither text nor token ids.

    if_several: what helps whoever gives a list of texts or of lists.
    """
    if not isinstance(value, list):
        yield from check_string(value, path, "a string or a list of token ids")
        return
    are_several = all(isinstance(item, str | list) for item in value)
    for problem in check_token_ids(value, path, capabilities):
        is_bare = are_several and problem.hint is None
        yield replace(problem, hint=if_several) if is_bare else problem


def check_token_ids(values: list[Any], path: Path, capabilities: ModelCapabilities) -> Problems:
    """Yield the first bad token id of a list: where one is wrong, a thousand may be."""
    largest = capabilities.largest_token
    for index, value in enumerate(values):
        if not is_integer(value) or not 0 <= value <= largest:
            yield from check_token_id(value, (*path, index), capabilities)
            return


def check_token_id(value: object, path: Path, capabilities: ModelCapabilities) -> Problems:
    """Yield the problem of what is no token id of the model."""
    largest = capabilities.largest_token
    if not is_integer(value):
        yield wrong("invalid-type", path, "a token id, an integer", value)
    elif not 0 <= value <= largest:  # type: ignore[operator]  # known to be an int
        yield wrong("unknown-token", path, f"a token id from 0 to {largest}", value)


def is_integer(value: object) -> bool:
    """Return whether `value` is an int, which true and false are not here."""
    return isinstance(value, int) and not isinstance(value, bool)


def is_text(value: str) -> bool:
    """Return whether `value` can be written as UTF-8: lone surrogates cannot."""
    if value.isascii():
        return True
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def check_json_schema(value: object, path: Path, _: ModelCapabilities) -> Problems:
    """Yield the problem of what is no JSON Schema."""
    if not isinstance(value, dict | bool):
        yield wrong("invalid-type", path, "a JSON Schema: an object, true or false", value)
        return
    try:
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError, RecursionError):
        what = "no NaN, no Infinity, no endless nesting, and nothing but JSON's own kinds of values"
        yield FieldProblem("invalid-value", path, f"{quote(path)} must be JSON: {what}")


def check_texts_to_choose(value: object, path: Path, _: ModelCapabilities) -> Problems:
    """Yield the problems of what is no list of texts with at least one."""
    yield from check_strings(value, path)
    if isinstance(value, list) and not value:
        message = f"{quote(path)} is empty: there is nothing to choose from"
        yield FieldProblem("invalid-value", path, message)


def check_bad_words(words: object, path: Path, _: ModelCapabilities) -> Problems:
    """Yield the problems of what are no texts, or too long together."""
    problems = list(check_strings(words, path))
    yield from problems
    if problems or not isinstance(words, list):
        return
    for index, word in enumerate(words):
        if not word:
            message = f"{quote((*path, index))} is empty, so it would forbid everything"
            yield FieldProblem("invalid-value", (*path, index), message)
    total = sum(len(word.encode()) for word in words)
    if total > MAX_BAD_WORDS_LENGTH:
        message = f"{quote(path)} holds {total} bytes; at most {MAX_BAD_WORDS_LENGTH} are allowed"
        yield FieldProblem("invalid-value", path, message)


def check_allowed(value: object, path: Path, capabilities: ModelCapabilities) -> Problems:
    """Yield the problems of what is no list of token ids with at least one."""
    if not isinstance(value, list):
        yield wrong("invalid-type", path, "a list of token ids", value)
    elif not value:
        yield FieldProblem("invalid-value", path, f"{quote(path)} is empty: no token is allowed")
    else:
        yield from check_token_ids(value, path, capabilities)


def check_logit_bias(biases: object, path: Path, capabilities: ModelCapabilities) -> Problems:
    """Yield the problems of what is no object of token ids and numbers."""
    if not isinstance(biases, dict):
        yield wrong("invalid-type", path, "an object of token ids and numbers", biases)
        return
    largest = capabilities.largest_token
    for key in biases:
        if not _is_token_key(key, largest):
            is_short = isinstance(key, str) and len(key) <= MAX_SHOWN
            expected = f'must be token ids from "0" to "{largest}"'
            message = f"the names in {quote(path)} {expected}, not {show(key)}"
            place = (*path, key) if is_short else path
            hint = None if isinstance(key, str) else "write each id once, as a string"
            yield FieldProblem("unknown-token", place, message, hint, is_key=is_short)
            return
    for key, bias in biases.items():
        yield from check_number(bias, (*path, key), _LOGIT_BIAS)


def _is_token_key(key: object, largest: int) -> bool:
    """Return whether `key` is a token id as a string, written in the one way there is."""
    if not isinstance(key, str) or not key.isascii() or not key.isdigit():
        return False
    return len(key) <= len(str(largest)) and str(int(key)) == key and int(key) <= largest


# -- prompts ---------------------------------------------------------------------------------------

_SEGMENT = fields_of(PromptSegment)
_SEGMENT_LENGTH = cast(Range, _SEGMENT["length"].range)
_SEED = cast(Range, REQUEST_FIELDS["seed"].range)

_CONTENTS = ("text", "tokens", "length")
_ONE_OF_THEM = "give one of `text`, `tokens` and `length`"
_IF_SEVERAL = "each prompt is a request of its own"
_DO_NOT_MIX = "a list holds token ids or segments; do not mix them"


def check_prompt(value: object, path: Path, capabilities: ModelCapabilities) -> Problems:
    """Yield the problems of what is neither text nor token ids nor segments."""
    if not isinstance(value, list) or not any(isinstance(item, PromptSegment) for item in value):
        yield from check_text_or_tokens(value, path, capabilities, _IF_SEVERAL)
    elif is_integer(value[0]):
        for problem in check_token_ids(value, path, capabilities):
            yield replace(problem, hint=_DO_NOT_MIX)
    else:
        yield from _check_segments(value, path, capabilities)


def check_negative_prompt(value: object, path: Path, capabilities: ModelCapabilities) -> Problems:
    """Yield the problems of what is neither text nor token ids."""
    yield from check_text_or_tokens(value, path, capabilities, _IF_SEVERAL)


def _check_segments(
    items: Sequence[object], path: Path, capabilities: ModelCapabilities
) -> Problems:
    """Yield the problems of the segments, and the first item that is none."""
    is_uniform = True
    total = 0
    for index, item in enumerate(items):
        if isinstance(item, PromptSegment):
            yield from _check_segment(item, (*path, index), capabilities)
            total += _length(item)
        elif is_uniform:
            is_uniform = False
            problem = wrong("invalid-type", (*path, index), "a segment, an object", item)
            yield replace(problem, hint=_DO_NOT_MIX)
    if total > MAX_SEGMENTS_LENGTH:
        message = (
            f"the segments of {quote(path)} have {total} tokens by `length`; "
            f"at most {MAX_SEGMENTS_LENGTH} are allowed"
        )
        yield FieldProblem("invalid-value", path, message)


def _length(segment: PromptSegment) -> int:
    """Return the length that a segment gives, 0 if it gives none or a bad one."""
    length: object = segment.length
    return length if isinstance(length, int) and _SEGMENT_LENGTH.holds(length) else 0


def _check_segment(segment: PromptSegment, path: Path, capabilities: ModelCapabilities) -> Problems:
    yield from _check_contents(segment, path)
    if segment.text is not None:
        yield from check_string(segment.text, (*path, "text"), "a string")
        yield from _check_filled(segment.text, (*path, "text"))
    if segment.tokens is not None:
        yield from _check_tokens(segment.tokens, (*path, "tokens"), capabilities)
    if segment.length is not None:
        yield from check_number(segment.length, (*path, "length"), _SEGMENT_LENGTH)
    yield from _check_seed(segment, (*path, "seed"))
    for name in ("type", "pin"):
        value = getattr(segment, name)
        if value is not None or name == "pin":
            yield from check_choice(value, (*path, name), _SEGMENT[name].choices or ())


def _check_contents(segment: PromptSegment, path: Path) -> Problems:
    """Yield what is wrong with a segment that has not exactly one of _CONTENTS."""
    given = [name for name in _CONTENTS if getattr(segment, name) is not None]
    if not given:
        yield FieldProblem("missing-field", path, f"{quote(path)} is empty; {_ONE_OF_THEM}")
    for name in given[1:]:
        message = f"{quote((*path, name))} cannot go with `{given[0]}`; {_ONE_OF_THEM}"
        yield FieldProblem("conflicting-fields", (*path, name), message)


def _check_tokens(tokens: object, path: Path, capabilities: ModelCapabilities) -> Problems:
    if isinstance(tokens, list):
        yield from _check_filled(tokens, path)
        yield from check_token_ids(tokens, path, capabilities)
    else:
        yield wrong("invalid-type", path, "a list of token ids", tokens)


def _check_filled(value: object, path: Path) -> Problems:
    if isinstance(value, str | list) and not value:
        message = f"{quote(path)} is empty: a segment has at least one token"
        yield FieldProblem("invalid-value", path, message, "leave the segment out")


def _check_seed(segment: PromptSegment, path: Path) -> Problems:
    seed: object = segment.seed
    if isinstance(seed, str):
        yield from check_string(seed, path, "a string")
    elif is_integer(seed):
        yield from check_number(seed, path, _SEED)
    else:
        yield wrong("invalid-type", path, "an integer or a string", seed)
    if segment.length is None and seed != 0:
        message = f"{quote(path)} has no effect without `length`"
        yield FieldProblem("conflicting-fields", path, message, "leave it out")
