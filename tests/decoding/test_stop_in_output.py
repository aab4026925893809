"""Stops of whole runs; with `include_stop_str_in_output` the text ends with the stop."""

import pytest

from batcher import decode
from batcher.request import Request

PROMPTS = ["Go on", "Sing", "Once upon a time", ""]
STOPS = [
    {"stop": "r. "},
    {"stop": ["e", " the"]},
    {"stop": "r—"},
    {"stop_token": 48},
    {"stop_sequence": [[48, 275], [464, 48]]},
    {"stop": ".", "min_tokens": 12},
    {},
]


def told(request):
    """Return the result of a request, and its text as it was streamed."""
    pieces = []
    [result] = decode([request], on_token=lambda event: pieces.append(event.text))
    return result, "".join(pieces)


@pytest.mark.parametrize("stop", STOPS, ids=str)
@pytest.mark.parametrize("prompt", PROMPTS)
def test_the_text_goes_up_to_the_end_of_the_stop(prompt, stop):
    fields = {"prompt": prompt, "max_tokens": 40, **stop}
    cut, _ = told(Request(**fields))
    whole, streamed = told(Request(**fields, include_stop_str_in_output=True))
    assert whole.tokens == cut.tokens
    assert whole.stop_reason == cut.stop_reason
    assert whole.text.startswith(cut.text)
    rest = whole.text.removeprefix(cut.text)
    if isinstance(cut.stop_reason, str):
        assert rest == cut.stop_reason
    else:
        assert bool(rest) == (cut.stop_reason is not None)
    assert streamed == whole.text
    if not isinstance(cut.stop_reason, str):  # nothing is behind a stop of ids, or none at all
        alone = Request(prompt=prompt, max_tokens=len(cut.tokens), ignore_eos=True)
        assert whole.text == decode([alone])[0].text


def test_a_session_goes_on_from_the_same_tokens():
    turns = [
        {"prompt": "Go on", "session": "s", "stop": ".", "max_tokens": 40},
        {"prompt": "And", "session": "s", "max_tokens": 8},
    ]
    kept = [{**turns[0], "include_stop_str_in_output": True}, turns[1]]
    assert decode(kept)[1].tokens == decode(turns)[1].tokens


def test_a_stop_never_looks_into_the_prompt():
    request = Request(prompt=[97, 97], max_tokens=3, stop_sequence=[97, 97, 97])
    [result] = decode([request], model=lambda prefixes: [97 for _ in prefixes])
    assert (len(result.tokens), result.finish_reason) == (3, "stop")
    short = Request(prompt=[97, 97], max_tokens=2, stop_sequence=[97, 97, 97])
    [result] = decode([short], model=lambda prefixes: [97 for _ in prefixes])
    assert result.finish_reason == "length"


@pytest.mark.parametrize("stop_token", [2**31 - 1, [5, 10_000_000]])
def test_ids_may_be_as_large_as_ids_can_be(stop_token):
    request = Request(prompt="", max_tokens=2, stop_token=stop_token)
    [result] = decode([request], model=lambda prefixes: [[7, 10_000_000][len(p)] for p in prefixes])
    assert (result.finish_reason == "stop") == (stop_token != 2**31 - 1)
