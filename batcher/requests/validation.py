"""The rules of a request: each field by itself, fields together, and what the model can do.

The types in batcher/request.py accept a request in one conversion in C.  What they refuse, and what
a type cannot state, is explained here.  Rule: what a field asks for is done or refused, never
dropped.  docs/reference/requests-and-results.md lists the fields that exclude or need each other.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping
from copy import deepcopy
from functools import cache, lru_cache
from itertools import islice
from operator import itemgetter
from typing import Annotated, Any, TypeGuard, cast, get_args, get_origin

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
from batcher.fields import Field, Range, choices_of, expected_of, fields_of, parts_of, range_of
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
    Text,
    TokenId,
    TokenIds,
    Transition,
)

MAX_SHOWN = 40  # characters of a value or a name that a message quotes
MAX_PROBLEMS = 100  # per field
MAX_MODELS = 8  # of a server, in a message
MAX_BAD_WORDS_LENGTH = 1024  # UTF-8 bytes per request
MAX_STOP_LENGTH = 1024  # token ids and UTF-8 bytes of all stops of a request
MAX_PARTS = 4 * MAX_STOP_LENGTH  # a field with more is not examined
MARKER_FIELDS = ("stop_token", "stop_sequence", "stop", "states")
ANY_STATE = "*"  # its transitions leave every state
MAX_NAMED = 8  # states that a message lists
MAX_NAME = MAX_SHOWN  # characters of a state's name
OF_STREAMS = {"n", "best_of", "stream", "stream_options"}  # set by the engine alone

Problems = Iterator[FieldProblem]


class ModelCapabilities(Struct, frozen=True):
    """What a model and a batch can decode, as far as it is known.

    vocab_size: number of token ids; None if the model takes any.
    num_slots: batch size, or None.
    gives_logits: whether the model returns logits; scores_prompts: after every prompt token, too.
    has_eos: whether the model has an end-of-sequence token.
    check_constraint: compiles a constraint, given the field and its value; raises GrammarError if
    the constraint is wrong, another BatchdecodeError if no constraint can be compiled.
    chat_template: turns messages into a prompt.
    encode_with_special: encodes text, reads special tokens in it and adds the prefix; or None.
    takes_chats: whether a text prompt is a user's message for the chat template.
    defaults: of fields that a row leaves out; they replace the fields' own.
    encode: encodes text; raises EncodingError.
    served: fields that are sent to the server or need no sending; None for a local model.
    models: names of the server's models, one of which each request has to give.
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


# -- how messages show values ----------------------------------------------------------------------

_INTEGER = re.compile(r"-?(0|[1-9][0-9]*)")
_NUMBER = re.compile(rf"{_INTEGER.pattern}(\.[0-9]+)?([eE][-+]?[0-9]+)?")


def show(value: object) -> str:
    """Return `value` as a message quotes it: JSON where that is short, else its kind."""
    if isinstance(value, str):
        return f'"{cut(value)}"'
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, int):
        return str(value) if abs(value) < 10**MAX_SHOWN else "a huge integer"
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


# Other tools' names of our fields.
_OTHER_NAMES = {
    other: name
    for name, others in {
        "prompt": "content input inputs instruction query question text",
        "session": "conversation_id session_id",
        "messages": "conversations",
        "gbnf": "ebnf grammar",
        "cfg_scale": "guidance_scale",
        "max_tokens": "max_length max_new_tokens max_output_tokens n_predict num_predict",
        "min_tokens": "min_new_tokens",
        "logprobs": "n_probs return_logprob",
        "n": "num_return_sequences",
        "repetition_penalty": "repeat_penalty",
        "stop": "stop_sequences stop_strings",
        "temperature": "temp",
        "heal": "token_healing",
        "num_beams": "use_beam_search",
    }.items()
    for other in others.split()
}


