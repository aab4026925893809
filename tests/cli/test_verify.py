"""`batchdecode verify`: its verdicts, and the commands that show a difference again."""

import json
import shlex
import shutil
from pathlib import Path

import pytest
from process import batchdecode, lines_of, workload

SAMPLES = Path(__file__).parents[2] / "samples"
REQUESTS = lines_of(*workload(9, arrivals=lambda i: i * 7 % 11))


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "in").write_bytes(REQUESTS)
    shutil.copy(SAMPLES / "batch_dependent.py", tmp_path)
    return tmp_path


def verify(folder, *arguments, stdin=b"", **environment):
    done = batchdecode("verify", *arguments, cwd=folder, stdin=stdin, **environment)
    done.text = done.stdout.decode()
    return done


@pytest.mark.parametrize(
    ("model", "locale", "verdict"),
    [
        ("simulated", "C.UTF-8", "✓ identical outputs: alone, repeated, and in 2 batch settings"),
        ("simulated", "C", "* identical outputs: alone, repeated, and in 2 batch settings"),
        ("batch_dependent:mixes_rows", "C", "x different outputs: request r1, output 0, in "),
        ("batch_dependent:mixes_rows", "C.UTF-8", "✗ different outputs: request r1, output 0, in "),
        ("batch_dependent:draws", "C.UTF-8", "✗ different outputs: request r"),
    ],
)
def test_the_last_line_is_the_verdict(folder, model, locale, verdict):
    done = verify(folder, "in", "--settings", 2, "--model", model, LC_ALL=locale)
    assert done.text.splitlines()[-1].startswith(verdict)


def test_what_depends_on_drafts_by_its_nature_is_not_verified(folder):
    drafts = ["--draft", "simulated:0.5", "--acceptance"]
    done = verify(folder, "in", *drafts, "leviathan")
    assert done.returncode == 2
    assert "--acceptance leviathan cannot be verified: " in done.stderr
    assert verify(folder, "in", *drafts, "exact", "--settings", 2).returncode == 0


@pytest.mark.parametrize("name", ["mixes_rows", "forgets_order", "KnowsSlots"])
def test_a_difference_comes_with_what_shows_it_again(folder, name):
    model = f"batch_dependent:{name}"
    done = verify(folder, "in", "--model", model, "--seed", 3)
    assert done.returncode == 1
    lines = dict(line.split(maxsplit=1) for line in done.text.splitlines()[1:])
    assert lines["first"].startswith("difference at token ")
    alone, here = lines["alone"], lines["here"]
    assert alone != here
    assert "[" in alone
    command = shlex.split(lines["verify"])
    assert command[:2] == ["batchdecode", "verify"]
    assert command[-4:-1] == ["--seed", "3", "--only"]
    again = verify(folder, *command[2:])
    assert again.returncode == 1
    assert again.text.splitlines()[:4] == done.text.splitlines()[:4]
    run = batchdecode(*shlex.split(lines["run"])[1:], cwd=folder)
    results = {result["id"]: result for result in map(json.loads, run.stdout.splitlines())}
    wrong = done.text.splitlines()[0].split("request ")[1].split(",")[0]
    tokens = [int(token.split()[0]) for token in here.replace("[", "").split("  ")[:2]]
    position = int(done.text.split("at token ")[1].split(",")[0])
    start = max(position - 6, 0)
    assert position > 6 or results[wrong]["tokens"][start : start + 2] == tokens


FAILS_IN_A_BATCH = """
def fails(batch_prefixes):
    if len(batch_prefixes) > 1:
        raise RuntimeError("only one row at a time")
    return [9] * len(batch_prefixes)
"""


def test_if_one_side_failed_it_is_said_with_what(folder):
    (folder / "failing.py").write_text(FAILS_IN_A_BATCH)
    arguments = ("in", "--model", "failing:fails")
    done = verify(folder, *arguments)
    assert done.returncode == 1
    (line,) = [line for line in done.text.splitlines() if "ended with" in line]
    assert line.split(maxsplit=1)[0] == "here"
    assert "ended with model-error: " in line
    assert "only one row at a time" in line
    difference = json.loads(verify(folder, *arguments, "--json").text)["difference"]
    assert difference["alone_error"] is None
    assert difference["here_error"]["code"] == "model-error"
    assert "only one row at a time" in difference["here_error"]["message"]


def test_a_verdict_is_for_programs_too(folder):
    proof = json.loads(verify(folder, "in", "--settings", 5, "--json").text)
    assert proof["is_proven"]
    assert proof["is_deterministic"]
    assert proof["num_settings"] == 5
    assert proof["difference"] is None
    done = verify(folder, "in", "--json", "--model", "batch_dependent:mixes_rows")
    assert done.returncode == 1
    verdict = json.loads(done.text)
    assert not verdict["is_proven"]
    assert verdict["difference"]["field"] == "tokens"
    assert verdict["case"]["number"] == verdict["num_settings"] + 1
    assert f"--only {verdict['case']['number']}" in verdict["again"]


def test_a_configuration_gives_the_model_and_nothing_that_is_drawn(folder):
    (folder / "c.yaml").write_text(
        "seed: 4\nbatch: 2\noutput: none\nmodel: batch_dependent:mixes_rows\n"
    )
    done = verify(folder, "in", "--config", "c.yaml")
    assert done.returncode == 1
    assert "verify in --config c.yaml --model batch_dependent:mixes_rows --only 1\n" in done.text
    (folder / "c.yaml").write_text("simulated:\n  sede: 3\n")
    done = verify(folder, "in", "--config", "c.yaml")
    assert done.returncode == 2
    assert "did you mean seed?" in done.stderr
