"""`batchdecode serve` as a process: its address, its signals, its trace and its picture."""

import json
import os
import re
import signal
import socket
import time
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx
import pytest
from command_terminal import CommandTerminal
from examples import mostly_heavy, rest_heavy
from process import COMMAND, ENVIRONMENT, batchdecode, refused, start

from batcher import decode

LONG = {"prompt": "Once", "max_tokens": 1_000_000, "ignore_eos": True, "stream": True}


@contextmanager
def serving(*arguments, command=None, cwd=None):
    """Give a client of a server, whose `process` it is, or stands for."""
    process = start("serve", "--port", "0", *arguments, command=command, cwd=cwd)
    line = process.stderr.readline().decode()
    found = re.search(r"at (http://\S+)/v1$", line)
    assert found, line + process.stderr.read().decode()
    try:
        with httpx.Client(base_url=found[1], timeout=30) as client:
            client.process = process
            yield client
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate()


def ended(process):
    _, said = process.communicate(timeout=20)
    assert b"Traceback" not in said, said.decode()
    return process.returncode, said.decode()


def test_it_answers_until_it_is_told_to_end(tmp_path):
    trace = tmp_path / "trace.jsonl"
    with serving("--trace", trace, "-b", "4") as client:
        body = {"prompt": "Once upon a time", "max_tokens": 8}
        answer = client.post("/v1/completions", json=body)
        [result] = decode([body])
        assert answer.json()["choices"][0]["text"] == result.text
        upgrade = {"Connection": "upgrade", "Upgrade": "h2c"}
        assert client.get("/health", headers=upgrade).status_code == 200
        client.process.terminate()
        assert ended(client.process) == (0, "")
    events = [json.loads(line) for line in trace.read_text().splitlines()]
    kinds = [event["event"] for event in events]
    assert [kinds[0], kinds[-1]] == ["run", "end"]
    assert {"arrive", "admit", "finish"} <= set(kinds)
    assert [event["id"] for event in events if event["event"] == "finish"] == ["1"]
    shown = batchdecode("trace", trace, "--format", "spans")
    assert json.loads(shown.stdout)["outcome"] == "length"


def test_the_first_signal_lets_it_answer_what_it_has():
    with serving("--profile", "constant:0.01") as client:
        body = {**LONG, "max_tokens": 30}
        with client.stream("POST", "/v1/completions", json=body) as answer:
            lines = answer.iter_lines()
            next(lines)
            client.process.terminate()
            rest = [line for line in lines if line]
        assert rest[-1] == "data: [DONE]"
        assert len(rest) == 30  # 29 more tokens, each in a chunk of its own, and the end
        assert ended(client.process) == (0, "")
    with pytest.raises(httpx.ConnectError):
        httpx.get(client.base_url)


def test_a_second_signal_ends_it_at_once():
    number = signal.SIGINT
    with serving() as client:
        with client.stream("POST", "/v1/completions", json=LONG) as answer:
            lines = answer.iter_lines()
            next(lines)
            client.process.send_signal(number)
            with suppress(httpx.TransportError):  # it may be closed with who waits to be accepted
                while True:  # as long as it has not seen the first one
                    httpx.get(f"{client.base_url}/health")
            client.process.send_signal(number)
            *_, error, done = [line for line in lines if line]
        assert '"code":"server-ended"' in error
        assert done == "data: [DONE]"
        assert ended(client.process) == (128 + number, "")


def test_the_key_comes_from_the_environment_and_nothing_tells_it(tmp_path, monkeypatch):
    monkeypatch.setitem(ENVIRONMENT, "BATCHDECODE_API_KEY", "hidden-key")
    trace = tmp_path / "trace.jsonl"
    with serving("--trace", trace) as client:
        body = {"prompt": "hidden-prompt", "max_tokens": 3, "nothing": 1}
        assert client.post("/v1/completions", json=body).status_code == 401
        right = {"Authorization": "Bearer hidden-key"}
        assert client.post("/v1/completions", json=body, headers=right).status_code == 400
        del body["nothing"]
        assert client.post("/v1/completions", json=body, headers=right).status_code == 200
        client.process.terminate()
        status, said = ended(client.process)
    assert (status, said) == (0, "")
    assert "hidden" not in trace.read_text()


