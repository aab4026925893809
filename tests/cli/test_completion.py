"""Completion: what may stand where TAB is pressed, and that bash, zsh and fish offer it."""

import gzip
import json
import os
import pty
import select
import shutil
import subprocess
import sys
import time

import pytest
from examples import mostly_heavy
from process import ENVIRONMENT

from cli.usage import candidates
from cli.usage.completing import answer


def offered(*words, at=None):
    """Return what may stand in the place of the last word, or of the one with this number."""
    place = len(words) - 1 if at is None else at
    return answer("zsh", [str(place), *words]).splitlines()


def words_of(lines):
    return [line[1:].partition("\t")[0] for line in lines if line.startswith("=")]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("comp", ["compare", "completion"]),
        ("run --keep", ["--keep-order", "--keep-going"]),
        ("run --keep-order --keep", ["--keep-going"]),
        ("trace w", ["why"]),
        ("trace di", ["diff"]),
        ("trace why --js", ["--json"]),
        ("trace diff a --to", ["--top"]),
        ("draft dia", ["diagnose"]),
        ("run --policy l", ["ljf", "lpm"]),
        ("run --policy=l", ["--policy=ljf", "--policy=lpm"]),
        ("compare --policy fcfs,l", ["fcfs,ljf", "fcfs,lpm"]),
        ("compare --batching s", ["static"]),
        ("run --prefix-cache o", ["on", "off"]),
        ("run --live p", ["plain"]),
        ("trace --format sp", ["spans"]),
        ("run --model s", ["simulated", "smollm2"]),
        ("serve --profile rtx4", ["rtx4090_llama3.1-8b"]),
        ("plan --profile roofline:llama-3.2", ["roofline:llama-3.2-1b"]),
        ("run --profile roofline:llama-3.1-8b:h100-s", ["roofline:llama-3.1-8b:h100-sxm"]),
        ("calibrate --hardware h100-s", ["h100-sxm"]),
        ("run --draft n", ["ngram"]),
        ("run --acceptance le", ["leviathan"]),
        ("schema t", ["trace"]),
        ("completion z", ["zsh"]),
        ("help polic", ["policies", "policy"]),
        ("run --batch ", []),
        ("run --slo t", ["ttft=", "tpot="]),
        ("plan --slo ttft=0.5,e", ["ttft=0.5,e2e="]),
        ("plan --slo p", ["priority="]),
        ("compare --sort ttft", ["ttft-p50", "ttft-p99"]),
        ("workload m", ["mooncake"]),
    ],
)
def test_what_may_stand_there(line, words):
    assert sorted(words_of(offered(*line.split(" ")))) == sorted(words)


@pytest.mark.parametrize(
    ("line", "pattern"),
    [
        ("run ", "**"),
        ("run -o ", "**"),
        ("run --config ", "**"),
        ("run --model ", "**.gguf"),
        ("run --profile ", "**.yaml"),
        ("train corpus -o ", "*"),
        ("trace diff a ", "**"),
    ],
)
def test_where_files_may_stand_the_shell_is_told_which(line, pattern):
    assert [each for each in offered(*line.split(" ")) if each.startswith("*")] == [pattern]


def test_every_word_comes_with_what_it_means():
    lines = dict(line[1:].split("\t") for line in offered("")) | dict(
        line[1:].split("\t") for line in offered("run", "--")
    )
    assert lines["trace"] == "Show which request held which slot at which step."
    assert lines["--batch"] == "Slots of the batch."
    assert lines["--help-all"] == "Show all options, grouped."
    assert "--repair" not in lines
    assert all(lines.values())


