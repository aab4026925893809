"""The sample server and the sample client, over real HTTP."""

import json
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from http import HTTPStatus
from pathlib import Path

import pytest

from batcher import BatchdecodeError, CallSettings, decode
from batcher.models.callables import LLMModel

sys.path.insert(0, str(Path(__file__).parent.parent.parent))  # as the command line does it

from samples.http_llm import HTTPModel
from samples.llm_server import STOP_TOKEN, TEXTS, VOCAB_SIZE, Handler, LLMServer, NgramModel

PROMPTS = ["The lighthouse", "The cat", "At night", "All the names"]
REQUESTS = [{"prompt": prompt, "max_tokens": 16} for prompt in PROMPTS]


@contextmanager
def serving(server: LLMServer, max_attempts: int = 3) -> Iterator[LLMModel]:
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        url = f"http://127.0.0.1:{server.server_port}"
        settings = CallSettings(max_attempts=max_attempts, backoff=0.001)
        yield LLMModel(HTTPModel(url), "http", settings)
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def greedy_text(prompt: str, max_tokens: int) -> str:
    model, tokens = NgramModel(), [*prompt.encode()]
    for _ in range(max_tokens):
        logits = model.logits(tokens)
        tokens.append(logits.index(max(logits)))
        if tokens[-1] == STOP_TOKEN:
            break
    return bytes(token for token in tokens[len(prompt) :] if token != STOP_TOKEN).decode()


def test_requests_are_decoded_over_http() -> None:
    with serving(LLMServer(0)) as model:
        assert (model.vocab_size, model.eos_token_id) == (VOCAB_SIZE, STOP_TOKEN)
        results = decode(REQUESTS, model=model, batch_size=3)
    assert [result.text for result in results] == [greedy_text(prompt, 16) for prompt in PROMPTS]


def test_a_text_ends_with_the_stop_token() -> None:
    with serving(LLMServer(0)) as model:
        [result] = decode([{"prompt": TEXTS[0][:-10], "max_tokens": 30}], model=model)
    assert (result.text, result.finish_reason) == (TEXTS[0][-10:], "stop")
    assert result.tokens[-1] == STOP_TOKEN


def test_a_server_that_fails_now_and_then_is_not_noticed() -> None:
    with serving(LLMServer(0, latency=0.001, fail_rate=0.2), max_attempts=10) as model:
        results = decode(REQUESTS[:2], model=model)
    assert [result.text for result in results] == [greedy_text(p, 16) for p in PROMPTS[:2]]


class Faulty(Handler):
    """Does something wrong when a prefix is 20 tokens long: what its server says."""

    def do_POST(self) -> None:  # noqa: N802 - the standard library's name
        body = self.rfile.read(int(self.headers["Content-Length"]))
        tokens = json.loads(body)["tokens"]
        if len(tokens) == 20 and tokens[:7] == [*b"The cat"]:
            self.close_connection = True
            self.wfile.write(self.server.fault)
        else:
            self._answer(HTTPStatus.OK, {"logits": self.server.model.logits(tokens)})


def response(status: int, body: bytes) -> bytes:
    return b"HTTP/1.1 %d X\r\nContent-Length: %d\r\n\r\n%s" % (status, len(body), body)


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (b"", "raised RemoteDisconnected"),
        pytest.param(b"garbage\r\n\r\n", "raised BadStatusLine: garbage", marks=pytest.mark.heavy),
        pytest.param(response(200, b"<html>"), "raised JSONDecodeError", marks=pytest.mark.heavy),
        (response(200, b'{"logits": [1, 2]}'), "returned 2 logits, not 257"),
        pytest.param(
            response(200, b'{"error": "busy"}'),
            "raised KeyError: 'logits'",
            marks=pytest.mark.heavy,
        ),
        (response(500, b"oops"), "raised HTTPError: HTTP Error 500"),
        pytest.param(
            response(400, b"no"), "raised HTTPError: HTTP Error 400: X", marks=pytest.mark.heavy
        ),
    ],
)
def test_a_server_that_goes_wrong_fails_the_request_that_it_was_asked_for(
    fault: bytes, message: str
) -> None:
    server = LLMServer(0)
    server.RequestHandlerClass, server.fault = Faulty, fault
    with serving(server) as model:
        results = decode(REQUESTS, model=model)
    assert [result.finish_reason == "error" for result in results] == [False, True, False, False]
    for prompt, result in zip(PROMPTS, results, strict=True):
        assert result.text == greedy_text(prompt, 13 if result.error else 16)
    assert results[1].error.message.startswith("step 13: http ")
    assert message in results[1].error.message


def test_no_server_is_a_clear_error() -> None:
    server = LLMServer(0)
    server.server_close()
    llm = HTTPModel(f"http://127.0.0.1:{server.server_port}")
    with pytest.raises(
        BatchdecodeError, match=r"http: get_stop_token_id raised URLError:.*refused"
    ):
        LLMModel(llm, "http", CallSettings(max_attempts=2, backoff=0.001))


def test_the_server_refuses_what_it_does_not_know() -> None:
    with serving(LLMServer(0)) as model:
        url = model._llm.url
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        for path, body, status in [
            ("/what", None, 404),
            ("/what", b"{}", 404),
            ("/logits", b"{}", 400),
            ("/logits", b"[", 400),
        ]:
            with pytest.raises(urllib.error.HTTPError) as caught:
                opener.open(url + path, body)
            caught.value.close()
            assert caught.value.code == status