@lru_cache(maxsize=256)  # the same typo tends to be on every line
def suggest(name: str, allowed: tuple[str, ...]) -> str | None:
    """Return a hint at the allowed name that `name` may stand for, or None."""
    found = own_name(name, allowed)
    if found is None:
        import difflib  # noqa: PLC0415 - bad lines only

        found = next(iter(difflib.get_close_matches(name.lower(), allowed, n=1)), None)
    return found and f"did you mean `{found}`?"


def own_name(name: str, allowed: tuple[str, ...]) -> str | None:
    """Return our name of a field that other tools call `name`, or None."""
    found = _OTHER_NAMES.get(name, name)
    return found if found in allowed else None


def missing(path: Path) -> FieldProblem:
    shown = path[1:] if path[0] == "body" and path[1:] else path
    return FieldProblem("missing-field", path, f"field {quote(shown)} is missing")


def misfit(record: type[Struct], given: Mapping[str, Any]) -> str | None:
    """Return a message about the first value that `record` refuses, or None."""
    kinds = {field.name: field.type for field in msgspec.structs.fields(record)}
    for name, value in given.items():
        try:
            msgspec.convert(value, kinds.get(name, Any))
        except msgspec.ValidationError:
            if isinstance(value, list | dict):
                return None
            return f"{name} must be {expected_of(kinds[name])}, not {show(value)}"
    return None


# -- one value -------------------------------------------------------------------------------------
#
# These checks accept any Python object: a Request built by hand is not typed yet.

# Why an empty value is refused, and what to do.
_IF_EMPTY: dict[str, tuple[str, str | None]] = {
    **dict.fromkeys(("session", "cache_salt"), ("", "leave it out")),
    **dict.fromkeys(("lark", "gbnf", "grammar"), (": it has no rule", None)),
    **dict.fromkeys(("messages", "prompt", "role"), ("", None)),
    **dict.fromkeys(
        ("text", "tokens"), (": a segment has at least one token", "leave the segment out")
    ),
    **dict.fromkeys(
        ("stop_sequence", "stop", "on"), (", so it would match everywhere", "leave it out")
    ),
    "bad_words": (", so it would forbid everything", None),
    "choice": (": there is nothing to choose from", None),
    "allowed_token_ids": (": no token is allowed", None),
}
# What to do instead of giving a list of texts.
_IF_SEVERAL = {
    **dict.fromkeys(("prompt", "negative_prompt"), "each prompt is a request of its own"),
    "on": "give one transition for each text",
}


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


def check_value(
    kind: Any, value: object, path: Path, capabilities: ModelCapabilities, unit: str = ""
) -> Problems:
    """Yield why a value other than None is not of the type `kind`."""
    parts = parts_of(kind)
    choices = choices_of(kind)
    if choices is not None:
        *names, last = ["true or false"] if choices == [True, False] else map(show, choices)
        expected = f"{', '.join(names)} or {last}" if names else last
        if not isinstance(value, tuple(set(map(type, choices)))):
            yield wrong("invalid-type", path, expected, value)
        elif value not in choices:
            yield wrong("invalid-value", path, expected, value)
        return
    for part in parts:
        base = get_args(part)[0] if get_origin(part) is Annotated else part
        item = get_args(base)[0] if get_origin(base) is list else None
        if item is not None and isinstance(value, list):
            if not value and base is not part:
                yield _empty(path)
            if item == TokenId:
                yield from check_token_ids(value, path, capabilities)
            else:
                for index, each in enumerate(value):
                    yield from check_value(item, each, (*path, index), capabilities)
            return
        if base is str and isinstance(value, str):
            if not is_text(value):
                message = f"{quote(path)} holds a lone surrogate, which is not a character"
                yield FieldProblem("invalid-text", path, message)
            elif not value and base is not part:
                yield _empty(path)
            return
        if part == TokenId and is_integer(value):
            yield from check_token_id(value, path, capabilities)
            return
        allowed = range_of(part, unit)
        if allowed is not None and part != TokenId and (len(parts) == 1 or is_integer(value)):
            yield from check_number(value, path, allowed)
            return
        if base is Any or (get_origin(base) is dict and isinstance(value, dict)):
            return
        if isinstance(base, type) and issubclass(base, Struct) and isinstance(value, dict):
            members = {member.name: member for member in msgspec.structs.fields(base)}
            for key in (key for key in value if key not in members):
                hint = suggest(key, tuple(members))
                message = f"unknown field `{cut(key)}`"
                yield FieldProblem("unknown-field", (*path, cut(key)), message, hint, is_key=True)
            for member in members.values():
                if value.get(member.name) is not None:
                    place, given = (*path, member.name), value[member.name]
                    yield from check_value(member.type, given, place, capabilities)
                elif member.required:
                    yield missing((*path, member.name))
            return
    yield wrong("invalid-type", path, " or ".join(map(_noun, parts)), value)


