"""Which check each field of a request has to pass by itself, unless it has its default."""

import json

from batcher.errors import FieldProblem, Path, describe
from batcher.validation.capabilities import ModelCapabilities
from batcher.validation.prompts import check_negative_prompt, check_prompt
from batcher.validation.ranges import LOGIT_BIAS, RANGES, check_number, check_ranged
from batcher.validation.states import check_states
from batcher.validation.stops import (
    MAX_STOP_LENGTH,
    bounded,
    check_stop,
    check_stop_sequence,
    check_stop_token,
)
from batcher.validation.values import (
    MAX_SHOWN,
    Check,
    Problems,
    check_flag,
    check_string,
    check_strings,
    check_token_ids,
    largest_token,
    quote,
    show,
    wrong,
)

MAX_BAD_WORDS_LENGTH = MAX_STOP_LENGTH  # all of one request together, in UTF-8 bytes


def _check_text(value: object, path: Path, _: ModelCapabilities) -> Problems:
    yield from check_string(value, path, "a string")


def _check_filled_text(value: object, path: Path, _: ModelCapabilities) -> Problems:
    yield from check_string(value, path, "a string")
    if isinstance(value, str) and not value:
        message = f"{quote(path)} is empty"
        yield FieldProblem("invalid-value", path, message, "leave it out")


def _check_grammar(value: object, path: Path, _: ModelCapabilities) -> Problems:
    yield from check_string(value, path, "a string")
    if isinstance(value, str) and not value:
        yield FieldProblem("invalid-value", path, f"{quote(path)} is empty: it has no rule")


def _check_json_schema(value: object, path: Path, _: ModelCapabilities) -> Problems:
    if not isinstance(value, dict | bool):
        yield wrong("invalid-type", path, "a JSON Schema: an object, true or false", value)
        return
    try:
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        yield FieldProblem("invalid-value", path, f"{quote(path)} is not JSON: {describe(error)}")


def _check_choice(value: object, path: Path, _: ModelCapabilities) -> Problems:
    yield from check_strings(value, path)
    if isinstance(value, list) and not value:
        message = f"{quote(path)} is empty: there is nothing to choose from"
        yield FieldProblem("invalid-value", path, message)


def _check_bad_words(words: object, path: Path, _: ModelCapabilities) -> Problems:
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


def _check_allowed(value: object, path: Path, capabilities: ModelCapabilities) -> Problems:
    if not isinstance(value, list):
        yield wrong("invalid-type", path, "a list of token ids", value)
    elif not value:
        yield FieldProblem("invalid-value", path, f"{quote(path)} is empty: no token is allowed")
    else:
        yield from check_token_ids(value, path, capabilities)


def _check_logit_bias(biases: object, path: Path, capabilities: ModelCapabilities) -> Problems:
    if not isinstance(biases, dict):
        yield wrong("invalid-type", path, "an object of token ids and numbers", biases)
        return
    largest = largest_token(capabilities)
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
        yield from check_number(bias, (*path, key), LOGIT_BIAS)


def _is_token_key(key: object, largest: int) -> bool:
    """Return whether `key` is a token id as a string, written in the one way there is."""
    if not isinstance(key, str) or not key.isascii() or not key.isdigit():
        return False
    return len(key) <= len(str(largest)) and str(int(key)) == key and int(key) <= largest


def _check_early_stopping(value: object, path: Path, _: ModelCapabilities) -> Problems:
    expected = 'true, false or "never"'
    if not isinstance(value, bool | str):
        yield wrong("invalid-type", path, expected, value)
    elif value not in {True, False, "never"}:
        yield wrong("invalid-value", path, expected, value)


def _check_logprobs_mode(value: object, path: Path, _: ModelCapabilities) -> Problems:
    expected = '"raw" or "processed"'
    if not isinstance(value, str):
        yield wrong("invalid-type", path, expected, value)
    elif value not in {"raw", "processed"}:
        yield wrong("invalid-value", path, expected, value)


CHECKS: dict[str, Check] = {
    **dict.fromkeys(RANGES, check_ranged),
    "id": _check_text,
    "prompt": check_prompt,
    "stop_token": bounded(check_stop_token),
    "stop_sequence": bounded(check_stop_sequence),
    "stop": bounded(check_stop),
    "ignore_eos": check_flag,
    "session": _check_filled_text,
    "cache_salt": _check_filled_text,
    "logit_bias": _check_logit_bias,
    "allowed_token_ids": _check_allowed,
    "bad_words": bounded(_check_bad_words),
    "negative_prompt": check_negative_prompt,
    "logprobs_mode": _check_logprobs_mode,
    "echo": check_flag,
    "include_stop_str_in_output": check_flag,
    "early_stopping": _check_early_stopping,
    "json_schema": _check_json_schema,
    "regex": _check_text,
    "choice": _check_choice,
    "lark": _check_grammar,
    "gbnf": _check_grammar,
    "heal": check_flag,
    "states": bounded(check_states),
    "initial_state": _check_text,
}
