"""Prompts on the command line, prompts in plain text, and several inputs in order."""

import gzip
import json
from contextlib import nullcontext

import pytest
from process import batchdecode, lines_of, pretend_to_have_stopped, start, workload

from batcher.requests.lines import RequestParser
from batcher.requests.validation import ModelCapabilities
from cli.run.input import open_requests, open_source
from cli.run.problems import ProblemReport
from cli.run.run_options import RunOptions

FIRST = lines_of(*workload(30), "", {"prompt": "without an id", "max_tokens": 5})
SECOND = lines_of("", *({**each, "id": f"s{each['id']}"} for each in workload(20)))
LATER = lines_of(
    *({**each, "id": f"l{each['id']}"} for each in workload(20, arrivals=lambda i: i * 7 % 11)),
    {"prompt": "without an id", "max_tokens": 5},
)


@pytest.fixture
def folder(tmp_path):
    for name, data in (("a", FIRST), ("b", SECOND), ("late", LATER), ("all", FIRST + SECOND)):
        (tmp_path / name).write_bytes(data)
        (tmp_path / f"{name}.gz").write_bytes(gzip.compress(data))
    (tmp_path / "all late").write_bytes(FIRST + LATER + SECOND)
    (tmp_path / "empty").touch()
    return tmp_path


@pytest.mark.parametrize(
    ("inputs", "options"),
    [
        ("a b", ""),
        ("a empty b", "--keep-order --max-batch-tokens 40"),
        ("empty a b.gz", "--workers 2 --keep-order"),
        ("a.gz b.gz", "--trace trace --force"),
        ("a -", "--keep-order"),
        ("- b", "--workers 2 --keep-order"),
        ("late a b", "--keep-order"),
        ("a late.gz b", ""),
    ],
)
def test_several_inputs_give_the_results_of_one_with_all_their_lines(folder, inputs, options):
    names = inputs.split()
    whole = b"".join((folder / n.removesuffix(".gz")).read_bytes() for n in names if n != "-")
    stdin = SECOND if names[-1] == "-" else FIRST if "-" in names else b""
    whole = whole + stdin if names[-1] == "-" else stdin + whole
    (folder / "whole").write_bytes(whole)
    run = ["run", "-q", "-b", "3", *options.split()]
    expected = batchdecode(*run, "whole", cwd=folder)
    found = batchdecode(*run, *names, cwd=folder, stdin=stdin)
    assert (found.returncode, found.stderr) == (0, "")
    if "--workers" in run:  # which worker decodes a line depends on timing
        assert list(texts_of(found).items()) == list(texts_of(expected).items())
    else:
        assert found.stdout == expected.stdout
        assert len(found.stdout.splitlines()) == len([line for line in whole.splitlines() if line])


@pytest.mark.parametrize("num_kept_bytes", [0, 300])
@pytest.mark.parametrize("names", [["a", "late", "b"], ["a.gz", "late", "b.gz"], ["a", "b"]])
def test_lines_that_are_not_kept_are_read_again_from_their_input(
    folder, monkeypatch, names, num_kept_bytes
):
    monkeypatch.setattr("cli.run.input._HEAD_BYTES", num_kept_bytes)

    def requests_of(*names):
        options = RunOptions(input=[str(folder / name) for name in names])
        with open_requests(options, nullcontext) as opened:
            parser = RequestParser(ModelCapabilities(vocab_size=512))
            report, found = ProblemReport(opened.name), []
            how = {"waiting": nullcontext, "wake": lambda: None}
            source = open_source(opened, parser, report, keep_going=False, follow=False, **how)
            while (line := source.next()) is not None:
                found.append((source.input_index, line.request))
            return found

    assert requests_of(*names) == requests_of("all late" if "late" in names else "all")