def _noun(part: Any) -> str:
    if part == TokenId:
        return "a token id"
    base = get_args(part)[0] if get_origin(part) is Annotated else part
    if get_origin(base) is list:
        return f"a list of {_noun(get_args(base)[0]).split(maxsplit=1)[1]}s"
    return {str: "a string", int: "an integer"}.get(base, "an object")


def _empty(path: Path) -> FieldProblem:
    name = next(key for key in reversed(path) if isinstance(key, str))
    why, hint = _IF_EMPTY[name]
    return FieldProblem("invalid-value", path, f"{quote(path)} is empty{why}", hint)


def check_number(value: object, path: Path, allowed: Range) -> Problems:
    if not is_integer(value) and (allowed.is_integer or not isinstance(value, float)):
        yield wrong("invalid-type", path, allowed.expected, value)
    elif not allowed.holds(value):
        yield wrong("invalid-value", path, allowed.expected, value)


def check_token_ids(values: list[Any], path: Path, capabilities: ModelCapabilities) -> Problems:
    """Yield only the first bad token id of a list: there may be thousands."""
    largest = capabilities.largest_token
    for index, value in enumerate(values):
        if not is_integer(value) or not 0 <= value <= largest:
            for problem in check_token_id(value, (*path, index), capabilities):
                several = all(isinstance(item, str | list) for item in values)
                hint = _IF_SEVERAL.get(str(path[-1])) if several else None
                yield replace(problem, hint=problem.hint or hint)
            return


def check_token_id(value: object, path: Path, capabilities: ModelCapabilities) -> Problems:
    largest = capabilities.largest_token
    if not is_integer(value):
        yield wrong("invalid-type", path, "a token id, an integer", value)
    elif not 0 <= value <= largest:
        yield wrong("unknown-token", path, f"a token id from 0 to {largest}", value)


# -- fields with rules beyond their type ----------------------------------------------------------

_SEQUENCES = "a list of token ids, a list of such lists, a string or a list of strings"
_LISTS = (
    "a list of token ids is one sequence, a list of lists or of strings several; do not mix them"
)
_DO_NOT_MIX = "a list holds token ids or segments; do not mix them"
_CONTENTS = ("text", "tokens", "length")
_ONE_OF_THEM = "give one of `text`, `tokens` and `length`"
_SEGMENT = fields_of(PromptSegment)
_LENGTH, _BIAS = cast(Range, _SEGMENT["length"].range), cast(Range, range_of(Bias))


