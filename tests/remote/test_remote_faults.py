"""A server that fails in every way it can: what is asked again, and what is told of the rest."""

import asyncio
import gzip
import json
import re
import socket
import time
import zlib
from contextlib import suppress
from itertools import pairwise
from math import inf

import httpx
import pytest
from examples import examples, rest_heavy
from fault_server import FaultServer, answer, chunks, refusal, reset, silence
from hypothesis import example, given
from hypothesis import strategies as st
from remote_runs import QUICK, answered, asking, carry_out, engine_of

from batcher.errors import BatchdecodeError, LostModelError
from batcher.events import (
    AdmitEvent,
    BlockedEvent,
    ConcurrencyEvent,
    FinishEvent,
    ReceiveEvent,
    RetryEvent,
)
from batcher.remote import client
from batcher.remote.client import MAX_EVENT, remote_model_of
from batcher.remote.engine import RemoteEngine
from batcher.remote.model import ServerSettings
from batcher.remote.protocol import Reply, ServerFailure, error_text, read_chunk
from batcher.request import Request
from batcher.result import Usage
from batcher.trace.timeline import Timeline


async def endless(exchange):
    """A line without an end."""
    await exchange.begin()
    for _ in range(2 * MAX_EVENT // 2**16):
        await exchange.send(b"x" * 2**16)


async def endless_event(exchange):
    """Lines of one event that does not end; the pause tells it from a stream that breaks off."""
    await exchange.begin()
    for _ in range(2 * MAX_EVENT // 2**16):
        await exchange.send(b"data: x\n" * 2**13)
    await silence(exchange)


async def wrong_length(exchange):
    await exchange.send(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n")
    await exchange.send(b"Content-Length: 100\r\n\r\ndata: {}\n\n")


async def packed(exchange):
    """A few bytes that stand for many."""
    await exchange.send(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n")
    await exchange.send(b"Content-Encoding: gzip\r\nConnection: close\r\n\r\n")
    await exchange.send(gzip.compress(b"x" * 2**24))


async def no_http(exchange):
    await exchange.send(b"SSH-2.0-OpenSSH\r\n")


def torn(*texts):
    """Some chunks, and then a reset."""

    async def behave(exchange):
        await exchange.begin()
        for text in texts:
            await exchange.choice(text)
        await asyncio.sleep(0.05)
        exchange.reset()

    return behave


BEFORE_A_TOKEN = {
    "overload": (refusal(429), refusal(503), refusal(529, Retry_After="0")),
    "answer": (refusal(500), refusal(502), chunks("no JSON"), chunks({"choices": 5}),
               chunks({"error": {"message": "no slot"}}), packed, endless, endless_event,
               chunks({"choices": [{"text": "a", "logprobs": {"content": [5]}}]}),
               answer(finish="abort"), answer(finish="tool_calls", usage={"prompt_tokens": 3})),
    "connection": (reset, no_http, wrong_length, chunks(), chunks("[DONE]"),
                   chunks(kind="text/html"), answer(finish=None), answer(finish=""),
                   chunks({"choices": [{"delta": {"role": "assistant"}}]}, "[DONE]")),
    "timeout": (silence, chunks({"choices": []}, then=silence)),
}  # fmt: skip
FAULTS = [  # one of each kind, then another one, and so on
    (reason, faults[number])
    for number in range(max(map(len, BEFORE_A_TOKEN.values())))
    for reason, faults in BEFORE_A_TOKEN.items()
    if number < len(faults)
]


@pytest.mark.parametrize(("reason", "fault"), rest_heavy(8, FAULTS))
def test_what_fails_before_a_token_is_asked_again(reason, fault):
    server = FaultServer({"a": [fault, fault, answer("well")]})
    seconds = 0.3 if reason == "timeout" else 10.0
    run = answered(server, asking("a"), first_token_timeout=seconds, idle_timeout=seconds)
    [result] = run.results
    assert (result.text, result.finish_reason, result.error) == ("well", "stop", None)
    retries = run.kinds(RetryEvent)
    assert [(retry.reason, retry.attempt) for retry in retries] == [(reason, 1), (reason, 2)]
    assert len(server.requests) == 3


@pytest.mark.parametrize(
    ("fault", "text"),
    [
        (torn("a", "b"), "ab"),
        (answer("a", "b", finish=None), "ab"),
        (chunks({"choices": [{"text": "a"}]}, "no JSON"), "a"),
        (chunks({"choices": [{"text": "a"}]}, {"error": "out of memory"}), "a"),
        (chunks({"choices": [{"text": "a"}]}, then=silence), "a"),
    ],
)
def test_what_fails_after_a_token_is_an_error_with_what_had_come(fault, text):
    server = FaultServer({"a": [fault, answer("again")]})
    run = answered(server, asking("a", "b"), idle_timeout=0.3)
    result = run.by_id["a"]
    assert (result.text, result.finish_reason) == (text, "error")
    assert (result.error.code, result.usage.completion_tokens) == ("server-error", len(text))
    assert run.by_id["b"].error is None
    assert len(server.requests) == 2
    assert sum(event.tokens for event in run.kinds(ReceiveEvent) if event.id == "a") == len(text)


@pytest.mark.parametrize(
    ("status", "headers", "seconds"),
    [
        (429, {"Retry_After": "3600"}, 3600),
        (429, {"retry_after_ms": "20000", "Retry_After": "1"}, 20),
        (429, {"X_RateLimit_Reset": "in_100_ms"}, 100),
        (429, {"Retry_After": "1e300"}, 1e9),
        (429, {"body": "in_100_ms"}, 100),
        (429, {"Retry_After": "2"}, None),
        (500, {"X_RateLimit_Reset": "40"}, None),
    ],
)
def test_a_long_wait_is_told_once_and_can_be_limited(status, headers, seconds):
    """Each of three rows would wait; told: once, and the wait is broken off here."""
    at = {"in_100_s": int(time.time() + 100), "in_100_ms": int((time.time() + 100) * 1000)}
    headers = {name: str(at.get(value, value)) for name, value in headers.items()}
    reset = {"metadata": {"headers": {"X-RateLimit-Reset": headers.pop("body", None)}}}

    async def refuse(exchange):
        await exchange.refuse(status, {"error": {"message": "busy"} | reset}, **headers)

    for limit in ({}, {"max_wait": 5.0}):
        told = []
        with FaultServer(usual=refuse) as server:
            model = remote_model_of(server.name, QUICK | limit | {"max_attempts": 2})
            model.report = told.append
            engine = RemoteEngine(model, 3)
            for request in asking("a", "b", "c"):
                engine.enqueue(request)
            results = []
            while len(server.requests) < 3 or (limit and engine.has_work and seconds):
                results += engine.step().results
            while not limit and seconds and not told:
                engine.step()
            engine.close()
        assert len(told) == (seconds is not None)
        if seconds is not None and not limit:
            [found] = re.findall(r"waiting until 2.*\(([\d,]+) s\) for .*HTTP \d+: busy; ", told[0])
            assert float(found.replace(",", "")) == pytest.approx(seconds, abs=2)
        if seconds is not None and limit:
            assert [result.error.status for result in results] == [status] * 3
            assert len(server.requests) == 3
            assert "--max-wait 5 is less than" in results[0].error.message


def test_retry_after_is_kept():
    server = FaultServer({"a": [refusal(503, Retry_After="0.2"), answer("a")]})
    run = answered(server, asking("a"))
    [retry] = run.kinds(RetryEvent)
    assert 0.2 <= retry.delay <= 0.2 + QUICK["backoff"]
    [first] = run.kinds(ReceiveEvent)
    assert first.time >= 0.2


@pytest.mark.parametrize(
    ("said", "order", "batch"),
    [
        ("your input was flagged for violence", "xxxx", 1),  # even if nothing else is asked
        ("Your chosen model requires moderation", "xaa", 4),
        ("blocked by a firewall", "axa", 1),
        ("blocked by a firewall", "xxxxa", 2),
        ("blocked by a firewall", 20 * "x" + "a", 21),  # sent together with one that is answered
    ],
)
def test_a_prompt_that_is_forbidden_stops_no_other(said, order, batch):
    server = FaultServer({"x": [refusal(403, said)], "a": [answer("a", first=0.05)]})
    requests = [Request(prompt=prompt, id=str(index)) for index, prompt in enumerate(order)]
    run = answered(server, requests, batch)
    told = [
        "error" if run.by_id[str(i)].error else run.by_id[str(i)].text for i in range(len(order))
    ]
    assert told == ["error" if prompt == "x" else "a" for prompt in order]
    assert len(server.requests) == len(order)
    assert {result.error.status for result in run.results if result.error} == {403}


@pytest.mark.parametrize(("batch", "num_prompts"), [(1, 30), (4, 30), (4, 3), (16, 60)])
def test_a_server_that_forbids_everything_ends_the_run_without_a_result(batch, num_prompts):
    server = FaultServer(usual=refusal(403, "Just a moment..."))
    with server, engine_of(server, batch) as engine:
        for request in asking(*map(str, range(num_prompts))):
            engine.enqueue(request)
        results = (result for _ in iter(int, 1) for result in engine.step().results)
        with pytest.raises(LostModelError, match=r"HTTP 403: Just a moment.*forbids every request"):
            next(results)
    assert len(server.requests) <= 8 + batch


OUTCOMES = {"ok": answer("a"), "slow": answer("a", first=0.03), "forbidden": refusal(403),
            "late": refusal(503), "wrong": refusal(400)}  # fmt: skip


@examples(20)
@given(st.lists(st.sampled_from([*OUTCOMES]), min_size=1, max_size=8), st.integers(1, 4))
def test_each_prompt_has_its_own_result_unless_all_are_forbidden(order, batch):
    server = FaultServer({name: [outcome] for name, outcome in OUTCOMES.items()})
    requests = [Request(prompt=name, id=str(index)) for index, name in enumerate(order)]
    is_lost = {*order} == {"forbidden"}
    with server, engine_of(server, batch, max_attempts=2) as engine:
        if is_lost:
            with pytest.raises(LostModelError, match="forbids every request"):
                carry_out(engine, requests)
        else:
            run = carry_out(engine, requests)
            reasons = ["stop" if name in {"ok", "slow"} else "error" for name in order]
            assert [run.by_id[str(i)].finish_reason for i in range(len(order))] == reasons
            assert len(run.results) == len(order)


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("OPENAI_API_KEY", "sk-very\nsecret", "is invalid"),
        ("OPENAI_API_KEY", "sk-very-sécret", "is invalid"),
        ("HTTP_PROXY", "gopher://127.0.0.1", r"the proxy of the environment .*gopher"),
    ],
)
def test_an_environment_that_is_of_no_use_is_told(monkeypatch, name, value, words):
    monkeypatch.setenv(name, value)
    with pytest.raises(BatchdecodeError, match=words):
        answered(FaultServer(), asking("a"))


WHOLE = {
    "chat": {"choices": [{"message": {"content": "Hi"}, "finish_reason": "stop"}],
             "usage": {"prompt_tokens": 5, "completion_tokens": 2}},
    "completion": {"choices": [{"text": "Hi", "finish_reason": "stop"}],
                   "usage": {"prompt_tokens": 5, "completion_tokens": 2}},
}  # fmt: skip


def sent(head, body):
    """Answer with status 200, this head and this body, byte by byte at first."""

    async def behave(exchange):
        data = body.encode() if isinstance(body, str) else body
        await exchange.send(f"HTTP/1.1 200 OK\r\n{head}Connection: close\r\n\r\n".encode())
        for place in range(8):
            await exchange.send(data[place : place + 1])
            await asyncio.sleep(0)
        await exchange.send(data[8:])

    return behave


STREAM = "".join(
    f"data: {json.dumps(event)}\n\n"
    for event in (
        {"choices": [{"text": "H"}]},
        {"choices": [{"text": "i", "finish_reason": "stop"}]},
        {"choices": None, "usage": {"prompt_tokens": 5, "completion_tokens": 2}},
    )
)
KIND = "Content-Type: {}\r\n"


@pytest.mark.parametrize(
    ("head", "body"),
    [
        ("", STREAM),
        *(
            (KIND.format(kind), STREAM)
            for kind in ("application/json", "text/plain", "a/b;c=ü", "")
        ),
        (KIND.format("Text/Event-Stream;charset=latin-1"), STREAM),
        ("", "\ufeff" + STREAM),
        ("", STREAM.replace("\n", "\r\n")),
        ("Content-Encoding: gzip\r\n", gzip.compress(STREAM.encode())),
        ("", json.dumps(WHOLE["completion"])),
        (KIND.format("text/event-stream"), " \n" + json.dumps(WHOLE["chat"], indent=1)),
        ("Content-Encoding: deflate\r\n", zlib.compress(json.dumps(WHOLE["chat"]).encode())),
    ],
)
def test_an_answer_is_read_however_it_is_called_and_written(head, body):
    run = answered(FaultServer(usual=sent(head, body)), asking("a"), max_attempts=1)
    [result] = run.results
    assert (result.text, result.finish_reason, result.error) == ("Hi", "stop", None)
    assert result.usage == Usage(5, 2)


PAGE = "<!doctype html><title>Log in\nplease</title><p>Hello"
DETAIL = {"loc": ["body", "messages", 0, "role"], "msg": "unexpected value", "type": "enum"}


@pytest.mark.parametrize(
    ("fault", "words", "num_requests"),
    [
        (refusal(429, "over your quota: insufficient_quota"), "insufficient_quota", 1),
        (refusal(500, "broken"), "HTTP 500: broken (attempt 2)", 2),
        (refusal(422, "no stream_options"), """'{"stream_options": null}' to omit it""", 1),
        (refusal(422, "no seed"), """use --extra-body '{"seed": null}' to omit it""", 1),
        (refusal(308, Location="/v1/completions"), "5 redirects", 5),
        (answer("x", finish="sk-secret"), "with finish_reason '***'", 1),
        (chunks({"error": {"message": "Incorrect API key: sk-secret"}}), "API key: ***", 2),
        (refusal(307, Location="http://127.0.0.2/sk-secret"), "http://127.0.0.2/***", 1),
        (sent("", '{"error": "Unexpected endpoint"}'), "Unexpected endpoint", 1),
        (sent("", '{"error": {"code": "503", "message": "later"}}'), "later", 2),
        (sent("", '{"message": {"content": "Hi"}, "done": true}'), '"done": true', 1),
        (sent("", PAGE), "Log in please", 1),
        (sent("Content-Encoding: br\r\n", "packed"), "compressed (br)", 1),
        (sent("Content-Encoding: gzip\r\n", "not packed"), "cannot be decompressed", 2),
        (sent("", 'event: error\ndata: {"message": "boom"}\n\n'), "boom", 2),
        (chunks({"object": "error", "message": "boom", "code": 500}), "boom", 2),
        (chunks({"error": {"message": "context length is 8"}}), "context length is 8", 1),
        (chunks({"success": False, "errors": [{"message": "boom", "code": 7003}]}), "boom", 2),
        (chunks({"choices": None, "base_resp": {"status_msg": "no money"}}), "no money", 2),
        (chunks({"choices": [{"error": {"message": "boom"}, "finish_reason": "stop"}]}), "boom", 2),
        (sent("", '{"choices": [{"error": "boom", "message": {}}]}'), "boom", 2),
        (sent("", 'error: {"code": 500, "message": "no memory"}\n\n'), "no memory", 2),
        (sent("", ": ping\n\nerror: boom"), "error: boom", 2),
        (sent("", b'data: {"choices": [{"text": "\xe9"}]}\n\n'), "not UTF-8", 2),
        (chunks({"choices": [{"delta": {"content": 5}}]}), "the content 5 is not text", 2),
        (chunks({"choices": [{"finish_reason": {"type": "abort", "message": "full"}}]}), "full", 2),
        (refusal(307, Location="http://127.0.0.2/v2"), "redirects to http://127.0.0.2/v2", 1),
    ],
)
def test_the_words_of_a_server_are_reported_and_what_cannot_change_is_not_repeated(
    fault, words, num_requests, monkeypatch
):
    monkeypatch.setenv("OPENAI_API_KEY", "sk-secret")
    server = FaultServer(usual=fault)
    [result] = answered(server, asking("a"), max_attempts=2).results
    assert words in result.error.message
    assert "sk-secret" not in result.error.message
    assert result.finish_reason == "error"
    assert len(server.requests) == num_requests


@pytest.mark.parametrize(
    ("status", "message", "code"),
    [
        (404, "The model `gpt-9` does not exist", "server-error"),
        (400, "This model's maximum context length is 8 tokens", "prompt-too-long"),
        (400, "flagged by our content_filter", "content-filter"),
    ],
)
def test_errors_have_codes_and_are_of_one_request(status, message, code):
    run = answered(FaultServer({"a": [refusal(status, message)]}), asking("a", "b"))
    assert (run.by_id["a"].error.code, run.by_id["b"].error) == (code, None)


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"detail": [DETAIL, DETAIL | {"loc": ["body", "n"]}]},
         "body.messages.0.role: unexpected value (enum) body.n: unexpected value"),
        ({"error": {"message": "from upstream", "metadata": {"raw": "slow down"}}},
         "from upstream slow down"),
        ({"unknown": 5}, '{"unknown": 5}'),
        (PAGE, "Log in please"),
        ("<h1>502 Bad Gateway</h1>", "502 Bad Gateway"),
        ("[" * 5000, "[" * 500 + "…"),
    ],
)  # fmt: skip
def test_the_words_of_an_error_are_found(body, words):
    assert (
        error_text(body.encode() if isinstance(body, str) else json.dumps(body).encode()) == words
    )


