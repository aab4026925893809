"""Advice for an input that is no JSON lines: the jq command that makes them of it."""

import shlex
from typing import NamedTuple


class _Form(NamedTuple):
    """What an input is instead, and the arguments of jq that make JSON lines of it."""

    name: str
    arguments: str


_OBJECTS = _Form("a JSON array", "-c '.[]'")
_STRINGS = _Form("a JSON array of prompts", "-c '.[] | {prompt: .}'")
_PRETTY = _Form("JSON over several lines", "-c .")
_TEXTS = _Form("prompts in quotes", "-c '{prompt: .}'")
_PLAIN = _Form("plain prompts", "-Rc '{prompt: .}'")


def advice_for(line: str, filename: str) -> str | None:
    """Return what to do about an input whose first line is this; None if it is meant as a request.

    filename: as messages call the input.
    """
    form = _form_of(line.strip())
    if form is None:
        return None
    file = "" if filename == "<stdin>" else f" {shlex.quote(filename)}"
    return f"{form.name}? JSON lines of it: jq {form.arguments}{file}"


def _form_of(line: str) -> _Form | None:
    if line.startswith("["):
        return _STRINGS if line[1:].lstrip().startswith('"') else _OBJECTS
    if line.startswith("{"):
        return _PRETTY if line.endswith(("{", "[", ",")) else None
    return _TEXTS if line.startswith('"') else _PLAIN
