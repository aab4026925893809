"""`batchdecode run --model openai:...`: files, exit codes, the key, stopping and going on."""

import json
import os
import signal
import subprocess
import time
from typing import get_args

import pytest
from examples import mostly_heavy
from fault_server import FaultServer, answer, chunks, refusal, reset
from process import COMMAND, batchdecode, lines_of, start, wait_for

from batcher.events import BlockedReason
from batcher.explaining.story import SHORT_CAUSES
from cli.screen.summary import BLOCKED_CAUSES

KEY = "sk-that-nobody-may-see"


@pytest.fixture
def folder(tmp_path):
    requests = [{"id": f"r{number}", "prompt": f"p{number}"} for number in range(8)]
    (tmp_path / "r.jsonl").write_bytes(lines_of(*requests))
    return tmp_path


def run(folder, server, *options, **environment):
    files = ("-o", "out.jsonl", "--trace", "t.jsonl")
    return batchdecode(
        *("run", "r.jsonl", "--model", server.name, "-b", 3, *files, *options),
        cwd=folder,
        **{"OPENAI_API_KEY": KEY} | environment,
    )


def results(folder):
    lines = (folder / "out.jsonl").read_text().splitlines()
    return {each["id"]: each for each in map(json.loads, lines)}


def config(folder, **settings):
    text = "server:\n" + "".join(f"  {name}: {value}\n" for name, value in settings.items())
    (folder / "c.yaml").write_text(text)
    return "--config", "c.yaml"


def test_a_run_has_results_a_trace_and_a_summary(folder):
    with FaultServer(usual=answer("a", "b", gap=0.01)) as server:
        done = run(folder, server)
    assert done.returncode == 0, done.stderr
    assert {each["text"] for each in results(folder).values()} == {"ab"}
    assert len(results(folder)) == 8
    assert "8 ok" in done.stderr
    assert "ttft p50" in done.stderr
    for command in (("trace", "t.jsonl", "--format", "spans"), ("trace", "why", "r7", "t.jsonl")):
        shown = batchdecode(*command, cwd=folder)
        assert shown.returncode == 0, shown.stderr
    story = shown.stdout.decode()
    assert "waited for the server for" in story
    assert "r7: 3 prompt tokens" in story


def test_a_failure_is_exit_status_1_and_the_key_stands_nowhere(folder):
    behaviours = {"p1": [refusal(400, f"not with {KEY}")], "p2": [reset, answer("x")]}
    with FaultServer(behaviours) as server:
        done = run(folder, server, *config(folder, backoff=0.01))
    assert done.returncode == 1
    assert "HTTP 400: not with ***" in results(folder)["r1"]["error"]["message"]
    assert results(folder)["r2"]["text"] == "x"
    told = done.stdout + done.stderr.encode()
    assert KEY.encode() not in told + b"".join(path.read_bytes() for path in folder.iterdir())
    assert {headers["authorization"] for _, headers, _ in server.requests} == {f"Bearer {KEY}"}


def test_a_refused_key_ends_the_run_and_another_one_goes_on(folder):
    refused = [answer("a"), refusal(401, f"not {KEY}")]
    with FaultServer({f"p{number}": refused[number > 3 :] for number in range(8)}) as server:
        done = run(folder, server, "-q")
        assert done.returncode == 1
        assert "HTTP 401: not ***; the key is that of OPENAI_API_KEY" in done.stderr
        assert "--resume" in done.stderr
        server.behaviours = {}
        num_done = len(results(folder))
        assert run(folder, server, "--resume").returncode == 0
    assert 1 <= num_done < 8
    assert len(results(folder)) == 8


@pytest.mark.parametrize("shown", ["-q", "--live=always"])
def test_a_wait_that_is_too_long_is_told_once_and_the_run_goes_on_later(folder, shown):
    later = [refusal(429, "daily limit\x1b[31m", Retry_After="3600"), answer("x")]
    with FaultServer(dict.fromkeys(["p1", "p2", "p5"], later)) as server:
        done = run(folder, server, "--max-wait", "60", shown)
        assert done.returncode == 1
        [told] = [line for line in done.stderr.splitlines() if "not waiting until" in line]
        assert "(3,600 s) for http://" in told
        assert "HTTP 429: daily limit" in told
        assert "; --max-wait 60 is less than 3600 s" in told
        assert "\x1b[31m" not in told
        assert "--resume --retry-failed" in done.stderr.split("continue later with: ")[1]
        done = run(folder, server, "--max-wait", "60", shown, "--resume", "--retry-failed")
    assert done.returncode == 0
    assert "longer than --max-wait" not in done.stderr
    assert {each["finish_reason"] for each in results(folder).values()} == {"stop"}


