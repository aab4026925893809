"""What a server answers: the tokens of `decode`, in OpenAI's forms, whole and as streams."""

import json
import re
import threading
from pathlib import Path

import pytest
from in_process import CHATS, COMPLETIONS, asked

from batcher import Engine, Request, SimulatedModel, decode
from batcher.metrics.prometheus import GAUGES
from batcher.metrics.summary import state_of
from batcher.serving.http import Access, BodyReader, Limits
from batcher.settings import SchedulingSettings

ROOT = Path(__file__).parents[2]
PROMPT = "Once upon a time"
SAID = [{"role": "user", "content": "Tell me a story"}]


@asked()
async def test_a_completion_is_what_decode_gives(server):
    answer = await server.post(prompt=PROMPT, max_tokens=8, return_token_ids=True)
    [result] = decode([{"prompt": PROMPT, "max_tokens": 8}])
    body = answer.json()
    [choice] = body["choices"]
    assert answer.status_code == 200
    assert (choice["text"], choice["token_ids"]) == (result.text, result.tokens)
    assert choice["finish_reason"] == "length"
    assert body["usage"] == {"prompt_tokens": 16, "completion_tokens": 8, "total_tokens": 24}
    assert body["object"] == "text_completion"
    assert body["id"] == "cmpl-1"


@asked()
async def test_a_chat_is_a_prompt_by_the_template(server):
    body = (await server.post(CHATS, messages=SAID, max_completion_tokens=5)).json()
    [result] = decode([{"messages": SAID, "max_tokens": 5}])
    assert body["choices"][0]["message"] == {"role": "assistant", "content": result.text}
    assert body["object"] == "chat.completion"


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"temperature": 1.0, "n": 3, "seed": 7},
        {"num_beams": 3, "n": 2},
        {"stop": ["door", " the"]},
        {"logprobs": 0, "temperature": 0.8, "n": 2},
        {"max_tokens": 0},
        {"include_stop_str_in_output": True, "stop": " my"},
        {"states": {"a": [{"on": " my", "to": "b"}], "b": [{"on": ".", "to": None}]}},
    ],
    ids=str,
)
@asked()
async def test_the_chunks_of_a_stream_make_up_the_whole_answer(server, more):
    body = {"prompt": PROMPT, "max_tokens": 20, "return_token_ids": True, **more}
    whole = (await server.post(**body)).json()
    chunks = await server.chunks(**body, stream_options={"include_usage": True})
    *chunks, last = chunks
    assert (last["choices"], last["usage"]) == ([], whole["usage"])
    assert all(chunk["usage"] is None for chunk in chunks)
    for choice in whole["choices"]:
        parts = [p for chunk in chunks for p in chunk["choices"]]
        parts = [part for part in parts if part["index"] == choice["index"]]
        assert "".join(part["text"] for part in parts) == choice["text"]
        assert [i for part in parts for i in part["token_ids"]] == choice["token_ids"]
        assert parts[-1]["finish_reason"] == choice["finish_reason"]
        assert parts[-1]["stop_reason"] == choice["stop_reason"]
        assert all(part["finish_reason"] is None for part in parts[:-1])
        if choice["logprobs"] is not None:
            for name in ("tokens", "token_logprobs", "top_logprobs"):
                told = [x for p in parts if p["logprobs"] for x in p["logprobs"][name]]
                assert told == choice["logprobs"][name]


@asked()
async def test_a_streamed_chat_tells_the_role_once_and_the_logprobs_as_they_come(server):
    body = {"messages": SAID, "max_tokens": 6, "logprobs": True, "top_logprobs": 2}
    whole = (await server.post(CHATS, **body)).json()["choices"][0]
    chunks = await server.chunks(CHATS, **body)
    assert not any("usage" in chunk for chunk in chunks)
    parts = [chunk["choices"][0] for chunk in chunks]
    assert [part["delta"].get("role") for part in parts] == ["assistant"] + [None] * (
        len(parts) - 1
    )
    assert "".join(p["delta"].get("content") or "" for p in parts) == whole["message"]["content"]
    told = [item for part in parts if part["logprobs"] for item in part["logprobs"]["content"]]
    assert told == whole["logprobs"]["content"]
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}


