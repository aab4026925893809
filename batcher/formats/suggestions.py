"""What a person may have meant who names a field that does not exist."""

from functools import lru_cache

HINT = "did you mean `{}`?"

# What other tools call a field of ours.
_OTHER_NAMES = {
    "grammar": "gbnf",
    "conversation_id": "session",
    "guidance_scale": "cfg_scale",
    "guided_choice": "choice",
    "guided_json": "json_schema",
    "guided_regex": "regex",
    "max_completion_tokens": "max_tokens",
    "max_new_tokens": "max_tokens",
    "n_predict": "max_tokens",
    "num_return_sequences": "n",
    "repeat_penalty": "repetition_penalty",
    "response_format": "json_schema",
    "session_id": "session",
    "stop_strings": "stop",
    "stop_token_ids": "stop_token",
    "token_healing": "heal",
}


@lru_cache(maxsize=256)  # a field misspelt once is misspelt on every line
def suggest(name: str, allowed: tuple[str, ...]) -> str | None:
    """Return a hint at the one of the `allowed` names that is meant; None if none is like it."""
    if _OTHER_NAMES.get(name) in allowed:
        return HINT.format(_OTHER_NAMES[name])
    import difflib  # noqa: PLC0415  # only bad lines pay for it

    matches = difflib.get_close_matches(name.lower(), allowed, n=1)
    return HINT.format(matches[0]) if matches else None