def test_a_moderated_prompt_fails_alone_and_resume_gets_past_it(folder):
    flagged = refusal(403, "your input was flagged")
    with FaultServer({"p0": [flagged, answer("x")], "p2": [refusal(403, "no")]}) as server:
        done = run(folder, server)
        assert done.returncode == 1
        assert {name: each["finish_reason"] for name, each in results(folder).items()} == {
            f"r{number}": "error" if number in {0, 2} else "stop" for number in range(8)
        }
        assert run(folder, server, "--resume").returncode == 1
        assert len(server.requests) == 8
        assert run(folder, server, "--resume", "--retry-failed").returncode == 1
        assert results(folder)["r0"]["text"] == "x"
        assert run(folder, server, "--resume", "--retry-failed").returncode == 1
    assert results(folder)["r2"]["finish_reason"] == "error"  # by itself, as before


def test_an_address_that_lacks_v1_is_told_so(folder):
    with FaultServer(usual=refusal(404, "Not Found")) as server:
        name = server.name.removesuffix("/v1")
        lacking = batchdecode("run", "r.jsonl", "--model", name, "-o", "lacking.jsonl", cwd=folder)
        whole = run(folder, server)
    assert f"HTTP 404: Not Found; is it {server.name}?" in lacking.stderr
    assert "HTTP 404: Not Found" in whole.stderr
    assert "is it" not in whole.stderr


SAID = [{"role": "user", "content": "hi"}]
OBJECT = {"type": "object"}
CHAT = "/v1/chat/completions"


def row(url=CHAT, **body):
    return {"custom_id": "a", "method": "POST", "url": url, "body": body}


AS_WRITTEN = [
    ({"messages": SAID}, {}),
    ({"messages": SAID, "max_tokens": 16, "temperature": 0, "top_p": 1, "seed": 0}, None),
    (row(model="m", messages=SAID, frequency_penalty=0, presence_penalty=0.0), None),
    (row(messages=SAID, max_completion_tokens=500, reasoning_effort="low", store=True), None),
    (row(messages=SAID, max_tokens=5, extra_body={"max_tokens": None, "x": 1}), {"x": 1}),
    (row(messages=SAID, chat_template_kwargs={"enable_thinking": False}, min_p=0, top_k=3), None),
    (row(messages=SAID, reasoning={"effort": "low"}, provider={"a": ["a"]}, models=["b"]), None),
    (row(messages=SAID, thinking={"type": "disabled"}, service_tier="flex", metadata={}), None),
    (row(messages=SAID, modalities=["text", "audio"], audio={"voice": "a"}, verbosity="low"), None),
    (row(messages=SAID, logprobs=True, top_logprobs=2), None),
    (row(messages=SAID, logprobs=True), None),
    (row(messages=SAID, guided_regex="a+"), None),
    (row(messages=SAID, guided_json='{"type": "object"}'), None),
    (row(messages=SAID, structured_outputs={"choice": ["a", "b"]}), None),
    (row(messages=SAID, response_format={"type": "json_object", "schema": {}}), None),
    ({"messages": SAID, "regex": "a+"}, {"structured_outputs": {"regex": "a+"}}),
    ({"messages": SAID, "gbnf": "root ::= x"}, {"structured_outputs": {"grammar": "root ::= x"}}),
    ({"messages": SAID, "json_schema": OBJECT}, {"response_format": {"type": "json_object"}}),
    (row(messages=SAID, stop_token_ids=[5], ignore_eos=False, min_tokens=0), None),
    ({"messages": SAID, "stop_token": 5, "stop": "a"}, {"stop_token_ids": [5], "stop": "a"}),
    ({"messages": SAID, "stop": ["a"], "stop_sequence": "b"}, {"stop": ["b", "a"]}),
    (row(messages=SAID, stop="a", include_stop_str_in_output=True), None),
    (row(messages=SAID, stream=True, stream_options={"include_usage": True}), {}),
    ({"messages": SAID, "stream": False, "temperature": None, "seed": None, "model": None}, {}),
    (row(messages=SAID, n=1, continue_final_message=True, add_generation_prompt=False), None),
]  # fmt: skip