@asked()
async def test_a_json_schema_is_kept(server):
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    body = (await server.post(CHATS, messages=SAID, max_tokens=60, response_format=form)).json()
    assert isinstance(json.loads(body["choices"][0]["message"]["content"])["a"], int)


@asked()
async def test_models_health_and_metrics(server):
    models = (await server.client.get("/v1/models")).json()
    assert [model["id"] for model in models["data"]] == ["simulated"]
    assert (await server.client.get("/v1/models/simulated")).json() == models["data"][0]
    other = await server.client.get("/v1/models/org/other")
    assert (other.status_code, other.json()["error"]["code"]) == (404, "model_not_found")
    assert (await server.client.get("/health")).json() == {"status": "ok"}
    await server.post(prompt=PROMPT, max_tokens=8)
    metrics = (await server.client.get("/metrics")).text
    labels = '{engine="0",model_name="simulated"}'
    assert f"vllm:prompt_tokens_total{labels} 16.0" in metrics
    assert f"vllm:generation_tokens_total{labels} 8.0" in metrics
    assert f"vllm:time_to_first_token_seconds_count{labels} 1.0" in metrics
    assert f"vllm:num_requests_running{labels} 0.0" in metrics


@asked(settings=SchedulingSettings(prefix_cache=True))
async def test_a_request_that_needs_no_block_before_any_is_made_leaves_the_server_as_it_was(server):
    answers = [await server.post(prompt=PROMPT, max_tokens=number) for number in (0, 8)]
    assert [answer.status_code for answer in answers] == [200, 200]


@pytest.mark.parametrize(("kv_blocks", "share"), [(None, 0.0), (40, 0.1)])
def test_the_share_of_kv_blocks_is_one_of_their_limit(kv_blocks, share):
    settings = SchedulingSettings(prefix_cache=True, kv_blocks=kv_blocks, block_size=4)
    engine = Engine(SimulatedModel(), settings=settings)
    engine.add(Request(prompt=PROMPT, max_tokens=8, ignore_eos=True))
    engine.step()
    assert GAUGES["vllm:kv_cache_usage_perc"].read(state_of(engine)) == share


@asked()
async def test_the_clients_id_comes_back_and_stands_in_the_trace(server):
    answer = await server.post(prompt=PROMPT, max_tokens=2, headers={"X-Request-Id": "mine"})
    assert answer.headers["x-request-id"] == "mine"
    assert answer.json()["id"] == "cmpl-mine.1"
    again = await server.post(prompt=PROMPT, max_tokens=2, headers={"X-Request-Id": "mine"})
    assert again.json()["id"] == "cmpl-mine.2"
    long = await server.post(prompt=PROMPT, headers={"X-Request-Id": "x" * 129})
    assert (long.status_code, long.json()["error"]["param"]) == (400, "X-Request-Id")


@asked()
async def test_no_name_or_place_of_a_request_changes_its_draws(server):
    body = {"prompt": PROMPT, "max_tokens": 12, "temperature": 1.5, "seed": 3}
    [result] = decode([body])
    for name in ("a", "b", None):
        headers = {} if name is None else {"X-Request-Id": name}
        answer = await server.post(**body, headers=headers)
        assert answer.json()["choices"][0]["batchdecode"]["tokens"] == result.tokens


LISTS = [{}, {"temperature": 1.0, "n": 2, "best_of": 3}, {"logprobs": 1, "max_tokens": 3}]