def test_a_certificate_that_is_not_trusted_is_not_tried_again(monkeypatch):
    tried = []

    def stream(*_args, **_options):
        tried.append(1)
        raise httpx.ConnectError("[SSL: CERTIFICATE_VERIFY_FAILED] self-signed certificate")

    monkeypatch.setattr(httpx.AsyncClient, "stream", stream)
    engine = RemoteEngine(remote_model_of("openai:https://127.0.0.1:1/v1#tiny", QUICK), 1)
    [result] = carry_out(engine, asking("a")).results
    engine.close()
    assert "cannot connect: [SSL: CERTIFICATE_VERIFY_FAILED]" in result.error.message
    assert len(tried) == 1


@pytest.mark.parametrize("status", [301, 302, 307, 308])
def test_a_redirect_on_the_same_host_is_followed_with_the_request(status):
    server = FaultServer({"a": [refusal(status, Location="/v2/completions"), answer("Hi")]})
    [result] = answered(server, asking("a"), max_attempts=1).results
    assert result.text == "Hi"
    assert [path for path, _, _ in server.requests] == ["/v1/completions", "/v2/completions"]
    assert server.bodies[0] == server.bodies[1]


def test_a_stream_has_an_end(monkeypatch):
    async def babble(exchange):
        await exchange.begin()
        while True:
            await exchange.choice("x")

    monkeypatch.setattr(client, "MAX_ANSWER", 2**16)
    [result] = answered(FaultServer(usual=babble), asking("a")).results
    assert "the stream has more than 65536 bytes" in result.error.message
    assert set(result.text) == {"x"}