def test_a_row_is_sent_as_it_is_written_and_nothing_else(folder):
    """Bodies are those of the rows, but for None where the second half says what is sent."""
    lines = [
        line | {"custom_id" if "url" in line else "id": str(number)}
        for number, (line, _) in enumerate(AS_WRITTEN)
    ]
    (folder / "r.jsonl").write_bytes(lines_of(*lines))
    with FaultServer(models=("m", "n")) as server:
        done = run(folder, server, "-b", 1, "--extra-body", '{"model": "m"}')
    assert len(server.bodies) == len(lines), done.stderr
    for body, (line, expected) in zip(server.bodies, AS_WRITTEN, strict=True):
        for name in ("stream", "stream_options", "model", "messages"):
            assert body.pop(name)
        written = {**line.get("body", line)}
        for name in ("model", "messages", "n"):
            written.pop(name, None)
        assert body == (written if expected is None else expected)


@pytest.mark.parametrize(
    ("models", "name", "row_model", "sent", "told"),
    [
        (("a", "b"), "", "b", "b", ""),
        (("a", "b"), "", "c", "c", ""),  # an alias that is not listed, for the server to know
        (("a", "b"), "", None, None, "the server has 2 models, and this request names none"),
        (("a", "b"), "#a", "b", "a", "model a was used instead of b"),
        (("a",), "", "gpt-4", "a", "model a was used instead of gpt-4"),
        (("a",), "", None, "a", ""),
        ((), "", "gpt-4", "gpt-4", ""),
    ],
)
def test_a_row_keeps_its_model_if_the_server_lists_it(folder, models, name, row_model, sent, told):
    model = {} if row_model is None else {"model": row_model}
    (folder / "r.jsonl").write_bytes(lines_of({"prompt": "hi", **model}))
    with FaultServer(models=models) as server:
        done = batchdecode("run", "r.jsonl", "--model", server.name + name, cwd=folder)
    assert [body.get("model") for body in server.bodies] == ([] if sent is None else [sent])
    assert told in done.stderr
    assert ("instead of" in done.stderr) == ("instead of" in told)
    assert done.returncode == (2 if sent is None else 0), done.stderr


def test_what_was_cut_or_refused_is_asked_again_and_other_rows_stay(folder):
    statuses = {str(status): status for status in (400, 403, 422, 429)}
    names = ("abort", "refusal", "none", "lost", "call", *statuses)
    rows = [{**row(messages=[{"content": name}]), "custom_id": name} for name in names]
    (folder / "r.jsonl").write_bytes(lines_of(*rows))
    call = {"name": "f", "arguments": "{}"}
    deltas = {"refusal": {"refusal": "No."}, "call": {"function_call": call}}
    told = {
        n: chunks({"choices": [{"delta": d, "finish_reason": "stop"}]}) for n, d in deltas.items()
    }
    told |= {"none": answer("Hi", finish=""), "lost": answer("Hi", finish=None)}
    told |= {"abort": answer("Hi", finish="abort")}
    told |= {name: refusal(status) for name, status in statuses.items()}
    with FaultServer({name: [each, answer("well")] for name, each in told.items()}) as server:
        assert run(folder, server, *config(folder, max_attempts=1)).returncode == 1
        lines = (folder / "out.jsonl").read_text().splitlines()
        again = run(folder, server, "--resume", "--retry-failed")
    assert again.returncode == 0, again.stderr
    asked_again = {body["messages"][0]["content"] for body in server.bodies[len(names) :]}
    assert asked_again == {"abort", "refusal", "lost", *statuses}
    first = {each["custom_id"]: each for each in map(json.loads, lines)}
    for name, status in {**statuses, "none": 200, "call": 200}.items():
        assert first[name]["response"]["status_code"] == status
        assert (first[name]["error"] or {"status": 200})["status"] == status
    found = {name: each["response"]["body"]["choices"][0] for name, each in first.items()}
    reasons = {name: choice["finish_reason"] for name, choice in found.items()}
    again = dict.fromkeys(asked_again, "error")
    assert reasons == again | {"none": "stop", "call": "function_call"}
    kept = {name: line for name, line in first.items() if name not in asked_again}
    lines = (folder / "out.jsonl").read_text().splitlines()
    after = {each["custom_id"]: each for each in map(json.loads, lines)}
    assert {name: after[name] for name in kept} == kept


