"""Results out, and in again, in both forms."""

import json
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batcher.errors import REQUEST_ERROR_CODES, RUN_ERROR_CODES, BatchdecodeError
from batcher.formats.requests import RequestParser
from batcher.formats.results import (
    decode_result_line,
    encode_openai_row,
    encode_result,
    make_rejected_result,
)
from batcher.request import ErrorInfo, Result, StepTimes, Usage

encode_row = partial(encode_openai_row, model="simulated")

RESULT = Result(
    id="a",
    index=3,
    text="héllo",
    tokens=[17, 4],
    finish_reason="stop",
    stop_reason=4,
    usage=Usage(5, 2),
    slot=0,
    steps=StepTimes(0, 0, 0, 1),
)


def test_a_result_is_the_line_of_the_contract():
    assert encode_result(RESULT).decode() == (
        '{"id":"a","index":3,"text":"héllo","tokens":[17,4],"finish_reason":"stop",'
        '"stop_reason":4,"usage":{"prompt_tokens":5,"completion_tokens":2},"slot":0,'
        '"steps":{"arrived":0,"admitted":0,"first_token":0,"finished":1}}\n'
    )


def test_a_row_is_a_text_completion():
    assert json.loads(encode_openai_row(RESULT, "simulated")) == {
        "id": "batch_req_00000003",
        "custom_id": "a",
        "response": {
            "status_code": 200,
            "request_id": "req-00000003",
            "body": {
                "id": "cmpl-00000003",
                "object": "text_completion",
                "created": 0,
                "model": "simulated",
                "choices": [
                    {
                        "index": 0,
                        "text": "héllo",
                        "finish_reason": "stop",
                        "stop_reason": 4,
                        "logprobs": None,
                    }
                ],
                "usage": {"prompt_tokens": 5, "completion_tokens": 2, "total_tokens": 7},
                "batchdecode": {
                    "index": 3,
                    "tokens": [17, 4],
                    "slot": 0,
                    "steps": {"arrived": 0, "admitted": 0, "first_token": 0, "finished": 1},
                },
            },
        },
        "error": None,
    }


@pytest.mark.parametrize(
    ("codes", "status"),
    [(REQUEST_ERROR_CODES, 400), (RUN_ERROR_CODES, 500)],
    ids=["request", "run"],
)
def test_a_failed_row_tells_whose_fault_it_is(codes, status):
    for code in codes:
        error = ErrorInfo(code, "m", line=3, column=5, field="stop[0]")
        fields = {name: getattr(RESULT, name) for name in Result.__struct_fields__}
        row = json.loads(encode_row(Result(**fields | {"error": error, "finish_reason": "error"})))
        assert row["response"]["status_code"] == status
        assert row["error"] == {
            "code": code,
            "message": "m",
            "line": 3,
            "column": 5,
            "field": "stop[0]",
        }
        assert row["response"]["body"]["batchdecode"]["tokens"] == [17, 4]


COUNT = st.integers(0, 2**31)
MAYBE_COUNT = st.none() | COUNT
TEXT = st.text(st.characters(exclude_categories=("Cs",)), max_size=20)
RESULTS = st.builds(
    Result,
    id=TEXT,
    index=COUNT,
    text=TEXT,
    tokens=st.lists(COUNT, max_size=5),
    finish_reason=st.sampled_from(["stop", "length", "error", "aborted"]),
    stop_reason=st.one_of(st.none(), COUNT, st.lists(COUNT, max_size=3), TEXT),
    usage=st.builds(Usage, COUNT, COUNT),
    slot=MAYBE_COUNT,
    steps=st.builds(StepTimes, MAYBE_COUNT, MAYBE_COUNT, MAYBE_COUNT, MAYBE_COUNT),
    error=st.none() | st.builds(ErrorInfo, TEXT, TEXT, MAYBE_COUNT, MAYBE_COUNT, st.none() | TEXT),
)


@given(RESULTS)
def test_both_forms_hold_the_whole_result(result):
    for encode in (encode_result, encode_row):
        line = encode(result)
        assert line.endswith(b"\n")
        assert line.count(b"\n") == 1
        assert decode_result_line(line) == result


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b"{}",
        b"[]",
        b"\xff",
        b'{"id":"a"}',
        encode_result(RESULT)[:-5],
        encode_row(RESULT)[:-5],
    ],
)
def test_a_line_that_is_no_result_is_an_error(line):
    with pytest.raises(BatchdecodeError, match="not a result"):
        decode_result_line(line)


def test_a_row_without_choices_is_an_error():
    row = json.loads(encode_row(RESULT))
    row["response"]["body"]["choices"] = []
    with pytest.raises(BatchdecodeError, match="not a result"):
        decode_result_line(json.dumps(row).encode())


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"id":"a"}', "field `prompt` is missing"),
        (b'{"id":"a","x":1}', "field `prompt` is missing (and 1 more problem in this line)"),
        (b'{"id":"a","x":1,"y":2}', "field `prompt` is missing (and 2 more problems in this line)"),
    ],
)
def test_a_rejected_line_has_a_result_too(line, message):
    bad = RequestParser(vocab_size=None).parse(line, 7)
    result = make_rejected_result(bad.id, 6, bad.problems)
    assert (result.id, result.index, result.finish_reason, result.tokens) == ("a", 6, "error", [])
    assert result.error == ErrorInfo("missing-field", message, line=7, column=1, field="prompt")
    assert decode_result_line(encode_result(result)) == result