@pytest.mark.parametrize("more", LISTS, ids=str)
@pytest.mark.parametrize("prompts", [["Once", PROMPT, "A"], [[60, 61], [7, 8, 9]], ["Once", [7]]])
@asked()
async def test_each_prompt_of_a_list_is_answered_as_if_it_were_alone(server, prompts, more):
    body = {"max_tokens": 6, **more}
    alone = [(await server.post(prompt=prompt, **body)).json() for prompt in prompts]
    listed = (await server.post(prompt=prompts, **body)).json()
    chunks = await server.chunks(prompt=prompts, **body, stream_options={"include_usage": True})
    expected = [choice for answer in alone for choice in answer["choices"]]
    for place, (choice, one) in enumerate(zip(listed["choices"], expected, strict=True)):
        tokens = (choice["batchdecode"]["tokens"], choice["text"], choice["logprobs"])
        assert tokens == (one["batchdecode"]["tokens"], one["text"], one["logprobs"])
        assert choice["index"] == place
        parts = [p for chunk in chunks for p in chunk["choices"] if p["index"] == place]
        assert "".join(part["text"] for part in parts) == choice["text"]
        assert [part["finish_reason"] for part in parts][-1] == choice["finish_reason"]
    for name, count in listed["usage"].items():
        assert count == sum(answer["usage"][name] for answer in alone)
    assert chunks[-1]["usage"] == listed["usage"]


@asked()
async def test_fields_that_change_no_output_are_accepted(server):
    unset = dict.fromkeys(["temperature", "top_p", "n", "stop", "seed", "store"])
    for url, field in ((COMPLETIONS, {"prompt": "Once"}), (CHATS, {"messages": SAID})):
        told = []
        for more in ({}, {"metadata": {"a": "b"}}, unset):
            answer = await server.post(url, **field, max_tokens=4, **more)
            assert answer.status_code == 200, answer.text
            told.append(answer.json()["choices"][0]["batchdecode"]["tokens"])
        assert told[0] == told[1] == told[2]


# Keys and values of which each names a constraint, however JSON writes it.
CONSTRAINED = [
    rb'"\u006ason_schema": {"type": "integer"}',
    rb'"respons\u0065_format": {"type": "json_object"}',
    b'"regex": "a+"',
]


@pytest.mark.parametrize("field", CONSTRAINED)
@asked()
async def test_constraints_are_read_beside_the_event_loop(server, field, monkeypatch):
    threads = []
    read = BodyReader.read
    monkeypatch.setattr(
        BodyReader, "read", lambda *a: threads.append(threading.current_thread().name) or read(*a)
    )
    url = CHATS if b"respons" in field else COMPLETIONS
    said = b'"messages": [{"role": "user", "content": "a"}]' if url == CHATS else b'"prompt": "a"'
    content = b'{%s, %s, "max_tokens": 3}' % (said, field)
    answer = await server.client.post(url, content=content)
    assert answer.status_code == 200, answer.text
    text = b'{"prompt": "\\"regex\\": and \\"json_schema\\"", "max_tokens": 1}'
    assert (await server.client.post(COMPLETIONS, content=text)).status_code == 200
    assert threads[0] != "MainThread"
    assert threads[1] == "MainThread"


@asked(settings=SchedulingSettings(kv_blocks=2, block_size=4))
async def test_requests_that_cannot_be_served_are_the_faults_of_clients(server):
    small = await server.post(prompt=PROMPT, max_tokens=50)
    assert (small.status_code, small.json()["error"]["code"]) == (400, "kv-too-small")
    assert small.json()["error"]["type"] == "invalid_request_error"