def test_a_run_of_several_inputs_is_resumed(folder):
    run = ["run", "-q", "-p", "One", "-p", "Two", "--prompts", "words", "a", "b.gz", "-o", "out"]
    (folder / "words").write_text("plain\n\ntext\n")
    assert batchdecode(*run, cwd=folder).returncode == 0
    whole = (folder / "out").read_bytes()
    assert len(whole.splitlines()) == 2 + 2 + 31 + 20
    pretend_to_have_stopped(folder / "out", b"".join(whole.splitlines(keepends=True)[:20]))
    resumed = batchdecode(*run, "--resume", cwd=folder)
    assert (resumed.returncode, (folder / "out").read_bytes()) == (0, whole)
    for change in (["-p", "Three"], ["all"], ["--max-tokens", "5"]):
        pretend_to_have_stopped(folder / "out")
        refused = batchdecode(*run, *change, "--resume", cwd=folder)
        assert refused.returncode == 2
        assert "cannot resume out: " in refused.stderr


@pytest.mark.parametrize("command", ["run -q", "run -q --workers 2", "check"])
def test_problems_name_the_file_and_its_line(tmp_path, command):
    (tmp_path / "a").write_bytes(lines_of({"id": "x", "prompt": "a"}, {"prompt": "b"}))
    (tmp_path / "b").write_bytes(lines_of("", {"prompt": 5}, {"id": "x", "prompt": "c"}))
    (tmp_path / "words").write_bytes(b"fine\n\ncaf\xe9 noir\n")
    done = batchdecode(*command.split(), "-p", "One", "--prompts", "words", "a", "b", cwd=tmp_path)
    assert done.returncode == 2
    for expected in (
        "not UTF-8: invalid continuation byte\n --> words:3:4\n  |\n3 | caf\\xe9 noir\n",
        "`prompt` must be a string or a list of token ids, not 5\n --> b:2:12\n",
        "id `x` is already used on line 1 of a\n --> b:3:8\n",
        "error: 3 invalid of 7 lines; ",
    ):
        assert expected in done.stderr


@pytest.mark.parametrize(
    ("arguments", "data", "message"),
    [
        ("a -", b"", "error: cannot read a: No such file or directory\n"),
        ("-p x a.jsonl", b"", "error: cannot read a.jsonl: No such file or directory\n"),
        ("-p x", b"", ""),
        ("--prompts -", b"", ""),
        ("--prompts - -", b"", "error: stdin (-) can be read only once\n"),
        ("--prompts - --prompts -", b"", "error: stdin (-) can be read only once\n"),
        (
            "--prompts -",
            b'\n \n{"prompt": "x"}\n',
            "error: <stdin> contains requests in JSON, not plain prompts: pass it without",
        ),
        (
            "--prompts -",
            b"\rone\rtwo",
            "error: <stdin> has lines that end in CR. Convert it: tr '\\r' '\\n'\n",
        ),
        ("-p x -p \udc8b", b"", "error: prompt 2 of -p is not UTF-8: invalid start byte\n"),
        ("-p \udcff\udcfex", b"", "error: prompt 1 of -p is not UTF-8: invalid start byte\n"),
        (
            "--prompts -",
            b'{"prompt": "x"}\n',
            "error: <stdin> contains requests in JSON, not plain prompts: pass it without",
        ),
        ("--prompts -", "x\n".encode("utf-16"), "error: <stdin> is UTF-16, not UTF-8. "),
        ("--prompts -", b"BZh91AY", "error: <stdin> is compressed with bzip2; "),
        ("-p x -", b'{"id": "1", "prompt": "x"}', "id `1` is already used on line 1 of -p\n"),
        ("-p x -", b'{"custom_id": "a", "response": {}}\n', "<stdin> contains the results"),
        ("-", b"plain prompts", "help: one prompt per line? batchdecode run --prompts -\n"),
        ("-p x -o in in", b"", "--output in is the input too: they must be different files"),
    ],
)
def test_what_is_wrong_with_an_input(tmp_path, arguments, data, message):
    (tmp_path / "in").write_bytes(b'{"prompt": "x"}\n')
    done = batchdecode("run", "-q", *arguments.split(), cwd=tmp_path, stdin=data)
    assert (done.returncode, message in done.stderr) == (2 if message else 0, True)


