"""The prompts: text, token ids, or segments, each of which is text, token ids or a length."""

from collections.abc import Sequence
from typing import cast

from msgspec.structs import replace

from batcher.errors import FieldProblem, Path
from batcher.fields import Range, fields_of
from batcher.request import MAX_SEGMENTS_LENGTH, REQUEST_FIELDS, PromptSegment
from batcher.validation.capabilities import ModelCapabilities
from batcher.validation.values import (
    Problems,
    check_choice,
    check_number,
    check_string,
    check_text_or_tokens,
    check_token_ids,
    is_integer,
    quote,
    wrong,
)

_FIELDS = fields_of(PromptSegment)
_LENGTH = cast(Range, _FIELDS["length"].range)
_SEED = cast(Range, REQUEST_FIELDS["seed"].range)

_CONTENTS = ("text", "tokens", "length")
_ONE_OF_THEM = "give one of `text`, `tokens` and `length`"
_IF_SEVERAL = "write one line, or one row, for each prompt"
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
    return length if isinstance(length, int) and _LENGTH.holds(length) else 0


def _check_segment(segment: PromptSegment, path: Path, capabilities: ModelCapabilities) -> Problems:
    yield from _check_contents(segment, path)
    if segment.text is not None:
        yield from check_string(segment.text, (*path, "text"), "a string")
        yield from _check_filled(segment.text, (*path, "text"))
    if segment.tokens is not None:
        yield from _check_tokens(segment.tokens, (*path, "tokens"), capabilities)
    if segment.length is not None:
        yield from check_number(segment.length, (*path, "length"), _LENGTH)
    yield from _check_seed(segment, (*path, "seed"))
    for name in ("type", "pin"):
        value = getattr(segment, name)
        if value is not None or name == "pin":
            yield from check_choice(value, (*path, name), _FIELDS[name].choices or ())


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