def test_what_a_server_cannot_be_told_is_refused_by_name(folder):
    fields = {
        "states": {"prompt": "a", "states": {"a": [{"on": "b", "to": None}]}},
        "heal": {"prompt": "a", "heal": True},
        "num_beams": {"prompt": "a", "num_beams": 2},
        "stop_sequence": {"prompt": "a", "stop_sequence": [[1, 2]]},
        "prompt": {"prompt": [{"length": 5}]},
        "messages": {"messages": []},
        "extra_body": {"prompt": "a", "extra_body": 5},
        "extra_body.n": {"prompt": "a", "extra_body": {"n": 2}},
        "toools": {"prompt": "a", "toools": []},
    }
    (folder / "r.jsonl").write_bytes(lines_of(*fields.values()))
    with FaultServer() as server:
        done = run(folder, server)
    assert done.returncode == 2
    assert f"{len(fields)} invalid of {len(fields)} lines" in done.stderr
    assert [f"`{field}`" for field in fields if f"`{field}`" not in done.stderr] == []
    assert not server.requests


@pytest.mark.parametrize(
    "number", mostly_heavy([signal.SIGKILL, signal.SIGINT, signal.SIGTERM], signal.SIGINT)
)
def test_what_is_stopped_goes_on_and_nothing_is_lost_or_asked_twice(folder, number):
    slow = {f"p{index}": [answer("a", "b", gap=30), answer("well")] for index in (4, 6)}
    with FaultServer(slow, usual=answer("well")) as server:
        command = ("run", "r.jsonl", "--model", server.name, "-b", "2", "-o", "out.jsonl", "-q")
        process = start(*command, cwd=folder, command=COMMAND)
        wait_for(lambda: server.num_open == 2 and len(server.requests) == 7)
        began = time.monotonic()
        os.kill(process.pid, number)
        status = process.wait(30)
        assert time.monotonic() - began < 20  # and not 30, as the server would take
        assert status == (-number if number == signal.SIGKILL else 128 + number)
        wait_for(lambda: server.num_open == 0)
        assert server.num_gone == 2
        process.communicate()
        before = results(folder)
        assert set(before) <= {"r0", "r1", "r2", "r3", "r5"}
        num_asked = len(server.requests)
        done = batchdecode(*command, "--resume", cwd=folder)
    assert done.returncode == 0, done.stderr
    after = results(folder)
    assert {each["text"] for each in after.values()} == {"well"}
    assert len((folder / "out.jsonl").read_text().splitlines()) == len(after) == 8
    asked_again = [body["prompt"] for body in server.bodies[num_asked:]]
    assert sorted(asked_again) == sorted(f"p{i}" for i in range(8) if f"r{i}" not in before)
    if number != signal.SIGKILL:
        assert set(before) == {"r0", "r1", "r2", "r3", "r5"}


def test_a_trace_of_a_server_is_replayed(folder):
    with FaultServer(usual=answer("a", "b", "c", first=0.02, gap=0.01)) as server:
        assert run(folder, server).returncode == 0
    limits = ("--max-batch-tokens", "64", "--kv-blocks", "1000")
    profile = ("--profile", "h100_llama3.1-8b_tp1")
    replayed = batchdecode("replay", "t.jsonl", *profile, *limits, cwd=folder)
    assert replayed.returncode == 0, replayed.stderr
    assert b"24 output tokens" in replayed.stdout
    assert b"--batch" in replayed.stdout


def test_a_line_of_a_pipe_is_sent_while_others_are_silent(folder):
    with FaultServer({"slow": [answer("a", first=30)]}, usual=answer("b")) as server:
        process = start(
            *("run", "--model", server.name, "-b", "2", "-q"),
            cwd=folder,
            command=COMMAND,
            stdin=subprocess.PIPE,
        )
        process.stdin.write(lines_of({"id": "slow", "prompt": "slow"}))
        process.stdin.flush()
        wait_for(lambda: server.num_open == 1)
        process.stdin.write(lines_of({"id": "quick", "prompt": "quick"}))
        process.stdin.flush()
        line = json.loads(process.stdout.readline())
        assert (line["id"], server.num_open) == ("quick", 1)
        process.kill()
        process.communicate()


def test_every_reason_for_which_one_is_blocked_has_its_words():
    assert set(BLOCKED_CAUSES) == set(get_args(BlockedReason))
    assert set(SHORT_CAUSES) > set(get_args(BlockedReason))
