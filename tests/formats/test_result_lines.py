"""Results out, and in again, in both forms."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jsonschema import Draft202012Validator
from msgspec.structs import replace

from batcher.errors import (
    CLIENT_FAULTS,
    FIT_ERROR_CODES,
    REQUEST_ERROR_CODES,
    RUN_ERROR_CODES,
    BatchdecodeError,
)
from batcher.requests.lines import RequestParser
from batcher.requests.result_rows import encode_openai_row
from batcher.requests.results import decode_result_line, encode_result, make_rejected_result
from batcher.requests.schema import make_schema
from batcher.requests.validation import ModelCapabilities
from batcher.result import (
    ErrorInfo,
    PromptLogprob,
    Result,
    Segment,
    StepTimes,
    TokenLogprob,
    TopLogprob,
    Usage,
)


def encode_row(*results, form="completion"):
    return encode_openai_row(list(results), "simulated", form, bytes_of)


def encode_chat(*results):
    return encode_row(*results, form="chat")


SCHEMA = Draft202012Validator(make_schema("result"))


def bytes_of(token):
    return "é\n ".encode()[token % 4 :]


RESULT = Result(
    id="a",
    index=0,
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
        '{"id":"a","index":0,"text":"héllo","tokens":[17,4],"finish_reason":"stop",'
        '"stop_reason":4,"usage":{"prompt_tokens":5,"completion_tokens":2},"slot":0,'
        '"steps":{"arrived":0,"admitted":0,"first_token":0,"finished":1}}\n'
    )


def test_a_row_is_a_text_completion():
    assert json.loads(encode_row(RESULT)) == {
        "id": "batch_req_a",
        "custom_id": "a",
        "response": {
            "status_code": 200,
            "request_id": "req-a",
            "body": {
                "id": "cmpl-a",
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
                        "batchdecode": {
                            "index": 0,
                            "tokens": [17, 4],
                            "usage": {"prompt_tokens": 5, "completion_tokens": 2},
                            "slot": 0,
                            "steps": {"arrived": 0, "admitted": 0, "first_token": 0, "finished": 1},
                        },
                    }
                ],
                "usage": {"prompt_tokens": 5, "completion_tokens": 2, "total_tokens": 7},
            },
        },
        "error": None,
    }


def changed(**fields):
    return Result(**{name: getattr(RESULT, name) for name in Result.__struct_fields__} | fields)


def test_a_row_holds_all_results_of_a_request():
    results = [changed(index=2, text="x"), changed(index=0, usage=Usage(5, 40))]
    body = json.loads(encode_row(*results))["response"]["body"]
    assert [(choice["index"], choice["text"]) for choice in body["choices"]] == [
        (0, "x"),
        (1, "héllo"),
    ]
    assert [choice["batchdecode"]["index"] for choice in body["choices"]] == [2, 0]
    assert body["usage"] == {"prompt_tokens": 5, "completion_tokens": 42, "total_tokens": 47}


def test_the_logprobs_of_a_row_are_in_the_form_of_openai():
    logprobs = [
        TokenLogprob(17, -0.5, [TopLogprob(17, -0.5), TopLogprob(4, -2.0)]),
        TokenLogprob(4, -9999.0, []),
    ]
    row = json.loads(encode_row(changed(logprobs=logprobs)))
    assert row["response"]["body"]["choices"][0]["logprobs"] == {
        "tokens": ["token_id:17", "token_id:4"],
        "token_logprobs": [-0.5, -9999.0],
        "top_logprobs": [{"token_id:17": -0.5, "token_id:4": -2.0}, {}],
        "text_offset": [0, 3],
    }


def test_the_logprobs_of_an_echoed_prompt_go_before_those_of_the_output():
    logprobs = [TokenLogprob(4, -0.5, [TopLogprob(4, -0.5)])]
    prompt = [PromptLogprob(3, None, []), PromptLogprob(7, -1.0, [TopLogprob(2, -0.1)])]
    usage = Usage(2, 1)
    result = changed(logprobs=logprobs, prompt_logprobs=prompt, tokens=[4], usage=usage)
    line = encode_row(result, form="echoed completion")
    choice = json.loads(line)["response"]["body"]["choices"][0]
    assert choice["logprobs"] == {
        "tokens": ["token_id:3", "token_id:7", "token_id:4"],
        "token_logprobs": [None, -1.0, -0.5],
        "top_logprobs": [None, {"token_id:2": -0.1}, {"token_id:4": -0.5}],
        "text_offset": [0, 1, 2],
    }
    assert "prompt_logprobs" not in choice["batchdecode"]
    assert decode_result_line(line) == [result]
    apart = json.loads(encode_row(result))["response"]["body"]["choices"][0]
    assert apart["logprobs"]["tokens"] == ["token_id:4"]
    assert len(apart["batchdecode"]["prompt_logprobs"]) == 2


def test_a_row_of_a_chat_is_a_chat_completion():
    logprobs = [TokenLogprob(17, -0.5, [TopLogprob(4, -2.0)])]
    body = json.loads(encode_chat(changed(logprobs=logprobs)))["response"]["body"]
    assert (body["id"], body["object"]) == ("chatcmpl-a", "chat.completion")
    choice = body["choices"][0]
    assert "text" not in choice
    assert choice["message"] == {"role": "assistant", "content": "héllo"}
    assert (choice["finish_reason"], choice["batchdecode"]["tokens"]) == ("stop", [17, 4])
    assert choice["logprobs"] == {
        "content": [
            {
                "token": "token_id:17",
                "logprob": -0.5,
                "bytes": None,
                "top_logprobs": [{"token": "token_id:4", "logprob": -2.0, "bytes": None}],
            }
        ]
    }


def test_a_row_fails_if_one_of_its_choices_does():
    error = ErrorInfo("model-error", "step 3: no")
    row = json.loads(encode_row(RESULT, changed(index=1, finish_reason="error", error=error)))
    assert row["response"]["status_code"] == 500
    assert row["error"] == {"code": "model-error", "message": "step 3: no"}
    choices = row["response"]["body"]["choices"]
    assert ["error" in choice["batchdecode"] for choice in choices] == [False, True]


@pytest.mark.parametrize(
    ("codes", "status"),
    [
        (REQUEST_ERROR_CODES, 400),
        (FIT_ERROR_CODES, 400),
        (RUN_ERROR_CODES.keys() - CLIENT_FAULTS, 500),
        (["kv-too-small", "constraint-error", "too-few-outputs", "content-filter", "refusal"], 400),
    ],
    ids=["request", "fit", "run", "client"],
)
def test_a_failed_row_tells_whose_fault_it_is(codes, status):
    for code in codes:
        error = ErrorInfo(code, "m", line=3, column=5, field="stop[0]")
        row = json.loads(encode_row(changed(error=error, finish_reason="error")))
        assert row["response"]["status_code"] == status
        place = {"line": 3, "column": 5, "field": "stop[0]"}
        assert row["error"] == {"code": code, "message": "m", **place}
        assert row["response"]["body"]["choices"][0]["batchdecode"]["tokens"] == [17, 4]


COUNT = st.integers(0, 2**31)
MAYBE_COUNT = st.none() | COUNT
TEXT = st.text(st.characters(exclude_categories=("Cs",)), max_size=20)
LOGPROB = st.floats(-9999, 0)
TOPS = st.lists(
    st.builds(TopLogprob, COUNT, LOGPROB), max_size=3, unique_by=lambda other: other.token
)
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
    cumulative_logprob=st.none() | LOGPROB,
    logprobs=st.none() | st.lists(st.builds(TokenLogprob, COUNT, LOGPROB, TOPS), max_size=3),
    prompt_logprobs=st.none()
    | st.lists(st.builds(PromptLogprob, COUNT, st.none() | LOGPROB, TOPS), max_size=3),
    score=st.none() | LOGPROB,
    segments=st.none()
    | st.lists(st.builds(Segment, TEXT, TEXT, st.lists(COUNT, max_size=3)), max_size=2),
    constraint=st.sampled_from([None, "complete", "incomplete"]),
    constraint_check=st.sampled_from([None, "none"]),
    constraint_verified=st.sampled_from([None, ("not", "oneOf")]),
    reasoning=st.none() | TEXT,
    refusal=st.none() | TEXT,
    tool_calls=st.none() | st.just([{"id": None, "type": "function", "function": {}}]),
    function_call=st.none() | st.just({"name": "f", "arguments": "{}"}),
    error=st.none() | st.builds(ErrorInfo, TEXT, TEXT, MAYBE_COUNT, MAYBE_COUNT, st.none() | TEXT),
)


@given(RESULTS)
def test_both_forms_hold_the_whole_result(result):
    for encode in (encode_result, encode_row, encode_chat):
        line = encode(result)
        assert line.endswith(b"\n")
        assert line.count(b"\n") == 1
        assert decode_result_line(line) == [result]
        SCHEMA.validate(json.loads(line))


@pytest.mark.parametrize("encode", [encode_result, encode_row, encode_chat])
def test_the_schema_of_results_has_each_field_that_is_always_there(encode):
    line = json.loads(encode(RESULT))
    for name in line:
        assert not SCHEMA.is_valid({k: v for k, v in line.items() if k != name}), name


@given(st.lists(RESULTS, min_size=1, max_size=3), TEXT)
def test_a_row_holds_each_result_whole(results, request_id):
    results = [replace(result, id=request_id) for result in results]
    assert decode_result_line(encode_row(*results)) == results
    assert decode_result_line(encode_chat(*results)) == results


@pytest.mark.parametrize(
    "line",
    [
        *(b"", b"\xff", b'{"id":"a"}', encode_result(RESULT)[:-5], encode_row(RESULT)[:-5]),
        encode_row(RESULT).replace(b'"text"', b'"txet"'),
    ],
)
def test_a_line_that_is_no_result_is_an_error(line):
    with pytest.raises(BatchdecodeError, match="not a result"):
        decode_result_line(line)


@pytest.mark.parametrize(
    ("field", "value"),
    [("tokens", [7]), ("token_logprobs", [0.5, 0.5]), ("top_logprobs", [{"x": "-1.0"}])],
)
def test_logprobs_that_nothing_wrote_are_an_error(field, value):
    row = json.loads(encode_row(changed(logprobs=[TokenLogprob(4, -1.0, [])])))
    row["response"]["body"]["choices"][0]["logprobs"][field] = value
    with pytest.raises(BatchdecodeError, match="not a result"):
        decode_result_line(json.dumps(row).encode())


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"x":1}', "unknown field `x` (and 1 more problem in this line)"),
        (b'{"x":1,"prompt":"","id":"a"}', "unknown field `x`"),
        (b'{"x":1,"id":"a","y":2}', "unknown field `x` (and 2 more problems in this line)"),
    ],
)
def test_a_rejected_line_has_a_result_too(line, message):
    bad = RequestParser(ModelCapabilities()).parse(line, 7)
    result = make_rejected_result(bad.id, bad.problems)
    name = "a" if b"id" in line else "7"
    assert (result.id, result.index, result.finish_reason, result.tokens) == (name, 0, "error", [])
    assert result.error == ErrorInfo("unknown-field", message, line=7, column=2, field="x")
    assert decode_result_line(encode_result(result)) == [result]
