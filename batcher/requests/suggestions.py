"""What a person may have meant who names a field that does not exist."""

from collections.abc import Iterator, Mapping
from functools import lru_cache

from batcher.errors import FieldProblem, Path
from batcher.requests.values import cut

HINT = "did you mean `{}`?"

# What other tools call a field of ours.
_OTHER_NAMES = {
    "content": "prompt",
    "conversation_id": "session",
    "conversations": "messages",
    "ebnf": "gbnf",
    "grammar": "gbnf",
    "guidance_scale": "cfg_scale",
    "input": "prompt",
    "inputs": "prompt",
    "instruction": "prompt",
    "max_length": "max_tokens",
    "max_new_tokens": "max_tokens",
    "max_output_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
    "n_predict": "max_tokens",
    "n_probs": "logprobs",
    "num_predict": "max_tokens",
    "num_return_sequences": "n",
    "query": "prompt",
    "question": "prompt",
    "repeat_penalty": "repetition_penalty",
    "session_id": "session",
    "return_logprob": "logprobs",
    "stop_sequences": "stop",
    "stop_strings": "stop",
    "temp": "temperature",
    "text": "prompt",
    "token_healing": "heal",
    "use_beam_search": "num_beams",
}


def unknown_names(
    value: Mapping[str, object], path: Path, allowed: tuple[str, ...]
) -> Iterator[FieldProblem]:
    """Yield the problems of names in the object at `path` that are not `allowed`."""
    for name in value:
        if name not in allowed:
            hint, message = suggest(name, allowed), f"unknown field `{cut(name)}`"
            yield FieldProblem("unknown-field", (*path, cut(name)), message, hint, is_key=True)


@lru_cache(maxsize=256)  # a field misspelt once is misspelt on every line
def suggest(name: str, allowed: tuple[str, ...]) -> str | None:
    """Return a hint at the one of the `allowed` names that is meant; None if none is like it."""
    found = own_name(name, allowed)
    if found is not None:
        return HINT.format(found)
    import difflib  # noqa: PLC0415  # only bad lines pay for it

    matches = difflib.get_close_matches(name.lower(), allowed, n=1)
    return HINT.format(matches[0]) if matches else None


def own_name(name: str, allowed: tuple[str, ...]) -> str | None:
    """Return the one of the `allowed` that has this name here or elsewhere; None for none."""
    found = _OTHER_NAMES.get(name, name)
    return found if found in allowed else None
