"""Completion: the words that a shell offers, and the scripts for bash, zsh and fish."""

import gzip
import json
import os
import shlex
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


def test_bash_offers_words(environment):
    words = run_in("bash", f'eval "$(batchdecode completion bash)"\n{ASK}', environment)
    assert words.split() == ["compare", "completion"]


def test_bash_finds_the_installed_script(folder, environment):
    start = folder / ".bashrc"
    start.write_text("export MINE=1")  # without a line break
    for report in (f"added a line to {start}\n", f"{start} loads it already\n"):
        shown = run_in("bash", "batchdecode completion --install; true", environment)
        assert report in shown  # of the shell that asked
        path = folder / ".local/share/bash-completion/completions/batchdecode"
        assert f"wrote {path}\n" in shown
        assert shown.endswith(f" source {path}\n")
    assert start.read_text().count("\n") == 2
    words = run_in("bash", f'source ~/.bashrc; echo "$MINE"\n{ASK}', environment)
    assert words.split() == ["1", "compare", "completion"]
    path.unlink()
    assert run_in("bash", "source ~/.bashrc; complete -p", environment) == ""


@pytest.mark.parametrize(
    ("shell", "variables", "script", "start"),
    [
        (
            "bash",
            {"XDG_DATA_HOME": "a b"},
            "a b/bash-completion/completions/batchdecode",
            ".bashrc",
        ),
        ("zsh", {}, ".local/share/zsh/site-functions/_batchdecode", ".zshrc"),
        (
            "zsh",
            {"XDG_DATA_HOME": "data", "ZDOTDIR": "dots"},
            "data/zsh/site-functions/_batchdecode",
            "dots/.zshrc",
        ),
        ("fish", {}, ".config/fish/completions/batchdecode.fish", None),
        ("fish", {"XDG_CONFIG_HOME": "c"}, "c/fish/completions/batchdecode.fish", None),
    ],
    ids=str,
)
def test_each_shell_has_its_files(tmp_path, shell, variables, script, start):
    found = {name: str(tmp_path / path) for name, path in variables.items()}
    for _ in range(2):
        done = batchdecode("completion", shell, "--install", HOME=str(tmp_path), **found)
        assert done.returncode == 0
        files = {path for path in tmp_path.rglob("*") if path.is_file()}
        assert files == {tmp_path / name for name in (script, start) if name}
        assert (tmp_path / script).read_bytes() == batchdecode("completion", shell).stdout
        if start is not None:
            text = (tmp_path / start).read_text()
            name = shlex.quote(str(tmp_path / script))
            assert text == f"[ -f {name} ] && source {name}\n"


def test_relative_folders_do_not_count(tmp_path):
    batchdecode("completion", "zsh", "--install", HOME=str(tmp_path), XDG_DATA_HOME="x", ZDOTDIR="")
    assert sorted(path.name for path in tmp_path.iterdir()) == [".local", ".zshrc"]


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_zsh_and_fish_load_the_installed_script(shell, environment):
    if shutil.which(shell) is None:
        pytest.skip(f"there is no {shell}")
    run_in(shell, f"batchdecode completion {shell} --install", environment)
    ask = {
        "zsh": "source ~/.zshrc; echo $_comps[batchdecode]",
        "fish": "complete -C 'batchdecode comp'",
    }[shell]
    assert "comp" in run_in(shell, ask, environment)