@pytest.mark.parametrize(
    ("arguments", "data", "expected"),
    [
        (["-p", "a", "-p", ' "b"\n'], b"", {"1": "a", "2": ' "b"\n'}),
        (["-p", ""], b"", {"1": ""}),
        (
            ["--prompts", "-"],
            b"\xef\xbb\xbfa\r\n\r\n \n b \x00\n{}",
            {"1": "a", "4": " b \0", "5": "{}"},
        ),
        (
            ["--prompts", "-", "-p", "first"],
            gzip.compress(b"x\ny"),
            {"1": "first", "2": "x", "3": "y"},
        ),
        (
            ["--prompts", "words", "--prompts", "words", "-"],
            lines_of({"prompt": "z", "max_tokens": 256}),
            {"1": "w", "2": "w", "3": "z"},
        ),
        (["--prompts", "-", "--prompts", "words"], b"x\ry\r\n\t\n", {"1": "x\ry", "3": "w"}),
    ],
)
def test_prompts_are_requests(tmp_path, arguments, data, expected):
    (tmp_path / "words").write_text("w")
    requests = [{"id": i, "prompt": text, "max_tokens": 256} for i, text in expected.items()]
    done = batchdecode("run", "-q", *arguments, cwd=tmp_path, stdin=data)
    other = batchdecode("run", "-q", cwd=tmp_path, stdin=lines_of(*requests))
    assert texts_of(done) == texts_of(other)
    assert texts_of(done).keys() == expected.keys()


@pytest.mark.parametrize(
    ("options", "fields"),
    [
        ("--max-tokens 7", {}),
        ("--chat --model chats:Chat", {}),
        ("--workers 2 --keep-order", {"max_tokens": 256}),
    ],
)
def test_a_prompt_has_the_limit_of_its_kind(tmp_path, options, fields):
    (tmp_path / "chats.py").write_text(CHAT)
    run = ["run", "-q", *options.split()]
    done = batchdecode(*run, "-p", "a", cwd=tmp_path)
    other = batchdecode(*run, cwd=tmp_path, stdin=lines_of({"prompt": "a"} | fields))
    assert texts_of(done) == texts_of(other) != {}


def texts_of(done):
    return {row["id"]: row["text"] for row in map(json.loads, done.stdout.splitlines())}


CHAT = """
from batcher.models.simulated import SimulatedModel

class Chat(SimulatedModel):
    def chat_template(self, messages, **_):
        return f"<{messages[0]['content']}>"
"""


def test_prompts_from_a_pipe_are_read_as_they_come(tmp_path):
    options = ("--prompts", "-", "--follow", "--max-tokens", "3", "-q")
    with start("run", *options, stdin=-1, cwd=tmp_path) as process:
        for number in (1, 2):
            process.stdin.write(b"one\n")
            process.stdin.flush()
            assert json.loads(process.stdout.readline())["id"] == str(number)
        process.stdin.close()
        assert process.wait(30) == 0


def test_a_line_of_plain_text_that_is_too_long_is_shown_with_its_place(tmp_path):
    (tmp_path / "words").write_bytes(b"short\n" + b"x" * (2**26 + 1) + b"\nlast\n")
    done = batchdecode("check", "--prompts", "words", cwd=tmp_path)
    assert "error[line-too-long]: the line has more than 64 MiB, the maximum\n --> words:2:1\n" in (
        done.stderr
    )
    assert "words: 2 requests\n" in done.stdout.decode()


@pytest.mark.parametrize("name", ["prompt", "prompts"])
def test_prompts_are_set_on_the_command_line_only(tmp_path, name):
    variable = f"BATCHDECODE_{name.upper()}"
    done = batchdecode("run", "-q", stdin=b"", **{variable: "a b"})
    assert f"{variable} in the environment has no effect: use --{name}\n" in done.stderr
    assert done.stdout == b""
    (tmp_path / "config.yaml").write_text(f"{name}: abc\n")
    done = batchdecode("run", "-q", "--config", "config.yaml", cwd=tmp_path)
    assert f"config.yaml:1:1: {name} is not a setting: use --{name}\n" in done.stderr