@pytest.mark.parametrize("scheme", ["https", "HTTPS", "Https"])
def test_certificates_are_verified_however_https_is_written(monkeypatch, scheme):
    def stop(*, verify, **_others):
        raise InterruptedError(verify)

    monkeypatch.setattr(client.httpx, "AsyncClient", stop)
    with pytest.raises(InterruptedError, match="True"):
        client.Client(f"{scheme}://127.0.0.1/v1", ServerSettings())


def test_what_others_have_come_to_is_handed_out_before_a_refused_key_ends_the_run(monkeypatch):
    async def ask(_, body, take):
        if body["prompt"] == "a":
            raise ServerFailure("answer", "no", status=401, is_worth_retry=False)
        take(read_chunk('{"choices": [{"text": "x", "finish_reason": "stop"}]}'))
        return True

    monkeypatch.setattr(client.Client, "ask", ask)
    with FaultServer() as server, engine_of(server) as engine:
        for request in asking("a", "b"):
            engine.enqueue(request)
        assert [result.text for result in engine.step().results] == ["x"]
        with pytest.raises(LostModelError):
            engine.step()


def test_nothing_of_a_failed_attempt_is_told():
    usage = {"prompt_tokens": 99}
    first = chunks({"choices": [], "usage": usage}, then=refusal(500))
    server = FaultServer({"a": [first, answer("a", usage={"completion_tokens": 1})]})
    [result] = answered(server, asking("a")).results
    assert (result.text, result.usage.prompt_tokens) == ("a", 0)


