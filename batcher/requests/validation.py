"""Everything that is wrong with a request: field by field, together, and for a model.

Rule: what a field asks for is done or refused, never dropped.  What the table of fields says to
exclude another one, or to need it, is refused, and so is what find_conflicts has rules for;
docs/requests-and-results.md shows them all.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from functools import cache
from itertools import islice
from operator import itemgetter
from typing import Annotated, Any, Literal, TypeGuard, cast

import msgspec
from msgspec import Meta, Struct
from msgspec.structs import astuple, replace

from batcher.errors import (
    BatchdecodeError,
    EncodingError,
    FieldProblem,
    GrammarError,
    Path,
    not_encoded,
)
from batcher.fields import Field, Range, expected_of, fields_of, range_of
from batcher.request import (
    CONSTRAINT_FIELDS,
    MAX_INT,
    MAX_SEGMENTS_LENGTH,
    NUM_PLAIN,
    PLAIN_VALUES,
    REQUEST_FIELDS,
    Bias,
    ConstraintField,
    PromptSegment,
    Request,
    ServerRequest,
    Transition,
)

# The checks of single values and of prompts, and how a message shows a value.
#
# Rule: a check works on any value whatever, because a Request built by hand may hold anything.

MAX_SHOWN = 40  # characters of a value or a name that a message quotes
MAX_BAD_WORDS_LENGTH = 1024  # all of one request together, in UTF-8 bytes
HUGE = 10**MAX_SHOWN

_LOGIT_BIAS = cast(Range, range_of(Bias))
_IF_SEVERAL = "each prompt is a request of its own"


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
    return text if len(text) <= MAX_SHOWN else text[:MAX_SHOWN] + "…"


def quote(path: Path) -> str:
    return f"`{FieldProblem('', path, '').field}`"


def wrong(code: str, path: Path, expected: str, value: object) -> FieldProblem:
    message, is_quoted = f"{quote(path)} must be {expected}, not {show(value)}", False
    if isinstance(value, str) and "number" in expected:
        is_quoted = _NUMBER.fullmatch(value) is not None
    elif isinstance(value, str) and ("integer" in expected or "token id" in expected):
        is_quoted = _INTEGER.fullmatch(value) is not None
    elif isinstance(value, str):
        is_quoted = "true or false" in expected and value in ("true", "false")
    return FieldProblem(code, path, message, "remove the quotes" if is_quoted else None)


def misfit(record: type[Struct], given: Mapping[str, Any]) -> str | None:
    """Return what the first given value must be that a field of `record` cannot hold; or None."""
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
    if value is not None and not isinstance(value, dict):
        yield wrong("invalid-type", path, "an object", value)


def check_simple(field: Field, value: object, path: Path) -> Problems:
    """Yield the problems of a number, a choice or a text, as the type of the field says."""
    if field.range is not None:
        return check_number(value, path, field.range)
    if field.choices is not None:
        return check_choice(value, path, field.choices)
    return check_string(value, path, "a string")


def check_choice(value: object, path: Path, choices: Sequence[object]) -> Problems:
    *names, last = ["true or false"] if choices == [True, False] else map(show, choices)
    expected = f"{', '.join(names)} or {last}" if names else last
    if not isinstance(value, tuple(set(map(type, choices)))):
        yield wrong("invalid-type", path, expected, value)
    elif value not in choices:
        yield wrong("invalid-value", path, expected, value)


def check_string(value: object, path: Path, expected: str) -> Problems:
    if not isinstance(value, str):
        yield wrong("invalid-type", path, expected, value)
    elif not is_text(value):
        message = f"{quote(path)} holds a lone surrogate, which stands for no character"
        yield FieldProblem("invalid-text", path, message)


def check_strings(
    values: object, path: Path, if_empty: str = "", hint: str | None = None
) -> Problems:
    if not isinstance(values, list):
        yield wrong("invalid-type", path, "a list of strings", values)
        return
    for index, value in enumerate(values):
        yield from check_string(value, (*path, index), "a string")
    for index, value in enumerate(values if if_empty else ()):
        if isinstance(value, str):
            yield from check_filled(value, (*path, index), if_empty, hint)


def check_filled(value: object, path: Path, if_empty: str, hint: str | None = None) -> Problems:
    if isinstance(value, str | list) and not value:
        yield FieldProblem("invalid-value", path, f"{quote(path)} is empty{if_empty}", hint)


def check_number(value: object, path: Path, allowed: Range) -> Problems:
    is_kind = is_integer(value) or (isinstance(value, float) and not allowed.is_integer)
    if not is_kind:
        yield wrong("invalid-type", path, allowed.expected, value)
    elif not allowed.holds(value):  # type: ignore[arg-type]  # known to be a number
        yield wrong("invalid-value", path, allowed.expected, value)


def check_text_or_tokens(
    value: object, path: Path, capabilities: ModelCapabilities, if_several: str = _IF_SEVERAL
) -> Problems:
    """Yield the problems of a text or token ids; if_several: the hint for a list of either."""
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
    largest = capabilities.largest_token
    if not is_integer(value):
        yield wrong("invalid-type", path, "a token id, an integer", value)
    elif not 0 <= value <= largest:
        yield wrong("unknown-token", path, f"a token id from 0 to {largest}", value)


def is_integer(value: object) -> TypeGuard[int]:
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
    if not isinstance(value, dict | bool):
        yield wrong("invalid-type", path, "a JSON Schema: an object, true or false", value)
        return
    try:
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError, RecursionError):
        what = "no NaN, no Infinity, no endless nesting, and nothing but JSON's own kinds of values"
        yield FieldProblem("invalid-value", path, f"{quote(path)} must be JSON: {what}")


def check_texts_to_choose(value: object, path: Path, _: ModelCapabilities) -> Problems:
    yield from check_strings(value, path)
    if isinstance(value, list):
        yield from check_filled(value, path, ": there is nothing to choose from")


def check_bad_words(words: object, path: Path, _: ModelCapabilities) -> Problems:
    yield from check_strings(words, path, ", so it would forbid everything")
    if not isinstance(words, list) or not all(isinstance(w, str) and is_text(w) for w in words):
        return
    total = sum(len(word.encode()) for word in words)
    if total > MAX_BAD_WORDS_LENGTH:
        message = f"{quote(path)} holds {total} bytes; at most {MAX_BAD_WORDS_LENGTH} are allowed"
        yield FieldProblem("invalid-value", path, message)


def check_allowed(value: object, path: Path, capabilities: ModelCapabilities) -> Problems:
    if not isinstance(value, list):
        yield wrong("invalid-type", path, "a list of token ids", value)
        return
    yield from check_filled(value, path, ": no token is allowed")
    yield from check_token_ids(value, path, capabilities)


def check_logit_bias(biases: object, path: Path, capabilities: ModelCapabilities) -> Problems:
    if not isinstance(biases, dict):
        yield wrong("invalid-type", path, "an object of token ids and numbers", biases)
        return
    largest = capabilities.largest_token
    for key in biases:
        is_number = isinstance(key, str) and key.isascii() and key.isdigit()
        is_short = isinstance(key, str) and len(key) <= MAX_SHOWN
        if not (is_number and is_short and str(int(key)) == key and int(key) <= largest):
            expected = f'must be token ids from "0" to "{largest}"'
            message = f"the names in {quote(path)} {expected}, not {show(key)}"
            place = (*path, key) if is_short else path
            hint = None if isinstance(key, str) else "write each id once, as a string"
            yield FieldProblem("unknown-token", place, message, hint, is_key=is_short)
            return
    for key, bias in biases.items():
        yield from check_number(bias, (*path, key), _LOGIT_BIAS)


# -- prompts ---------------------------------------------------------------------------------------

_SEGMENT = fields_of(PromptSegment)
_SEGMENT_LENGTH = cast(Range, _SEGMENT["length"].range)
_SEED = cast(Range, REQUEST_FIELDS["seed"].range)

_CONTENTS = ("text", "tokens", "length")
_ONE_OF_THEM = "give one of `text`, `tokens` and `length`"
_NO_TOKEN = (": a segment has at least one token", "leave the segment out")
_DO_NOT_MIX = "a list holds token ids or segments; do not mix them"


def check_prompt(value: object, path: Path, capabilities: ModelCapabilities) -> Problems:
    if not isinstance(value, list) or not any(isinstance(item, PromptSegment) for item in value):
        yield from check_text_or_tokens(value, path, capabilities)
    elif is_integer(value[0]):
        for problem in check_token_ids(value, path, capabilities):
            yield replace(problem, hint=_DO_NOT_MIX)
    else:
        is_uniform = True
        total = 0
        for index, item in enumerate(value):
            if isinstance(item, PromptSegment):
                yield from _check_segment(item, (*path, index), capabilities)
                length: object = item.length
                if isinstance(length, int) and _SEGMENT_LENGTH.holds(length):
                    total += length
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


def _check_segment(segment: PromptSegment, path: Path, capabilities: ModelCapabilities) -> Problems:
    given = [name for name in _CONTENTS if getattr(segment, name) is not None]
    if not given:
        yield FieldProblem("missing-field", path, f"{quote(path)} is empty; {_ONE_OF_THEM}")
    for name in given[1:]:
        message = f"{quote((*path, name))} cannot go with `{given[0]}`; {_ONE_OF_THEM}"
        yield FieldProblem("conflicting-fields", (*path, name), message)
    for name, field in _SEGMENT.items():
        value, place = getattr(segment, name), (*path, name)
        if value is None and name not in ("seed", "pin"):
            continue
        if name == "text" or (name == "tokens" and isinstance(value, list)):
            yield from check_filled(value, place, *_NO_TOKEN)
        if name == "tokens" and isinstance(value, list):
            yield from check_token_ids(value, place, capabilities)
        elif name == "tokens":
            yield wrong("invalid-type", place, "a list of token ids", value)
        elif name == "seed" and is_integer(value):
            yield from check_number(value, place, _SEED)
        elif name == "seed" and not isinstance(value, str):
            yield wrong("invalid-type", place, "an integer or a string", value)
        else:
            yield from check_simple(field, value, place)
    if segment.length is None and segment.seed != 0:
        place = (*path, "seed")
        message = f"{quote(place)} has no effect without `length`"
        yield FieldProblem("conflicting-fields", place, message, "leave it out")


MAX_PROBLEMS = 100  # of one field
MAX_MODELS = 8  # of a server, in a message
OF_STREAMS = {"n", "best_of", "stream", "stream_options"}  # which nobody but the engine decides

_DEFAULTS = {name: field.default for name, field in REQUEST_FIELDS.items()} | {"prompt": ""}


# Stops and states: what may stand in their fields, and how much all of them may hold together.

ANY_STATE = "*"  # its transitions leave every state
MAX_NAMED = 8  # states that a message lists
MAX_NAME = MAX_SHOWN  # characters, so that a message can hold one
MAX_STOP_LENGTH = 1024  # all stops of one request together, in token ids and UTF-8 bytes
MARKER_FIELDS = ("stop_token", "stop_sequence", "stop", "states")

_MAX_PARTS = 4 * MAX_STOP_LENGTH  # above it the rest is not looked at
_MAX_NESTED = 4  # a marker in a transition in a list in states

_EMPTY_MARKER = (", so it would match everywhere", "leave it out")
_SEQUENCE_KINDS = (
    "a list of token ids, a list of such lists, a string or a list of strings",
    "a list of token ids is one sequence, a list of lists or of strings several; do not mix them",
)


States = dict[str, list[Transition]]


def _parts(value: object, depth: int = _MAX_NESTED) -> Iterator[object]:
    """Yield as many things as `value` holds at least; what is empty counts as one."""
    inner = value.on if isinstance(value, Transition) else value
    if isinstance(inner, dict):
        inner = [*inner.values()]
    if not isinstance(inner, str | list) or not inner or depth == 0:
        yield inner
    elif isinstance(inner, str):
        yield from inner
    else:
        for item in inner:
            yield from _parts(item, depth - 1)


def check_stop_token(stop: object, path: Path, capabilities: ModelCapabilities) -> Problems:
    if isinstance(stop, list):
        yield from check_token_ids(stop, path, capabilities)
    elif is_integer(stop):
        yield from check_token_id(stop, path, capabilities)
    else:
        yield wrong("invalid-type", path, "a token id or a list of token ids", stop)


def check_stop_sequence(stop: object, path: Path, capabilities: ModelCapabilities) -> Problems:
    if not isinstance(stop, list):
        yield from _check_text(stop, path, _SEQUENCE_KINDS[0])
        return
    kinds = [_kind(item) for item in stop]
    odd = next((i for i, kind in enumerate(kinds) if kind is None or kind is not kinds[0]), None)
    if odd is not None:
        code = "invalid-type" if kinds[odd] is None else "invalid-value"
        expected, hint = _SEQUENCE_KINDS
        found = "a mixed list" if kinds[odd] else f"a list with {show(stop[odd])} in it"
        message = f"{quote(path)} must be {expected}, not {found}"
        yield FieldProblem(code, (*path, odd), message, hint)
    elif stop and kinds[0] is int:
        yield from check_token_ids(stop, path, capabilities)
    elif stop and kinds[0] is str:
        yield from check_strings(stop, path, *_EMPTY_MARKER)
    else:
        for index, item in enumerate(stop):
            yield from check_filled(item, (*path, index), *_EMPTY_MARKER)
            yield from check_token_ids(item, (*path, index), capabilities)


def check_stop(stop: object, path: Path, _: ModelCapabilities) -> Problems:
    if isinstance(stop, list):
        yield from check_strings(stop, path, *_EMPTY_MARKER)
    else:
        yield from _check_text(stop, path, "a string or a list of strings")


def _text_length(marker: object) -> int:
    if isinstance(marker, str):
        return len(marker.encode())
    if isinstance(marker, list):
        return sum(map(_text_length, marker))
    if isinstance(marker, dict):
        return sum(map(_text_length, marker.values()))
    if isinstance(marker, Transition):
        return _text_length(marker.on)
    return 0 if marker is None else 1


def _check_text(stop: object, path: Path, expected: str) -> Problems:
    yield from check_string(stop, path, expected)
    yield from check_filled(stop, path, *_EMPTY_MARKER)


def _kind(item: object) -> type | None:
    if is_integer(item):
        return int
    return next((kind for kind in (str, list) if isinstance(item, kind)), None)


# -- states ----------------------------------------------------------------------------------------


def initial_state_of(request: Request) -> str | None:
    if request.initial_state is not None or request.states is None:
        return request.initial_state
    return next(name for name in request.states if name != ANY_STATE)


def check_states(states: object, path: Path, capabilities: ModelCapabilities) -> Problems:
    if not isinstance(states, dict):
        yield wrong("invalid-type", path, "an object of states", states)
        return
    if not states.keys() - {ANY_STATE}:
        ways_out = f'"{ANY_STATE}" is none, but holds ways out of all: ' if states else ""
        hint = ways_out + 'add one, such as "text": []'
        yield FieldProblem("invalid-value", path, f"{quote(path)} declares no state", hint)
    for name, transitions in states.items():
        if not isinstance(name, str) or not 1 <= len(name) <= MAX_NAME or not is_text(name):
            expected = f"a state's name is a string of 1 to {MAX_NAME} characters"
            message = f"{quote(path)}: {expected}, not {show(name)}"
            yield FieldProblem("invalid-value", path, message)
        elif not isinstance(transitions, list):
            yield wrong("invalid-type", (*path, name), "a list of transitions", transitions)
        else:
            for index, transition in enumerate(transitions):
                yield from _check_transition(transition, (*path, name, index), states, capabilities)


def find_doubled_markers(states: States) -> Problems:
    everywhere = {_key(transition) for transition in states.get(ANY_STATE, [])}
    for name, transitions in states.items():
        others = set() if name == ANY_STATE else everywhere
        seen: set[str | tuple[int, ...]] = set()
        for index, transition in enumerate(transitions):
            if _key(transition) in seen or _key(transition) in others:
                path = ("states", name, index, "on")
                also = "" if name == ANY_STATE else f' or "{ANY_STATE}"'
                message = f"{quote(path)}: state {show(name)}{also} has this marker already"
                yield FieldProblem("invalid-value", path, message)
            seen.add(_key(transition))


def find_unreachable(request: Request, states: States) -> Problems:
    initial = initial_state_of(request)
    if initial not in states or initial == ANY_STATE:
        message = f"`initial_state` {show(initial)} is not declared; {_declared(states)}"
        yield FieldProblem("invalid-value", ("initial_state",), message)
        return
    reached: set[str] = set()
    open_ends = {initial, *(way.to for way in states.get(ANY_STATE, []) if way.to is not None)}
    while open_ends:
        name = open_ends.pop()
        reached.add(name)
        open_ends |= {way.to for way in states[name] if way.to is not None} - reached
    for name in states:
        if name not in reached and name != ANY_STATE:
            message = f"state {show(name)} can never be reached from {show(initial)}"
            yield FieldProblem("invalid-value", ("states", name), message, is_key=True)


def _check_transition(
    transition: object, path: Path, states: dict[object, object], capabilities: ModelCapabilities
) -> Problems:
    if not isinstance(transition, Transition):
        yield wrong("invalid-type", path, "an object with `on` and `to`", transition)
        return
    on: object = transition.on
    yield from check_text_or_tokens(
        on, (*path, "on"), capabilities, "give one transition for each text"
    )
    yield from check_filled(on, (*path, "on"), *_EMPTY_MARKER)
    to: object = transition.to
    if to is None:
        return
    if not isinstance(to, str):
        yield wrong("invalid-type", (*path, "to"), "the name of a state or null", to)
    elif to not in states or to == ANY_STATE:
        message = f"{quote((*path, 'to'))} {show(to)} is not declared; {_declared(states)}"
        yield FieldProblem("invalid-value", (*path, "to"), message)


def _declared(states: Mapping[Any, object]) -> str:
    names = [show(name) for name in states if name != ANY_STATE]
    if not names:
        return "no state is"
    more = f" and {len(names) - MAX_NAMED} more" if len(names) > MAX_NAMED else ""
    return f"the states are {', '.join(names[:MAX_NAMED])}{more}"


def _key(transition: Transition) -> str | tuple[int, ...]:
    return transition.on if isinstance(transition.on, str) else tuple(transition.on)


# The fields whose values are made of others; of all others the type tells how they are checked.
_CHECKS: dict[str, Check] = {
    "prompt": check_prompt,
    "stop_token": check_stop_token,
    "stop_sequence": check_stop_sequence,
    "stop": check_stop,
    "logit_bias": check_logit_bias,
    "allowed_token_ids": check_allowed,
    "bad_words": check_bad_words,
    "negative_prompt": check_text_or_tokens,
    "json_schema": check_json_schema,
    "choice": check_texts_to_choose,
    "states": check_states,
    "extra_body": check_object,
}
_BOUNDED = {*MARKER_FIELDS, "bad_words"}  # of what is far too much, no more is counted
_IF_EMPTY: dict[str, tuple[str, str | None]] = {
    "session": ("", "leave it out"),
    "cache_salt": ("", "leave it out"),
    "lark": (": it has no rule", None),
    "gbnf": (": it has no rule", None),
}


# Each with the other field that it depends on, if there is one.
Conflicts = Iterator[tuple[FieldProblem, str | None]]


def look_closely(request: Request, capabilities: ModelCapabilities) -> list[FieldProblem]:
    problems: list[FieldProblem] = []
    for name, field in REQUEST_FIELDS.items():
        value = getattr(request, name)
        if value is not field.default:
            problems += check_field(field, value, capabilities)
    bad = {str(problem.path[0]) for problem in problems}
    sound = replace(request, **{name: _DEFAULTS[name] for name in bad}) if bad else request
    problems += [
        problem
        for problem, other in find_conflicts(sound)
        if problem.path[0] not in bad and other not in bad
    ]
    problems += find_unserved(sound, capabilities)
    return problems


def check_field(field: Field, value: Any, capabilities: ModelCapabilities) -> list[FieldProblem]:
    name, path = field.name, (field.name,)
    if name in _BOUNDED and any(True for _ in islice(_parts(value), _MAX_PARTS, None)):
        message = (
            f"{quote(path)} holds more than {_MAX_PARTS} token ids and characters; "
            f"at most {MAX_STOP_LENGTH} are allowed"
        )
        return [FieldProblem("invalid-value", path, message)]
    check: Check | None = _CHECKS.get(name)
    if check is not None:
        problems = check(value, path, capabilities)
    elif name in _IF_EMPTY and isinstance(value, str) and not value:
        problems = check_filled(value, path, *_IF_EMPTY[name])
    else:
        problems = check_simple(field, value, path)
    return [*islice(problems, MAX_PROBLEMS)]


# -- fields together -------------------------------------------------------------------------------


def find_conflicts(request: Request) -> Conflicts:
    values = zip(REQUEST_FIELDS.items(), astuple(request), strict=False)
    asked = {
        name: field
        for (name, field), value in values
        if value is not field.default and field.asks(value)
    }
    temperature: float | None = request.temperature
    if isinstance(request, ServerRequest) and "temperature" not in request.stated:
        temperature = None  # the server has a default of its own
    blamed = set()
    for name, field in asked.items():
        for other, why in field.excludes.items():
            if other in asked:
                yield _make(name, other, f"`{name}` cannot go with `{other}`: {why}")
                blamed.add(name)
                break
    for name, field in asked.items():
        if field.needs is not None and field.needs[0] not in asked and name not in blamed:
            other, remedy = field.needs
            if other == "temperature" and temperature is None:
                continue
            yield _make(name, other, f"`{name}` has no effect without `{other}`; {remedy}")
    if request.best_of is not None and request.best_of < request.n:
        message = f"`best_of` is {request.best_of}, less than the {request.n} outputs of `n`"
        yield _make("best_of", "n", message)
    if request.num_beams > 1:
        if request.n > request.num_beams:
            message = f"`n` is {request.n}, but {request.num_beams} beams give no more outputs"
            yield _make("n", "num_beams", message)
    elif temperature == 0:
        for name, count in (("n", request.n), ("best_of", request.best_of)):
            if count is not None and count > 1:
                message = f"`{name}` is {count}, but with `temperature` 0 all outputs are the same"
                yield _make(name, "temperature", message)
    most = request.output_limit
    if request.min_tokens > most:
        what = f"`max_tokens`, {most}" + " by default" * (request.max_tokens is None)
        message = f"`min_tokens` is {request.min_tokens}, more than {what}"
        yield _make("min_tokens", "max_tokens", message)
    if request.heal and not request.prompt:
        yield _make("heal", "prompt", "`heal` needs a prompt with at least one token")
    states = request.states
    if states is not None:
        for problem in (*find_doubled_markers(states), *find_unreachable(request, states)):
            yield problem, "initial_state" if problem.path[0] == "states" else "states"
    if request.deadline is not None and request.deadline < request.arrival_time:
        message = (
            f"`deadline` is {request.deadline:g}, before `arrival_time`, {request.arrival_time:g}"
        )
        yield _make("deadline", "arrival_time", message)
    lengths = {name: _text_length(getattr(request, name)) for name in MARKER_FIELDS}
    total = sum(lengths.values())
    if total > MAX_STOP_LENGTH:
        message = (
            f"the stops hold {total} token ids and bytes of text together; "
            f"at most {MAX_STOP_LENGTH} are allowed"
        )
        longest = max(lengths, key=lengths.__getitem__)
        yield FieldProblem("invalid-value", (longest,), message), None


def _make(name: str, other: str, message: str) -> tuple[FieldProblem, str]:
    return FieldProblem("conflicting-fields", (name,), message), other


# -- what the model and the batch can do -----------------------------------------------------------


def num_slots_needed(request: Request) -> int:
    """Return the slots of one admission: the beams, or a sample and its negative prompt."""
    if request.num_beams > 1:
        return request.num_beams
    return 1 if request.cfg_scale == 1 else 2


def logit_fields_of(request: Request) -> list[str]:
    return [
        field.name
        for field in REQUEST_FIELDS.values()
        if field.needs_logits and field.asks(getattr(request, field.name))
    ]


def constraint_fields_of(request: Request) -> list[ConstraintField]:
    return [name for name in CONSTRAINT_FIELDS if getattr(request, name) is not None]


def find_unserved(request: Request, capabilities: ModelCapabilities) -> Iterator[FieldProblem]:
    if capabilities.served is not None:
        yield from find_untold(request, capabilities, capabilities.served)
        for field in constraint_fields_of(request):
            yield from find_uncompiled(field, getattr(request, field), capabilities)
        return
    if request.extra_body:
        message = "`extra_body` is for a server, and this model is none"
        yield FieldProblem("unsupported-model", ("extra_body",), message, "leave it out")
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
        yield from find_uncompiled(field, getattr(request, field), capabilities)
    if capabilities.encode is not None:
        for name in ("prompt", "negative_prompt"):
            prompt = getattr(request, name)
            texts: dict[Path, str] = {(name,): prompt} if isinstance(prompt, str) else {}
            for index, part in enumerate(prompt if isinstance(prompt, list) else ()):
                if isinstance(part, PromptSegment) and part.text is not None:
                    texts[name, index, "text"] = part.text
            for path, text in texts.items():
                try:
                    capabilities.encode(text)
                except EncodingError as error:
                    yield not_encoded(path, error)


def find_untold(
    request: Request, capabilities: ModelCapabilities, served: frozenset[str]
) -> Iterator[FieldProblem]:
    for name, field in REQUEST_FIELDS.items():
        value = getattr(request, name)
        if name not in served and field.asks(value) and (name, value) != ("best_of", request.n):
            message = f"`{name}` is not sent to servers"
            hint = f'if yours has such a field, use "extra_body": {{"{name}": ...}} or --extra-body'
            hint = "leave it out" if name in OF_STREAMS else hint
            yield FieldProblem("unsupported-model", (name,), message, hint)
    extra = request.extra_body or {}
    if capabilities.models and not extra.get("model"):
        names = capabilities.models
        message = f"the server has {len(names)} models, and this request names none"
        known = ", ".join(sorted(names)[:MAX_MODELS]) + (", ..." if len(names) > MAX_MODELS else "")
        hint = f'add "model": NAME, or run with --model openai:URL#NAME (known: {known})'
        yield FieldProblem("missing-field", (), message, hint)
    prompt = request.prompt
    if isinstance(prompt, list) and any(isinstance(part, PromptSegment) for part in prompt):
        message = "`prompt` has segments, which a server cannot be told"
        yield FieldProblem("unsupported-model", ("prompt",), message, "give a text, or token ids")
    if request.session is not None and isinstance(prompt, list):
        message = "`prompt` is token ids, and a session with a server goes on from texts"
        yield FieldProblem("unsupported-model", ("prompt",), message, "give a text")
    for name in sorted(OF_STREAMS & {name for name, value in extra.items() if value is not None}):
        message = f"`extra_body.{name}` is set by batchdecode: each output is a stream of its own"
        path = ("extra_body", name)
        yield FieldProblem("conflicting-fields", path, message, "leave it out", is_key=True)
    stops = request.stop_sequence
    if isinstance(stops, list) and not all(isinstance(stop, str) for stop in stops):
        message = "`stop_sequence` has token ids, which a server cannot be told"
        yield FieldProblem("unsupported-model", ("stop_sequence",), message, "give texts")


def find_uncompiled(
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


# The quick way to be sure of a request: one conversion in C, then what types cannot state.
#
# Rule: it may leave a good request to `look_closely`, and never accepts a bad one.

_WITHOUT_PARTS = {str, int, float, bool, type(None)}
_KINDS_OF_IDS = ({int}, {list})
_MAX_STOPS = 16  # in each dimension: three fields of 16 x 16 stay below MAX_STOP_LENGTH

# Fields with a rule of their own, beside their type and what they exclude or need.
_RULED = {"n", "best_of", "min_tokens", "num_beams", "cfg_scale", "prompt_logprobs", "heal"}

# Beyond the plain fields: those that have no rule but their type, and those whose type is not all.
_FREE, _COMPOSED = set[str](), list[str]()
for _name, _field in [*REQUEST_FIELDS.items()][NUM_PLAIN:]:
    if _field.range is None and _field.choices is None:
        _COMPOSED.append(_name)
    elif _field.needs is None and _name not in _RULED and _FREE.isdisjoint(_field.excludes):
        _FREE.add(_name)
_ruled_of = itemgetter(
    *(at for at, name in enumerate([*REQUEST_FIELDS][NUM_PLAIN:]) if name not in _FREE)
)


def checked_copy(request: Request, capabilities: ModelCapabilities) -> Request | list[FieldProblem]:
    """Return an equal request with lists of its own, or what is wrong with `request`."""
    copy = quick_copy(request, capabilities)
    if copy is not None and not (copy.json_schema or copy.states or copy.extra_body):
        return copy
    problems = [] if copy is not None else look_closely(request, capabilities)
    if problems:
        return problems
    values = zip(request.__struct_fields__, astuple(request), strict=True)
    parts = {
        # of a list of numbers or texts alone, sooner than deepcopy
        name: [*value]
        if type(value) is list and _WITHOUT_PARTS.issuperset(map(type, value))
        else deepcopy(value)
        for name, value in values
        if type(value) not in _WITHOUT_PARTS
    }
    return replace(copy or request, **parts)


def find_problems(request: Request, capabilities: ModelCapabilities) -> list[FieldProblem]:
    """Return everything wrong with `request`, to be decoded by that model; [] if nothing is."""
    is_right = quick_copy(request, capabilities) is not None
    return [] if is_right else look_closely(request, capabilities)


def quick_copy(request: Request, capabilities: ModelCapabilities) -> Request | None:
    """Return an equal request with plain lists of its own; None if a closer look is needed."""
    if type(request) is not Request and request.__struct_fields__ != Request.__struct_fields__:
        return None  # a type of the caller's, of which nothing is known
    checked = checked_type(capabilities.vocab_size, Request, "tuple")
    try:
        copy = msgspec.convert(astuple(request), checked)  # quicker than by the names of fields
    except (msgspec.ValidationError, UnicodeEncodeError, AttributeError, TypeError):
        return None  # the others: a lone surrogate, and what JSON has not
    prompt, token = request.prompt, request.stop_token
    if (
        (type(prompt) is list or (type(prompt) is str and is_text(prompt)))
        and (request.id is None or is_text(request.id))
        and (token is None or type(token) in {int, list})
        and goes_together(request, capabilities)
    ):
        return copy
    return None


def goes_together(request: Request, capabilities: ModelCapabilities) -> bool:
    """Return whether nothing is wrong with a request whose fields have their types."""
    stop_sequence, stop = request.stop_sequence, request.stop
    if not (
        (stop_sequence is None or _is_uniform(stop_sequence))
        and (stop is None or _is_uniform(stop))
    ):
        return False
    session, salt = request.session, request.cache_salt
    if session is None:
        if request.think_time:
            return False
    elif not is_text(session):
        return False
    if salt is not None and not is_text(salt):
        return False
    rare = astuple(request)[NUM_PLAIN:]
    if rare != PLAIN_VALUES or capabilities.served is not None:
        is_model = capabilities.gives_logits and capabilities.served is None
        if not (is_model and _ruled_of(rare) == _ruled_of(PLAIN_VALUES)):
            for name in _COMPOSED:
                field, value = REQUEST_FIELDS[name], getattr(request, name)
                if value is not field.default and check_field(field, value, capabilities):
                    return False
            return not (any(find_conflicts(request)) or any(find_unserved(request, capabilities)))
    if request.deadline is not None and request.deadline < request.arrival_time:
        return False
    if capabilities.encode is not None and isinstance(request.prompt, str):
        try:
            capabilities.encode(request.prompt)
        except EncodingError:
            return False
    return True


def _is_uniform(stop: object) -> bool:
    if type(stop) is not list:
        return type(stop) is str and stop.isascii()
    kinds = set(map(type, stop))
    return not kinds or kinds in _KINDS_OF_IDS or (kinds == {str} and all(map(str.isascii, stop)))


@cache
def checked_type(
    vocab_size: int | None, base: type[Request], shape: Literal["tuple", "object"]
) -> type[Request]:
    """Return a type that no bad request converts to, but for what `goes_together` finds.

    The conversion runs in C: it costs less than one pass over the prompt in Python.
    """
    largest = ModelCapabilities(vocab_size=vocab_size).largest_token
    some, few = Meta(min_length=1, max_length=_MAX_STOPS), Meta(max_length=_MAX_STOPS)
    token_id: Any = Annotated[int, Meta(ge=0, le=largest)]
    token_ids: Any = Annotated[list[token_id], some]
    text: Any = Annotated[str, some]
    narrower = {
        "prompt": str | list[token_id],
        "stop_token": token_id | Annotated[list[token_id], few] | None,
        "stop_sequence": text | Annotated[list[token_id | text | token_ids], few] | None,
        "stop": text | Annotated[list[text], few] | None,
    }
    fields = [
        (name, narrower.get(name, field.type), *([] if name == "prompt" else [field.default]))
        for name, field in REQUEST_FIELDS.items()
    ]
    is_tuple = shape == "tuple"
    made = msgspec.defstruct(
        "CheckedRequest", fields, bases=(base,), frozen=True, gc=False, array_like=is_tuple
    )
    return cast(type[Request], made)
