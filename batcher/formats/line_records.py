"""The records inside a request, made of the objects of a line: segments of a prompt, transitions.

Rule: what is no such object stays as it is, for the rules of validation to say what is wrong.
"""

from collections.abc import Callable, Iterator
from typing import Any

from batcher.request import PromptSegment, Transition

SEGMENT_FIELDS = PromptSegment.__struct_fields__
TRANSITION_FIELDS = Transition.__struct_fields__


def find_segments(prompt: object) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the objects where the segments of `prompt` belong: index and object."""
    for index, segment in enumerate(prompt if isinstance(prompt, list) else ()):
        if isinstance(segment, dict):
            yield index, segment


def find_transitions(states: object) -> Iterator[tuple[str, int, dict[str, Any]]]:
    """Yield the objects where the transitions of `states` belong: state, index and object."""
    for name, transitions in states.items() if isinstance(states, dict) else ():
        for index, transition in enumerate(transitions if isinstance(transitions, list) else ()):
            if isinstance(transition, dict):
                yield name, index, transition


def build_prompt(prompt: object) -> Any:
    """Return `prompt` with a PromptSegment for each object where one belongs."""
    if not isinstance(prompt, list):
        return prompt
    built: list[Any] = list(prompt)
    for index, segment in find_segments(prompt):
        given = {name: segment.get(name) for name in SEGMENT_FIELDS}
        built[index] = PromptSegment(**{n: v for n, v in given.items() if v is not None})
    return built


def build_states(states: object) -> Any:
    """Return `states` with a Transition for each object where one belongs."""
    if not isinstance(states, dict):
        return states
    built = {n: list(part) if isinstance(part, list) else part for n, part in states.items()}
    for name, index, transition in find_transitions(states):
        on: Any = transition.get("on")
        built[name][index] = Transition(on, transition.get("to"))
    return built


# By the name that the line gives the field: `prompt_tokens` holds no segments.
BUILDERS: dict[str | int, Callable[[object], Any]] = {
    "prompt": build_prompt,
    "states": build_states,
}
