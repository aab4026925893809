"""Runs against llama.cpp's own server, which nobody here wrote; `pytest tests/servers`."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest

ROOT = Path(__file__).parents[2]
COMMAND = [sys.executable, "-c", "from cli.main import main; main()"]
QUESTIONS = ("What is the capital of France?", "What is 2 + 2?", "Name a colour.", "Say hello.")

pytest.importorskip("xllamacpp")


@pytest.fixture(scope="module")
def model():
    """The address of a server, as --model takes it."""
    server = subprocess.Popen(
        [sys.executable, Path(__file__).with_name("llama_cpp.py")],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    address = server.stdout.readline().decode().strip()
    yield f"openai:{address}/v1"
    server.kill()
    server.communicate()


@pytest.fixture
def folder(tmp_path):
    requests = [{"id": q, "prompt": q, "max_tokens": 8, "logprobs": 1} for q in QUESTIONS]
    (tmp_path / "r.jsonl").write_text("".join(f"{json.dumps(each)}\n" for each in requests))
    return tmp_path


def start(folder, model, *options):
    files = ("-b", "2", "-o", "out.jsonl", "--trace", "t.jsonl")
    return subprocess.Popen(
        [*COMMAND, "run", "r.jsonl", "--chat", "--model", model, *files, *options],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stderr=subprocess.PIPE,
    )


def results(folder):
    path = folder / "out.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return {each["id"]: each for each in map(json.loads, lines)}


@pytest.mark.timeout(600)
def test_chats_are_answered_with_ids_and_usage(folder, model):
    run = start(folder, model, "-b", "1")
    assert run.wait() == 0, run.stderr.read().decode()
    run.communicate()
    found = results(folder)
    url = f"{model.removeprefix('openai:')}/chat/completions"
    for question in QUESTIONS:
        chat = [{"role": "user", "content": question}]
        body = {"messages": chat, "max_tokens": 8, "temperature": 0}
        [choice] = httpx.post(url, json=body, timeout=600).json()["choices"]
        assert found[question]["text"] == choice["message"]["content"]
        assert found[question]["finish_reason"] == choice["finish_reason"]
    for result in found.values():
        assert 1 <= result["usage"]["completion_tokens"] <= 8
        assert result["usage"]["prompt_tokens"] > 20
        assert len(result["tokens"]) == len(result["logprobs"]) >= 1
        assert all(one["logprob"] <= 0 for one in result["logprobs"])


@pytest.mark.timeout(600)
def test_what_is_killed_goes_on_and_gives_what_a_whole_run_does(folder, model):
    whole = start(folder, model)
    whole.communicate()
    expected = {name: each["text"] for name, each in results(folder).items()}
    killed = start(folder, model, "--force")
    while not results(folder) and killed.poll() is None:
        time.sleep(0.05)
    killed.send_signal(signal.SIGKILL)
    killed.communicate()
    resumed = start(folder, model, "--resume")
    assert resumed.wait() == 0, resumed.stderr.read().decode()
    resumed.communicate()
    assert {name: each["text"] for name, each in results(folder).items()} == expected
    assert len((folder / "out.jsonl").read_text().splitlines()) == len(QUESTIONS)