def test_nobody_listens():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
        with pytest.raises(LostModelError, match=rf"127.0.0.1:{port}/v1: cannot connect"):
            remote_model_of(f"openai:http://127.0.0.1:{port}/v1", {})
        model = f"openai:http://127.0.0.1:{port}/v1#tiny"
        server = FaultServer()
        server.port = port
        assert remote_model_of(model, {}).served_model == "tiny"  # nobody is asked


@pytest.mark.parametrize(
    "name",
    ["openai:", "openai:localhost:8000", "openai:ftp://a/v1", "openai:http://", "openai:http://[",
     "openai:http://a:99999/v1", "openai:http://a/v1?key=5", "openai:http://a b/v1",
     "openai:http://user:sk-secret@a/v1"],
)  # fmt: skip
def test_an_address_that_is_none_is_refused(name):
    with pytest.raises(BatchdecodeError) as error:
        remote_model_of(name, {})
    assert "sk-secret" not in str(error.value)


def test_an_overloaded_server_is_asked_for_less_until_it_keeps_up():
    server = FaultServer(usual=answer("a", "b", gap=0.02), max_open=3)
    prompts = [f"p{number}" for number in range(40)]
    run = answered(server, asking(*prompts), batch=16, max_attempts=30)
    assert {result.finish_reason for result in run.results} == {"stop"}
    limits = [(16, "")] + [(each.limit, each.reason) for each in run.kinds(ConcurrencyEvent)]
    for (before, _), (after, reason) in pairwise(limits):
        assert after == (max(before // 2, 1) if reason == "overload" else before + 1)
    refusals = [event.step for event in run.kinds(ConcurrencyEvent) if event.reason == "overload"]
    assert len(refusals) == len(set(refusals))  # those that were in flight together count as one
    assert min(limits)[0] <= 4
    assert "success" in {reason for _, reason in limits}
    assert "concurrency" in {event.reason for event in run.kinds(BlockedEvent)}
    num_refused = len(server.requests) - len(prompts)
    assert num_refused < len(prompts)  # without that, each of 13 rows would be refused every 50 ms


def test_no_more_than_the_rate_are_sent_and_idle_time_is_not_saved():
    late = [Request(prompt=prompt, id=prompt, arrival_time=0.5) for prompt in "xyz"]
    run = answered(FaultServer(usual=answer("a")), [*asking(*"abcd"), *late], max_rate=20.0)
    times = [event.time for event in run.kinds(AdmitEvent)]
    assert times[3] >= 3 / 20
    assert times[6] >= 0.5 + 2 / 20
    assert "rate" in {event.reason for event in run.kinds(BlockedEvent)}


BEHAVIOURS = st.sampled_from(
    [
        answer("x"),
        answer("x", "y", gap=0.003),
        answer("x", first=0.01),
        refusal(429),
        refusal(503, Retry_After="0.02"),
        refusal(400),
        refusal(403, "flagged"),
        reset,
        torn("x"),
        chunks("garbage"),
        answer("x", finish=None),
    ]
)


@examples(15)
@given(
    st.lists(st.lists(BEHAVIOURS, min_size=1, max_size=3), min_size=1, max_size=6),
    st.integers(1, 4),
)
def test_whatever_the_server_does_each_request_has_one_result(behaviours, batch):
    prompts = [f"p{number}" for number in range(len(behaviours))]
    server = FaultServer(dict(zip(prompts, behaviours, strict=True)))
    with server, engine_of(server, batch, max_attempts=4) as engine:
        run = carry_out(engine, asking(*prompts))
        assert not engine.num_running
        assert not engine.num_waiting
    assert sorted(result.id for result in run.results) == prompts
    assert server.most_open <= batch
    received = {event.id: 0 for event in run.kinds(FinishEvent)}
    for event in run.kinds(ReceiveEvent):
        received[event.id] += event.tokens
    assert received == {r.id: r.usage.completion_tokens for r in run.results}
    spans = list(Timeline.from_events(run.events).spans)
    assert sorted(span.id for span in spans) == prompts


NAMES = [
    *("choices", "usage", "error", "message", "detail", "delta", "text", "content", "reasoning"),
    *("refusal", "tool_calls", "function_call", "function", "name", "arguments", "index", "id"),
    *("logprobs", "top_logprobs", "token", "logprob", "finish_reason", "stop_reason", "type"),
]
ODD = st.recursive(
    st.sampled_from([None, True, 0, -1, 1.5, inf, 2**70, "", "a", "stop", "{}"]),
    lambda values: (
        st.lists(values, max_size=2) | st.dictionaries(st.sampled_from(NAMES), values, max_size=3)
    ),
    max_leaves=6,
)
PARTS = st.dictionaries(st.sampled_from(NAMES), ODD, max_size=3)


@given(st.lists(PARTS, max_size=2), PARTS)
@example([{"delta": {"tool_calls": 5}}], {})
@example([], {"error": inf})
def test_no_chunk_raises_anything_but_a_failure_of_the_server(parts, more):
    reply = Reply(Request(prompt="", stop="a", logprobs=1), {})
    data = json.dumps({"choices": parts, **more}).replace("Infinity", "1e999")
    with suppress(ServerFailure):
        reply.take(read_chunk(data))
        reply.end(is_whole=True)
        reply.find_lack()
    json.dumps([reply.text, reply.tool_calls, reply.function_call, reply.reasoning])


def test_a_bug_of_ours_ends_the_run(monkeypatch):
    monkeypatch.setattr(Reply, "take", lambda *_: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        answered(FaultServer(usual=answer("a")), asking("a"))
