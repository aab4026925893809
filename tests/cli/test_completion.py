"""Completion: the words that a shell offers, and the scripts for bash, zsh and fish."""

import gzip
import json
import os
import shutil
import subprocess
import sys

import pytest
from process import ENVIRONMENT, batchdecode


def offered(line, cwd=None):
    """Return what may complete the last word of a line, as bash asks for it."""
    words = f"batchdecode {line}"
    done = batchdecode(
        cwd=cwd,
        _BATCHDECODE_COMPLETE="complete_bash",
        COMP_WORDS=words,
        COMP_CWORD=str(len(words.split(" ")) - 1),
    )
    assert done.stderr == ""
    return done.stdout.decode().split()


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("comp", ["compare", "completion"]),
        ("run --keep", ["--keep-order", "--keep-going"]),
        ("trace w", ["why"]),
        ("trace diff a --to", ["--top"]),
        ("draft ", ["diagnose"]),
        ("run --policy l", ["ljf", "lpm"]),
        ("compare --policy fcfs,l", ["fcfs,ljf", "fcfs,lpm"]),
        ("run --model s", ["simulated", "smollm2"]),
        ("serve --profile rtx4", ["rtx4090_llama3.1-8b"]),
        ("run --profile roofline:llama-3.1-8b:h100-s", ["roofline:llama-3.1-8b:h100-sxm"]),
        ("run --acceptance le", ["leviathan"]),
        ("help polic", ["policies", "policy"]),
        ("run --batch ", []),
        ("run --slo t", ["ttft=", "tpot="]),
        ("compare --sort ttft", ["ttft-p50", "ttft-p99"]),
        ("workload m", ["mooncake"]),
    ],
)
def test_what_may_stand_there(line, words):
    assert sorted(offered(line)) == sorted(words)


IDS = ["first", "füller", "for-you", "second"]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    events = [{"event": "run", "version": 1, "batch": 2}]
    events += [{"event": kind, "step": 0, "id": i} for kind in ("arrive", "admit") for i in IDS]
    lines = "".join(
        f"{json.dumps(event, separators=(',', ':'), ensure_ascii=False)}\n" for event in events
    )
    (tmp_path / "run.trace.jsonl").write_text(lines)
    (tmp_path / "run.trace.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    requests = "".join(json.dumps({"id": i, "prompt": "x"}) + "\n" for i in IDS[:1])
    (tmp_path / "in.jsonl").write_text(requests)
    return tmp_path


def test_ids_are_those_of_the_file_in_the_line(folder):
    for file in ("run.trace.jsonl", "run.trace.jsonl.gz"):
        assert offered(f"trace {file} --request f", folder) == IDS[:3]
    assert offered("trace why ", folder) == []
    assert offered("trace in.jsonl --request ", folder) == ["first"]
    assert offered("trace nowhere --request ", folder) == []


@pytest.fixture
def environment(folder):
    command = folder / "bin" / "batchdecode"
    command.parent.mkdir()
    command.write_text(f"#!{sys.executable}\nfrom cli.main import main\nmain()\n")
    command.chmod(0o755)
    path = f"{command.parent}:{os.environ['PATH']}"
    return ENVIRONMENT | {"PATH": path, "HOME": str(folder), "TERM": "dumb"}


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_script_of_a_shell_is_one_that_it_reads(shell, folder, environment):
    if shutil.which(shell) is None:
        pytest.skip(f"there is no {shell}")
    (folder / "script").write_bytes(batchdecode("completion", shell).stdout)
    subprocess.run([shell, "-n", "script"], cwd=folder, env=environment, check=True)


def run_in(shell, script, environment, **more):
    done = subprocess.run(
        [shell, "-c", script], env=environment | more, capture_output=True, check=False
    )
    assert done.stderr == b""
    return done.stdout.decode()


ASK = (
    "COMP_WORDS=(batchdecode comp) COMP_CWORD=1; _batchdecode_completion batchdecode\n"
    'echo "${COMPREPLY[*]}"\n'
)


def test_bash_offers_words(environment):  # the shell that asked
    words = run_in("bash", f'eval "$(batchdecode completion; true)"\n{ASK}', environment)
    assert words.split() == ["compare", "completion"]


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_zsh_and_fish_load_the_script(shell, environment):
    if shutil.which(shell) is None:
        pytest.skip(f"there is no {shell}")
    ask = {
        "zsh": 'eval "$(batchdecode completion zsh)"; echo $_comps[batchdecode]',
        "fish": "batchdecode completion fish | source; complete -C 'batchdecode comp'",
    }[shell]
    assert "comp" in run_in(shell, ask, environment)