IDS = ["first", "füller", 'for "you"', "second"]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder with a trace and a requests file, packed and not, in which the process is."""
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
        assert words_of(offered("trace", "why", "", file, at=2)) == IDS
        assert words_of(offered("trace", file, "--request", "f")) == IDS[:3]
        assert words_of(offered("trace", "--request", 'for "', file, at=2)) == IDS[2:3]
    assert words_of(offered("trace", "why", "", "in.jsonl", at=2)) == ["first"]
    assert words_of(offered("trace", "why", "", "nowhere", at=2)) == []


def test_of_a_large_file_only_a_part_is_read(folder, monkeypatch):
    monkeypatch.setattr(candidates, "_MAX_READ", 150)
    assert words_of(offered("trace", "why", "", "run.trace.jsonl", at=2)) == IDS[:2]
    monkeypatch.setattr(candidates, "_MAX_READ", 2**20)
    monkeypatch.setattr(candidates, "_MAX_IDS", 1)
    assert words_of(offered("trace", "why", "", "run.trace.jsonl", at=2)) == IDS[:1]


LINES = ("run --po", "run --policy l", "run --model ", "help s")
LINES += ("compare --sort ", "run --slo ", "workload ")


@pytest.mark.parametrize("line", mostly_heavy(LINES, "run --policy l", "help s"))
def test_completing_loads_nothing_heavy(line):
    code = (
        "import sys, atexit\n"
        "heavy = {'numpy', 'rich', 'yaml'}\n"
        "atexit.register(lambda: print(heavy & sys.modules.keys(), file=sys.stderr))\n"
        "from cli.start import main; main()"
    )
    words = line.split(" ")
    done = subprocess.run(
        [sys.executable, "-c", code, str(len(words) - 1), *words],
        env=ENVIRONMENT | {"_BATCHDECODE_COMPLETE": "fish"},
        capture_output=True,
        check=True,
    )
    assert done.stdout
    assert done.stderr == b"set()\n"


# -- shells ----------------------------------------------------------------------------------------


@pytest.fixture
def environment(folder):
    """The environment of a shell in `folder` that finds the command."""
    command = folder / "bin" / "batchdecode"
    command.parent.mkdir()
    command.write_text(f"#!{sys.executable}\nfrom cli.start import main\nmain()\n")
    command.chmod(0o755)
    return ENVIRONMENT | {
        "PATH": f"{command.parent}:{os.environ['PATH']}",
        "HOME": str(folder),
        "TERM": "dumb",
        "PS1": "> ",
    }


def test_bash_offers_words_and_files(folder, environment):
    script = (
        'eval "$(batchdecode completion bash)"\n'
        'offer() { COMP_LINE="$*" COMP_POINT=${#COMP_LINE}; COMP_WORDS=($COMP_LINE)\n'
        "[[ $COMP_LINE == *' ' ]] && COMP_WORDS+=(''); COMP_CWORD=$((${#COMP_WORDS[@]} - 1))\n"
        '_batchdecode_complete batchdecode; echo "${COMPREPLY[*]}"; }\n'
        "offer batchdecode comp\noffer batchdecode run --keep\n"
        "offer batchdecode trace why fi\noffer batchdecode run in\n"
        "offer batchdecode trace run.trace.jsonl --request fo\n"
        "offer batchdecode run --profile roofline:llama-3.2\n"
    )
    done = subprocess.run(
        ["bash", "--norc", "-c", script], env=environment, capture_output=True, check=True
    )
    assert done.stdout.decode().splitlines() == [
        "compare completion",
        "--keep-order --keep-going",
        "",
        "in.jsonl",
        r"for\ \"you\"",
        "llama-3.2-1b",
    ]


@pytest.mark.skipif(shutil.which("fish") is None, reason="there is no fish")
def test_fish_offers_words_and_files(folder, environment):
    script = "batchdecode completion fish | source\n" + "".join(
        f"complete -C 'batchdecode {line}'; echo ---\n"
        for line in ("comp", "run --policy l", "run in", "trace run.trace.jsonl --request fi")
    )
    done = subprocess.run(
        ["fish", "--no-config", "-c", script], env=environment, capture_output=True, check=True
    )
    words = [
        [line.partition("\t")[0] for line in part.splitlines() if line]
        for part in done.stdout.decode().split("---\n")
    ]
    assert words == [["compare", "completion"], ["ljf", "lpm"], ["in.jsonl"], ["first"], []]


@pytest.mark.skipif(shutil.which("zsh") is None, reason="there is no zsh")
@pytest.mark.parametrize("is_set_up_before", [False, True], ids=["bare", "compinit"])
def test_zsh_completes_words_and_files(folder, environment, is_set_up_before):
    process, terminal = pty.fork()
    if process == 0:
        os.chdir(folder)
        os.execvpe("zsh", ["zsh", "-f", "-i"], environment)
    shown = b""

    def type_until(text, mark):
        nonlocal shown
        os.write(terminal, text)
        end = time.monotonic() + 50
        while mark not in shown and time.monotonic() < end:
            if select.select([terminal], [], [], 0.2)[0]:
                shown += os.read(terminal, 65536)
        assert mark in shown, shown.decode()
        shown = shown.partition(mark)[2]

    set_up = b"autoload -Uz compinit && compinit -u; " if is_set_up_before else b""
    type_until(set_up + b'eval "$(batchdecode completion zsh)"; echo "set"up\n', b"setup\r")
    for typed, completed in (
        (b"comple", b"completion"),
        (b"run --policy lj", b"ljf"),
        (b"trace run.trace.jsonl --request fi", b"first"),
        (b"run in", b"in.jsonl"),
    ):
        type_until(b"\x15batchdecode " + typed + b"\t", completed)
    os.close(terminal)
    os.waitpid(process, 0)
