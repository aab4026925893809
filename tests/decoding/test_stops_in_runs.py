"""Stops of whole runs."""

import pytest

from batcher import Request, decode


def test_a_stop_never_looks_into_the_prompt() -> None:
    request = Request(prompt=[97, 97], max_tokens=3, stop_sequence=[97, 97, 97])
    [result] = decode([request], model=lambda prefixes: [97 for _ in prefixes])
    assert (len(result.tokens), result.finish_reason) == (3, "stop")
    short = Request(prompt=[97, 97], max_tokens=2, stop_sequence=[97, 97, 97])
    [result] = decode([short], model=lambda prefixes: [97 for _ in prefixes])
    assert result.finish_reason == "length"


@pytest.mark.parametrize("stop_token", [2**31 - 1, [5, 10_000_000]])
def test_ids_may_be_as_large_as_ids_can_be(stop_token: int | list[int]) -> None:
    request = Request(prompt="", max_tokens=2, stop_token=stop_token)
    [result] = decode([request], model=lambda prefixes: [[7, 10_000_000][len(p)] for p in prefixes])
    assert (result.finish_reason == "stop") == (stop_token != 2**31 - 1)