FAILING = """
def model(prefixes):
    if any(len(prefix) > 4 for prefix in prefixes):
        raise ValueError(f"cannot read {prefixes}")
    return [5] * len(prefixes)
"""


def test_what_a_model_raises_is_told_by_its_kind_since_its_text_may_hold_prompts(tmp_path):
    (tmp_path / "own.py").write_text(FAILING)
    with serving("--model", "own:model", cwd=tmp_path) as client:
        body = {"prompt": [17, 18, 19], "max_tokens": 5}
        for _ in range(2):
            answer = client.post("/v1/completions", json=body)
            assert answer.status_code == 500
            assert answer.json()["error"]["message"].startswith("the model raised")
            assert "17" not in answer.text
        client.process.terminate()
        status, said = ended(client.process)
    assert status == 0
    assert said == "the model raised ValueError at own.py, line 4\n"


def ids_of_answers(client, number):
    url, body = f"{client.base_url}/v1/completions", {"prompt": "Once", "max_tokens": 2}
    answers = [httpx.post(url, json=body, timeout=30) for _ in range(number)]
    assert {answer.json()["choices"][0]["text"] for answer in answers} == {" We touched"}
    return [answer.json()["id"] for answer in answers]


def test_workers_share_an_address_and_metrics_and_leave_no_files(tmp_path):
    command = ["env", f"TMPDIR={tmp_path}", *COMMAND]  # what is imported when counts
    with serving("--workers", "2", command=command) as client:
        assert [*tmp_path.iterdir()]
        ids = []
        while len({name.split("-")[1] for name in ids}) < 2:
            ids += ids_of_answers(client, 4)
        assert len(set(ids)) == len(ids)
        late = time.monotonic() + 10
        counted = {}
        while sum(counted.values()) < 2 * len(ids) and time.monotonic() < late:  # they tell soon
            told = client.get("/metrics").text
            number = r'^vllm:generation_tokens_total{engine="([01])".*} ([\d.]+)$'
            counted = {key: float(n) for key, n in re.findall(number, told, re.MULTILINE)}
        assert set(counted) == {"0", "1"}
        assert sum(counted.values()) == 2 * len(ids)
        assert told.count("# TYPE vllm:generation_tokens_total counter") == 1
        client.process.send_signal(signal.SIGHUP)
        assert ended(client.process) == (0, "")
    assert [*tmp_path.iterdir()] == []


def test_workers_end_together():
    with serving("--workers", "2", command=COMMAND) as client:
        ids_of_answers(client, 1)
        children = Path(f"/proc/{client.process.pid}/task/{client.process.pid}/children")
        process = int(children.read_text().split()[0])
        os.kill(process, signal.SIGKILL)
        assert ended(client.process) == (137, "")


@pytest.mark.heavy
def test_a_second_signal_ends_it_whatever_clients_have_begun():
    with serving("--workers", "2", command=COMMAND) as client:
        address = (client.base_url.host, client.base_url.port)
        head = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: %d\r\n\r\n"
        body = json.dumps(LONG).encode()
        begun = [b"", b"GET /he", head % 100, head % len(body) + body]
        ones = [socket.create_connection(address) for _ in begun]
        for one, data in zip(ones, begun, strict=True):
            one.sendall(data)
        assert ones[-1].recv(1000)
        client.process.terminate()
        time.sleep(0.3)
        client.process.terminate()
        status, said = ended(client.process)
        for one in ones:
            one.close()
    assert (status, said) == (143, "")


@pytest.mark.parametrize("key", ["", "key ", "kl\u00e0"])
def test_a_key_that_no_header_can_hold_is_refused(key):
    said = refused("serve", "--port", "0", BATCHDECODE_API_KEY=key)
    assert "must be printable ASCII, not be empty, and not begin or end with" in said


OWN, EVIL, FRIEND = "{own}", "http://evil.example", "https://chat.example:3000"