def check_prompt(value: object, path: Path, capabilities: ModelCapabilities) -> Problems:
    if not isinstance(value, list) or not any(isinstance(item, PromptSegment) for item in value):
        yield from check_value(str | list[TokenId], value, path, capabilities)
    elif is_integer(value[0]):
        for problem in check_token_ids(value, path, capabilities):
            yield replace(problem, hint=_DO_NOT_MIX)
    else:
        others = [index for index, item in enumerate(value) if not isinstance(item, PromptSegment)]
        for index in others[:1]:
            problem = wrong("invalid-type", (*path, index), "a segment, an object", value[index])
            yield replace(problem, hint=_DO_NOT_MIX)
        lengths: list[Any] = []
        for index, item in enumerate(value):
            if isinstance(item, PromptSegment):
                yield from _check_segment(item, (*path, index), capabilities)
                lengths.append(item.length)
        total = sum(num for num in lengths if isinstance(num, int) and _LENGTH.holds(num))
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
        value = getattr(segment, name)
        if value is not None or name in ("seed", "pin"):
            yield from check_value(field.type, value, (*path, name), capabilities)
    if segment.length is None and segment.seed != 0:
        place = (*path, "seed")
        message = f"{quote(place)} has no effect without `length`"
        yield FieldProblem("conflicting-fields", place, message, "leave it out")


def check_stop_sequence(stop: object, path: Path, capabilities: ModelCapabilities) -> Problems:
    if not isinstance(stop, list):
        if isinstance(stop, str):
            yield from check_value(Text, stop, path, capabilities)
        else:
            yield wrong("invalid-type", path, _SEQUENCES, stop)
        return
    kinds = [
        int if is_integer(item) else next((k for k in (str, list) if isinstance(item, k)), None)
        for item in stop
    ]
    odd = next((i for i, kind in enumerate(kinds) if kind is None or kind is not kinds[0]), None)
    if odd is not None:
        code = "invalid-type" if kinds[odd] is None else "invalid-value"
        found = "a mixed list" if kinds[odd] else f"a list with {show(stop[odd])} in it"
        message = f"{quote(path)} must be {_SEQUENCES}, not {found}"
        yield FieldProblem(code, (*path, odd), message, _LISTS)
    elif stop and kinds[0] is int:
        yield from check_token_ids(stop, path, capabilities)
    else:
        for index, item in enumerate(stop):
            yield from check_value(Text | TokenIds, item, (*path, index), capabilities)


def check_bad_words(words: object, path: Path, capabilities: ModelCapabilities) -> Problems:
    problems = [*check_value(list[Text], words, path, capabilities)]
    yield from problems
    total = sum(len(word.encode()) for word in cast(list[str], [] if problems else words))
    if total > MAX_BAD_WORDS_LENGTH:
        message = f"{quote(path)} holds {total} bytes; at most {MAX_BAD_WORDS_LENGTH} are allowed"
        yield FieldProblem("invalid-value", path, message)


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
        yield from check_number(bias, (*path, key), _BIAS)


def check_json_schema(value: object, path: Path, _: ModelCapabilities) -> Problems:
    if not isinstance(value, dict | bool):
        yield wrong("invalid-type", path, "a JSON Schema: an object, true or false", value)
        return
    try:
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError, RecursionError):
        what = "only values of JSON: no NaN, Infinity or endless nesting"
        yield FieldProblem("invalid-value", path, f"{quote(path)} must be JSON: {what}")


States = dict[str, list[Transition]]


def initial_state_of(request: Request) -> str | None:
    if request.initial_state is not None or request.states is None:
        return request.initial_state
    return next(name for name in request.states if name != ANY_STATE)


