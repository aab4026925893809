"""Stops and states: what may stand in their fields, and how much all of them may hold together."""

from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any

from batcher.errors import FieldProblem, Path
from batcher.request import Request, Transition
from batcher.requests.values import (
    MAX_SHOWN,
    Check,
    ModelCapabilities,
    Problems,
    check_string,
    check_strings,
    check_text_or_tokens,
    check_token_id,
    check_token_ids,
    is_integer,
    is_text,
    quote,
    show,
    wrong,
)

ANY_STATE = "*"  # its transitions leave every state
MAX_NAMED = 8  # states that a message lists
MAX_NAME = MAX_SHOWN  # characters, so that a message can hold one
MAX_STOP_LENGTH = 1024  # all stops of one request together, in token ids and UTF-8 bytes
MARKER_FIELDS = ("stop_token", "stop_sequence", "stop", "states")

_MAX_PARTS = 4 * MAX_STOP_LENGTH  # above it the rest is not looked at
_NOTHING = object()
_MAX_NESTED = 4  # a marker in a transition in a list in states

_SEQUENCE_KINDS = (
    "a list of token ids, a list of such lists, a string or a list of strings",
    "a list of token ids is one sequence, a list of lists or of strings several; do not mix them",
)


States = dict[str, list[Transition]]


def bounded(check: Check) -> Check:
    """Return `check`, preceded by one that refuses what is far too much and counts no further."""

    def checked(value: object, path: Path, capabilities: ModelCapabilities) -> Problems:
        parts = _parts(value, _MAX_NESTED)
        if next(islice(parts, _MAX_PARTS, None), _NOTHING) is _NOTHING:
            yield from check(value, path, capabilities)
            return
        message = (
            f"{quote(path)} holds more than {_MAX_PARTS} token ids and characters; "
            f"at most {MAX_STOP_LENGTH} are allowed"
        )
        yield FieldProblem("invalid-value", path, message)

    return checked


def _parts(value: object, depth: int) -> Iterator[object]:
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
    """Yield the problems of what is neither a token id nor a list of them."""
    if isinstance(stop, list):
        yield from check_token_ids(stop, path, capabilities)
    elif is_integer(stop):
        yield from check_token_id(stop, path, capabilities)
    else:
        yield wrong("invalid-type", path, "a token id or a list of token ids", stop)


def check_stop_sequence(stop: object, path: Path, capabilities: ModelCapabilities) -> Problems:
    """Yield the problems of what is neither a sequence nor a list of several of one kind."""
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
        yield from _check_texts(stop, path)
    else:
        for index, item in enumerate(stop):
            yield from check_marker(item, (*path, index))
            yield from check_token_ids(item, (*path, index), capabilities)


def check_stop(stop: object, path: Path, _: ModelCapabilities) -> Problems:
    """Yield the problems of what is neither a text nor a list of texts."""
    if isinstance(stop, list):
        yield from _check_texts(stop, path)
    else:
        yield from _check_text(stop, path, "a string or a list of strings")


def check_marker(marker: object, path: Path) -> Problems:
    """Yield the problem of an empty text or list."""
    if isinstance(marker, str | list) and not marker:
        message = f"{quote(path)} is empty, so it would match everywhere"
        yield FieldProblem("invalid-value", path, message, "leave it out")


def check_total_length(request: Request) -> Problems:
    """Yield the problem of stops and markers that hold too much together."""
    lengths = {name: _length(getattr(request, name)) for name in MARKER_FIELDS}
    total = sum(lengths.values())
    if total > MAX_STOP_LENGTH:
        message = (
            f"the stops hold {total} token ids and bytes of text together; "
            f"at most {MAX_STOP_LENGTH} are allowed"
        )
        yield FieldProblem("invalid-value", (max(lengths, key=lengths.__getitem__),), message)


def _length(marker: object) -> int:
    """Return the number of token ids and UTF-8 bytes in a valid stop or in states."""
    if isinstance(marker, str):
        return len(marker.encode())
    if isinstance(marker, list):
        return sum(map(_length, marker))
    if isinstance(marker, dict):
        return sum(map(_length, marker.values()))
    if isinstance(marker, Transition):
        return _length(marker.on)
    return 0 if marker is None else 1


def _check_text(stop: object, path: Path, expected: str) -> Problems:
    yield from check_string(stop, path, expected)
    yield from check_marker(stop, path)


def _check_texts(stops: list[object], path: Path) -> Problems:
    yield from check_strings(stops, path)
    for index, stop in enumerate(stops):
        yield from check_marker(stop if isinstance(stop, str) else None, (*path, index))


def _kind(item: object) -> type | None:
    """Return int, str or list for what a stop_sequence list may hold, None for anything else."""
    if is_integer(item):
        return int
    return next((kind for kind in (str, list) if isinstance(item, kind)), None)


# -- states ----------------------------------------------------------------------------------------


def initial_state_of(request: Request) -> str | None:
    """Return the state in which a valid `request` begins: the first declared, unless it says."""
    if request.initial_state is not None or request.states is None:
        return request.initial_state
    return next(name for name in request.states if name != ANY_STATE)


def check_states(states: object, path: Path, capabilities: ModelCapabilities) -> Problems:
    """Yield the problems of what is no object of states with their transitions."""
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
    """Yield the transitions whose marker the same state, or any state, has already."""
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
    """Yield the states that the valid ones `states` never lead to."""
    initial = initial_state_of(request)
    if initial not in states or initial == ANY_STATE:
        message = f"`initial_state` {show(initial)} is not declared; {_declared(states)}"
        yield FieldProblem("invalid-value", ("initial_state",), message)
        return
    reached: set[str] = set()
    open_ends = {initial} | _destinations(states.get(ANY_STATE, []))
    while open_ends:
        name = open_ends.pop()
        reached.add(name)
        open_ends |= _destinations(states[name]) - reached
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
    yield from check_marker(on, (*path, "on"))
    to: object = transition.to
    if to is None:
        return
    if not isinstance(to, str):
        yield wrong("invalid-type", (*path, "to"), "the name of a state or null", to)
    elif to not in states or to == ANY_STATE:
        message = f"{quote((*path, 'to'))} {show(to)} is not declared; {_declared(states)}"
        yield FieldProblem("invalid-value", (*path, "to"), message)


def _destinations(transitions: list[Transition]) -> set[str]:
    return {way.to for way in transitions if way.to is not None}


def _declared(states: Mapping[Any, object]) -> str:
    names = [show(name) for name in states if name != ANY_STATE]
    if not names:
        return "no state is"
    more = f" and {len(names) - MAX_NAMED} more" if len(names) > MAX_NAMED else ""
    return f"the states are {', '.join(names[:MAX_NAMED])}{more}"


def _key(transition: Transition) -> str | tuple[int, ...]:
    return transition.on if isinstance(transition.on, str) else tuple(transition.on)