# Options, the headers of a request for /v1/models, and the status of its answer.
PAGES = [
    ([], {}, 200),
    ([], {"Host": "localhost:99"}, 200),
    ([], {"Host": "[::1]:80"}, 200),
    ([], {"Host": "evil.example"}, 403),
    ([], {"Host": "127.0.0.1.evil.example"}, 403),
    ([], {"Host": "localhost:80@evil.example"}, 403),
    ([], {"Origin": OWN}, 200),
    ([], {"Origin": EVIL}, 403),
    ([], {"Origin": "null"}, 403),
    ([], {"Origin": "http://localhost:3000"}, 403),
    ([], {"Host": "evil.example", "Origin": EVIL}, 403),
    (["--allow-origin", FRIEND], {"Origin": FRIEND}, 200),
    (["--allow-origin", FRIEND], {"Host": "chat.example:3000", "Origin": FRIEND}, 200),
    (["--allow-origin", FRIEND], {"Origin": EVIL}, 403),
    (["--allow-origin", FRIEND], {"Host": "evil.example"}, 403),
    (["--allow-origin", "*"], {"Origin": EVIL}, 200),
    (["--host", "localhost", "--api-key", "k"], {"Host": "any", "Origin": EVIL}, 401),
    (["--host", "0.0.0.0"], {"Host": "my.machine"}, 200),  # noqa: S104 - a test
    (["--host", "0.0.0.0"], {"Host": "my.machine", "Origin": EVIL}, 403),  # noqa: S104 - a test
]


OPTIONS = [[], ["--allow-origin", FRIEND], ["--allow-origin", "*"], PAGES[-3][0], PAGES[-2][0]]


@pytest.mark.parametrize("options", mostly_heavy(OPTIONS, [], ["--allow-origin", FRIEND]), ids=str)
def test_without_a_key_pages_of_others_are_refused(options):
    with serving(*options) as client:
        own = f"http://127.0.0.1:{client.base_url.port}"
        for given, headers, status in PAGES:
            if given == options:
                sent = {name: value.format(own=own) for name, value in headers.items()}
                answer = httpx.get(f"{own}/v1/models", headers=sent)
                assert answer.status_code == status, headers
                if status == 403:
                    assert "--allow-origin" in answer.json()["error"]["message"]


def test_only_pages_of_allowed_origins_may_read_answers():
    asked = {
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "authorization,content-type",
    }
    with serving("--allow-origin", FRIEND, "--api-key", "k") as client:
        url = f"http://127.0.0.1:{client.base_url.port}/v1/completions"
        friend = httpx.options(url, headers={"Origin": FRIEND, **asked})
        assert friend.status_code == 200
        assert friend.headers["access-control-allow-origin"] == FRIEND
        assert "authorization" in friend.headers["access-control-allow-headers"].lower()
        evil = httpx.options(url, headers={"Origin": EVIL, **asked})
        assert evil.status_code == 400
        assert "access-control-allow-origin" not in evil.headers
        body = {"prompt": "a", "max_tokens": 1}
        key = {"Authorization": "Bearer k"}
        for origin, allowed in ((FRIEND, FRIEND), (EVIL, None)):
            answer = httpx.post(url, json=body, headers={"Origin": origin, **key})
            assert answer.headers.get("access-control-allow-origin") == allowed
        wrong = httpx.post(url, json=body, headers={"Origin": FRIEND})
        assert (wrong.status_code, wrong.headers["access-control-allow-origin"]) == (401, FRIEND)


def test_an_address_that_is_taken_is_an_error():
    with serving() as client:
        done = batchdecode("serve", "--port", client.base_url.port)
    assert done.returncode == 2
    assert done.stderr.startswith("error: cannot listen on 127.0.0.1, port ")
    assert "in use" in done.stderr


@pytest.mark.parametrize(
    ("number", "status"), rest_heavy(1, [(signal.SIGHUP, 0), (signal.SIGQUIT, -signal.SIGQUIT)])
)
def test_a_server_shows_its_slots_takes_keys_and_leaves_the_terminal_as_before(number, status):
    with CommandTerminal("serve", "--port", "0") as terminal:
        terminal.wait_for(lambda: re.search(rb"http://[\w.:]+/v1", terminal.written))
        url = re.search(rb"http://[\w.:]+/v1", terminal.written)[0].decode()
        httpx.post(f"{url}/completions", json={"prompt": "Once", "max_tokens": 9}, timeout=30)
        terminal.wait_for(lambda: terminal.takes_keys and b"busy" in terminal.written)
        terminal.process.send_signal(number)
        assert terminal.ended() == status
        assert b"Traceback" not in terminal.written
