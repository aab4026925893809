"""Lines of many small parts, which take many times their size: refused before they are read."""

import json
import tracemalloc

import pytest
from examples import mostly_heavy

from batcher.requests.lines import MAX_PARTS, BadLine, ParsedLine, RequestParser
from batcher.requests.validation import ModelCapabilities

MANY = 2 * MAX_PARTS


def parse(line):
    return RequestParser(ModelCapabilities()).parse(line, 7)


LINES = {
    "segments": lambda: b'{"prompt":[' + b",".join([b'{"text":"a"}'] * MANY) + b"]}",
    "messages": lambda: (
        b'{"messages":[' + b",".join([b'{"role":"user","content":"a"}'] * MANY) + b"]}"
    ),
    "logit_bias": lambda: (
        b'{"prompt":"a","logit_bias":{' + b",".join(b'"%d":1' % i for i in range(MANY)) + b"}}"
    ),
    "unknown": lambda: b'{"prompt":"a",' + b",".join(b'"x%d":1' % i for i in range(MANY)) + b"}",
    "choice": lambda: b'{"prompt":"a","choice":[' + b",".join([b'"\\"'] * MANY) + b"]}",
    "lists": lambda: b'{"prompt":"a","x":[' + b",".join([b"[]"] * MANY) + b"]}",
    "no JSON": lambda: b'{"prompt":"a' + b'"' * MANY + b'","x":' + b"[" * MANY,
}


@pytest.mark.parametrize("kind", mostly_heavy(LINES, "segments", "unknown", "no JSON"))
def test_a_line_of_too_many_parts_is_refused_before_it_is_read(kind):
    line = LINES[kind]()
    parse(b"")  # imports what only bad lines need
    tracemalloc.start()
    try:
        parsed = parse(line)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert isinstance(parsed, BadLine)
    [problem] = parsed.problems
    assert (parsed.id, problem.code, problem.line) == ("7", "too-many-parts", 7)
    assert peak < 100_000


def test_a_text_may_hold_any_quotes_and_brackets():
    text = '"[{\\' * MANY
    parsed = parse(json.dumps({"prompt": text}).encode())
    assert isinstance(parsed, ParsedLine)
    assert parsed.request.prompt == text