BAD = [  # body, field and code of the error, words of its message
    ({}, "prompt", "missing-field", "field `prompt` is missing"),
    ({"prompt": "x", "max_token": 3}, "max_token", "unknown-field", "did you mean `max_tokens`"),
    ({"prompt": "x", "stream": 1}, "stream", "invalid-type", "must be true or false, not 1"),
    ({"prompt": "x", "stream_options": {}}, "stream_options", "conflicting-fields", "`stream`"),
    ({"prompt": "x", "stream": True, "stream_options": {"include": 1}}, "stream_options",
     "invalid-type", "an object with `include_usage`, true or false, and nothing else"),
    ({"prompt": "x", "session": "s"}, "session", "unsupported-option", "messages"),
    ({"prompt": "x", "echo": True, "stream": True}, "echo", "conflicting-fields", "cannot be used"),
    ({"prompt": "x", "regex": "("}, "regex", "invalid-grammar", "regex"),
    ({"prompt": ["a", 3]}, "prompt", "invalid-type", "prompt 1: "),
    ({"prompt": ["a", "b"], "max_tokens": -1}, "max_tokens", "invalid-value", "-1"),
    ({"prompt": ["a"] * 2049}, "prompt", "invalid-value", "2049 prompts; at most 2048"),
    ({"messages": SAID}, "messages", "unknown-field", f"(it is for {CHATS})"),
    (b'{"prompt":"a","prompt":"b"}', "prompt", "duplicate-field", "given twice"),
    (b'{"prompt":"a","logit_bias":{"5":1,"5":2}}', "logit_bias", "duplicate-field", "given twice"),
    (b'{"prompt": x}', None, "invalid-json", "line 1, column 12"),
    (b'{"prompt":\n "a",}', None, "invalid-json", "line 2"),
    (b"", None, "invalid-json", "the body is empty"),
    (b'{"prompt": "a"', None, "invalid-json", "not JSON: it ends before the JSON object does"),
    (b"[1]", None, "invalid-json", "not a list"),
    (b'{"prompt": "\xff"}', None, "invalid-json", "not UTF-8"),
    (b"[" * 200_000, None, "too-many-parts", "lists and objects"),
]  # fmt: skip


@pytest.mark.parametrize(("body", "param", "code", "words"), BAD, ids=lambda value: str(value)[:40])
@asked()
async def test_what_is_wrong_is_told_with_its_place(server, body, param, code, words):
    content = body if isinstance(body, bytes) else json.dumps(body)
    answer = await server.client.post(COMPLETIONS, content=content)
    error = answer.json()["error"]
    assert answer.status_code == 400
    assert (error["param"], error["code"]) == (param, code)
    assert error["type"] == "invalid_request_error"
    assert words in error["message"]
    assert "body." not in error["message"]


@asked(access=Access(api_key="right"))
async def test_a_key_is_asked_for_where_something_is_to_be_had(server):
    for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "right"}):
        answer = await server.post(prompt="x", headers=headers)
        assert answer.status_code == 401
        assert answer.json()["error"]["code"] == "invalid_api_key"
        assert (await server.client.get("/v1/models", headers=headers)).status_code == 401
    right = {"Authorization": "Bearer right"}
    assert (await server.post(prompt="x", headers=right)).status_code == 200
    assert (await server.client.get("/v1/models", headers=right)).status_code == 200
    assert (await server.client.get("/health")).status_code == 200


@asked()
async def test_another_model_and_another_address_are_not_found(server):
    answer = await server.post(prompt="x", model="gpt-9")
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "model_not_found")
    assert (await server.post(prompt="x", model="simulated")).status_code == 200
    other = (await server.post(CHATS, prompt="x")).json()["error"]
    assert other["message"].endswith(f"unknown field `prompt` (it is for {COMPLETIONS})")
    page = (ROOT / "docs/guide/serve.md").read_text()
    for url, status in ((COMPLETIONS, 405), ("/v2", 404)):
        answer = await server.client.get(url)
        assert (answer.status_code, answer.headers.get("allow", "POST")) == (status, "POST")
        assert re.search(rf"\| {status} \|.*`{answer.json()['error']['code']}`", page)


@asked(limits=Limits(max_body_bytes=5000))
async def test_a_large_body_is_refused_before_it_is_read(server):
    async def parts():
        for _ in range(100):
            yield b" " * 1000

    for content in (b" " * 5001, parts()):
        answer = await server.client.post(COMPLETIONS, content=content)
        assert answer.status_code == 413
        assert answer.headers["connection"] == "close"
        assert "5,000 bytes" in answer.json()["error"]["message"]