def check_states(states: object, path: Path, capabilities: ModelCapabilities) -> Problems:
    if not isinstance(states, dict):
        yield wrong("invalid-type", path, "an object of states", states)
        return
    if not states.keys() - {ANY_STATE}:
        ways_out = f'"{ANY_STATE}" is not a state: ' if states else ""
        hint = ways_out + 'add one, such as "text": []'
        yield FieldProblem("invalid-value", path, f"{quote(path)} declares no state", hint)
    for name, transitions in states.items():
        if not isinstance(name, str) or not 1 <= len(name) <= MAX_NAME or not is_text(name):
            expected = f"a state's name is a string of 1 to {MAX_NAME} characters"
            message = f"{quote(path)}: {expected}, not {show(name)}"
            yield FieldProblem("invalid-value", path, message)
            continue
        if not isinstance(transitions, list):
            yield wrong("invalid-type", (*path, name), "a list of transitions", transitions)
            continue
        for index, transition in enumerate(transitions):
            place = (*path, name, index)
            if not isinstance(transition, Transition):
                yield wrong("invalid-type", place, "an object with `on` and `to`", transition)
                continue
            yield from check_value(Text | TokenIds, transition.on, (*place, "on"), capabilities)
            to: object = transition.to
            if to is not None and not isinstance(to, str):
                yield wrong("invalid-type", (*place, "to"), "the name of a state or null", to)
            elif to is not None and (to not in states or to == ANY_STATE):
                message = f"{quote((*place, 'to'))} {show(to)} is not declared; {_declared(states)}"
                yield FieldProblem("invalid-value", (*place, "to"), message)


def _declared(states: Mapping[Any, object]) -> str:
    names = [show(name) for name in states if name != ANY_STATE]
    if not names:
        return "no state is"
    more = f" and {len(names) - MAX_NAMED} more" if len(names) > MAX_NAMED else ""
    return f"the states are {', '.join(names[:MAX_NAMED])}{more}"


def find_doubled_markers(states: States) -> Problems:
    def key_of(way: Transition) -> str | tuple[int, ...]:
        return way.on if isinstance(way.on, str) else tuple(way.on)

    everywhere = {key_of(transition) for transition in states.get(ANY_STATE, [])}
    for name, transitions in states.items():
        seen = set() if name == ANY_STATE else {*everywhere}
        for index, transition in enumerate(transitions):
            if key_of(transition) in seen:
                path = ("states", name, index, "on")
                also = "" if name == ANY_STATE else f' or "{ANY_STATE}"'
                message = f"{quote(path)}: state {show(name)}{also} has this marker already"
                yield FieldProblem("invalid-value", path, message)
            seen.add(key_of(transition))


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


_CHECKS: dict[str, Callable[[Any, Path, ModelCapabilities], Problems]] = {
    "prompt": check_prompt,
    "stop_sequence": check_stop_sequence,
    "bad_words": check_bad_words,
    "logit_bias": check_logit_bias,
    "json_schema": check_json_schema,
    "states": check_states,
}


def check_field(field: Field, value: Any, capabilities: ModelCapabilities) -> list[FieldProblem]:
    path = (field.name,)
    if field.name in (*MARKER_FIELDS, "bad_words") and _is_huge(value):
        message = (
            f"{quote(path)} holds more than {MAX_PARTS} token ids and characters; "
            f"at most {MAX_STOP_LENGTH} are allowed"
        )
        return [FieldProblem("invalid-value", path, message)]
    if (check := _CHECKS.get(field.name)) is not None:
        problems = check(value, path, capabilities)
    else:
        problems = check_value(field.type, value, path, capabilities, field.unit)
    return [*islice(problems, MAX_PROBLEMS)]


def _is_huge(value: object, depth: int = 2) -> bool:
    items = [*value.values()] if isinstance(value, dict) else value
    if not isinstance(items, str | list):
        return False
    return len(items) > MAX_PARTS or (depth > 0 and any(_is_huge(i, depth - 1) for i in items))


def look_closely(request: Request, capabilities: ModelCapabilities) -> list[FieldProblem]:
    """Return everything wrong with a request; bad fields have no part in the rules of several."""
    problems: list[FieldProblem] = []
    for name, field in REQUEST_FIELDS.items():
        value = getattr(request, name)
        if value is not field.default:
            problems += check_field(field, value, capabilities)
    bad = {str(problem.path[0]) for problem in problems}
    if bad:
        defaults = {name: REQUEST_FIELDS[name].default for name in bad}
        request = replace(request, **defaults | ({"prompt": ""} if "prompt" in bad else {}))
    problems += [
        problem
        for problem, other in find_conflicts(request)
        if problem.path[0] not in bad and other not in bad
    ]
    return [*problems, *find_unserved(request, capabilities)]


def _text_length(marker: object) -> int:
    """Return the token ids and UTF-8 bytes of all stops in a field."""
    if isinstance(marker, str):
        return len(marker.encode())
    if isinstance(marker, dict):
        marker = [*marker.values()]
    if isinstance(marker, list):
        return sum(map(_text_length, marker))
    if isinstance(marker, Transition):
        return _text_length(marker.on)
    return 0 if marker is None else 1


# -- fields together -------------------------------------------------------------------------------


def find_conflicts(request: Request) -> Iterator[tuple[FieldProblem, str | None]]:
    """Yield what is wrong between fields, each with the other field that it depends on."""
    values = zip(REQUEST_FIELDS.items(), astuple(request), strict=False)
    asked = {
        name: field
        for (name, field), value in values
        if value is not field.default and field.asks(value)
    }
    temperature: float | None = request.temperature
    if isinstance(request, ServerRequest) and "temperature" not in request.stated:
        temperature = None  # the server has its own default
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
            message = (
                f"`n` is {request.n}, but {request.num_beams} beams give at most as many outputs"
            )
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


# -- the model and the batch -----------------------------------------------------------------------


def num_slots_needed(request: Request) -> int:
    """Return the slots of one admission: its beams, or a sample and its negative prompt."""
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
        yield from find_unsent(request, capabilities, capabilities.served)
        yield from find_uncompiled(request, capabilities)
        return
    if request.extra_body:
        message = "`extra_body` is for servers, and this model is local"
        yield FieldProblem("unsupported-model", ("extra_body",), message, "leave it out")
    if not capabilities.gives_logits:
        for name in logit_fields_of(request):
            message = f"`{name}` needs a model that gives logits; this one gives only tokens"
            yield FieldProblem("unsupported-model", (name,), message)
    if request.prompt_logprobs is not None and not capabilities.scores_prompts:
        message = (
            "`prompt_logprobs` needs logits after every token of a prompt; "
            "this model gives only those after the last"
        )
        hint = "drop it; in rows of completions, drop `echo` or `logprobs`"
        yield FieldProblem("unsupported-model", ("prompt_logprobs",), message, hint)
    needed = num_slots_needed(request)
    if capabilities.num_slots is not None and needed > capabilities.num_slots:
        name = "num_beams" if request.num_beams > 1 else "cfg_scale"
        message = (
            f"`{name}` {getattr(request, name)} needs {needed} slots at once, "
            f"and the batch has {capabilities.num_slots}"
        )
        yield FieldProblem("too-few-slots", (name,), message, f"use a batch of {needed} or more")
    yield from find_uncompiled(request, capabilities)
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


def find_unsent(
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
        message = "`prompt` has segments, which servers do not support"
        yield FieldProblem("unsupported-model", ("prompt",), message, "use a text, or token ids")
    if request.session is not None and isinstance(prompt, list):
        message = "`prompt` has token ids, but a session with a server needs texts"
        yield FieldProblem("unsupported-model", ("prompt",), message, "give a text")
    for name in sorted(OF_STREAMS & {name for name, value in extra.items() if value is not None}):
        message = f"`extra_body.{name}` is set by batchdecode: each output is its own stream"
        path = ("extra_body", name)
        yield FieldProblem("conflicting-fields", path, message, "leave it out", is_key=True)
    stops = request.stop_sequence
    if isinstance(stops, list) and not all(isinstance(stop, str) for stop in stops):
        message = "`stop_sequence` has token ids, which servers do not support"
        yield FieldProblem("unsupported-model", ("stop_sequence",), message, "give texts")


def find_uncompiled(request: Request, capabilities: ModelCapabilities) -> Iterator[FieldProblem]:
    for name in constraint_fields_of(request):
        if not capabilities.has_eos:
            message = f"`{name}` needs a model that has an end-of-sequence token; this one has none"
            yield FieldProblem("unsupported-model", (name,), message)
        elif capabilities.check_constraint is not None:
            try:
                capabilities.check_constraint(name, getattr(request, name))
            except GrammarError as error:
                problem = FieldProblem("invalid-grammar", error.path, "")
                yield replace(problem, message=f"`{problem.field}`: {error}")
            except BatchdecodeError as error:
                yield FieldProblem("unsupported-model", (name,), f"`{name}`: {error}")


# -- the fast path: one conversion in C, then what types cannot state ------------------------------
#
# Rule: it never accepts a bad request; a good one it may leave to `look_closely`.

_WITHOUT_PARTS = {str, int, float, bool, type(None)}
_KINDS_OF_IDS = ({int}, {list})
_MAX_STOPS = 16  # in each dimension: three fields of 16 x 16 stay below MAX_STOP_LENGTH

# Of the fields that are not plain, _FREE have no rule beyond their type, and _COMPOSED are values
# with parts. A request with values other than defaults outside _FREE is examined further.
_WITH_RULES = {"n", "best_of", "min_tokens", "num_beams", "cfg_scale", "prompt_logprobs", "heal"}
_FREE, _COMPOSED = set[str](), list[Field]()
for _name, _field in [*REQUEST_FIELDS.items()][NUM_PLAIN:]:
    if _field.range is None and _field.choices is None:
        _COMPOSED.append(_field)
    elif _field.needs is None and _name not in _WITH_RULES and _FREE.isdisjoint(_field.excludes):
        _FREE.add(_name)
_bound_values_of = itemgetter(
    *(at for at, name in enumerate([*REQUEST_FIELDS][NUM_PLAIN:]) if name not in _FREE)
)


def checked_copy(request: Request, capabilities: ModelCapabilities) -> Request | list[FieldProblem]:
    """Return an equal request that shares no list with `request`, or its problems."""
    copy = quick_copy(request, capabilities)
    if copy is not None and not (copy.json_schema or copy.states or copy.extra_body):
        return copy
    problems = [] if copy is not None else look_closely(request, capabilities)
    if problems:
        return problems
    values = zip(request.__struct_fields__, astuple(request), strict=True)
    parts = {  # deepcopy is slow for long lists of numbers or texts
        name: [*value]
        if type(value) is list and _WITHOUT_PARTS.issuperset(map(type, value))
        else deepcopy(value)
        for name, value in values
        if type(value) not in _WITHOUT_PARTS
    }
    return replace(copy or request, **parts)


def find_problems(request: Request, capabilities: ModelCapabilities) -> list[FieldProblem]:
    """Return everything wrong with a request for that model."""
    is_right = quick_copy(request, capabilities) is not None
    return [] if is_right else look_closely(request, capabilities)


def quick_copy(request: Request, capabilities: ModelCapabilities) -> Request | None:
    """Return an equal request with lists of its own; None if it needs a closer look."""
    if request.__struct_fields__ != Request.__struct_fields__:
        return None  # a subclass with more fields
    try:
        checked = checked_type(capabilities.vocab_size, Request)
        copy = msgspec.convert(request, checked, from_attributes=True)
    except (msgspec.ValidationError, UnicodeEncodeError, AttributeError, TypeError):
        return None  # the other errors: a lone surrogate, values that are not JSON's
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
    """Return whether a request is valid; its fields have their types."""
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
        is_local = capabilities.gives_logits and capabilities.served is None
        if not (is_local and _bound_values_of(rare) == _bound_values_of(PLAIN_VALUES)):
            for field in _COMPOSED:
                value = getattr(request, field.name)
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
def checked_type(vocab_size: int | None, base: type[Request]) -> type[Request]:
    """Return a type that accepts only valid requests, except for what `goes_together` checks.

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
    made = msgspec.defstruct("CheckedRequest", fields, bases=(base,), frozen=True, gc=False)
    return cast(type[Request], made)
