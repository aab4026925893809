"""`batchdecode plan`, from its arguments to what it tells."""

import json
import re

import pytest
from process import batchdecode, lines_of

from batcher.planning.measure import run
from cli.commands.plan import PlanOptions
from cli.planning import plan_requests

EIGHT = lines_of(*[{"prompt": [1], "max_tokens": 10, "ignore_eos": True}] * 8)

PACED = "each step takes 1 second: set --profile for real durations"


def plan(*arguments, stdin=EIGHT):
    return batchdecode("plan", "-", *arguments, stdin=stdin)


@pytest.mark.parametrize("command", ["compare", "run"])
def test_a_limit_of_more_seconds_than_anybody_promises_is_remarked(tmp_path, command):
    (tmp_path / "r").write_bytes(EIGHT)
    timed = ("--profile", "constant:0.02")
    for options in (("tpot=30", *timed), ("tpot=30s", *timed)):
        done = batchdecode(command, tmp_path / "r", "--slo", *options)
        assert done.returncode == 0
        told = "--slo: tpot=30 is 30 seconds; for milliseconds: tpot=30ms\n"
        assert (told in done.stderr) == (options == ("tpot=30", *timed))


def test_the_answer_is_there_before_it_is_known_what_would_help(tmp_path, monkeypatch, capfdbinary):
    (tmp_path / "r").write_bytes(EIGHT)

    def interrupted(_edge):
        raise KeyboardInterrupt

    monkeypatch.setattr("batcher.planning.plan.Edge.analyse", interrupted)
    with pytest.raises(KeyboardInterrupt):
        plan_requests(PlanOptions(input=str(tmp_path / "r"), axes={}, slo=["e2e=25"]))
    told = capfdbinary.readouterr()
    assert told.out.decode().splitlines() == [
        "batch 4 is the smallest that meets the SLO: 100% of 8 outputs do (target: 99%)",
        "  e2e        p99 20 steps of 25 steps, headroom 20%",
        "  next       batch 3 reaches 75%, 2 miss e2e",
        "  time       at batch 4: 50% waiting for slots, 50% computing",
        "  tried      1, 2, 3, 4, 5, 6, 8",
    ]
    assert told.err.endswith(b"stopped before the search for reliefs ended\n")


@pytest.mark.parametrize(
    ("num_known", "told"),
    [
        (0, "stopped before any value was tried\n"),
        (
            3,
            (
                "stopped after 3 values: batch 4 is the smallest that meets the SLO so far; "
                "tried batch 1 (25%), batch 2 (50%), batch 4 (100%); target 99%\n"
            ),
        ),
    ],
)
def test_a_search_that_is_stopped_tells_what_it_has_tried(
    tmp_path, monkeypatch, capfd, num_known, told
):
    (tmp_path / "r").write_bytes(EIGHT)
    num_left = num_known

    def interrupted(*arguments):
        nonlocal num_left
        num_left -= 1
        if num_left < 0:
            raise KeyboardInterrupt
        return run(*arguments)

    monkeypatch.setattr("batcher.planning.plan.run", interrupted)
    for is_quiet in (False, True):
        num_left = num_known
        options = PlanOptions(input=str(tmp_path / "r"), axes={}, slo=["e2e=25"], quiet=is_quiet)
        with pytest.raises(KeyboardInterrupt):
            plan_requests(options)
        out, err = capfd.readouterr()
        assert (out, err) == ("", "" if is_quiet else f"{PACED}\n{told}")


def test_a_batch_of_the_configuration_file_is_none_of_a_search_for_one(tmp_path):
    config = tmp_path / "c.yaml"
    config.write_text("batch: 2\n")
    assert plan("--slo", "e2e=25", "--config", config).stdout.startswith(b"batch 4 is the smallest")
    searched = plan("--slo", "ttft=1", "--config", config, "--search", "kv-blocks")
    shown = searched.stdout.decode()
    assert re.search(r"no help    batch 4( or \d+)*? or 1\b", shown), (
        "twice that of the file, and half"
    )


def test_a_plan_says_if_no_value_meets_the_slo_for_any_output():
    done = plan("--slo", "e2e=1")
    assert done.returncode == 1
    told = "of 8 outputs; no tried value meets it for any output, and batch 8 comes closest\n"
    assert told in done.stdout.decode()


TEN = {"prompt": [1], "max_tokens": 10, "ignore_eos": True}
CLASSES = lines_of(*[TEN | {"priority": int(number % 4 == 0)} for number in range(8)])
SLOS = ("--slo", "e2e=80", "--slo", "priority=1:e2e=30")


def test_classes_have_columns_and_a_plan_tells_which_binds():
    done = batchdecode("compare", "-", "--batch", "2,8", *SLOS, stdin=CLASSES)
    head, titles, two, _ = done.stdout.decode().splitlines()
    assert "good of" in head
    assert titles.split()[8:11] == ["good", "others", "priority=1"]
    assert two.split()[8:11] == ["100%", "100%", "100%"]
    rows = batchdecode(
        "compare", "-", "--batch", "1", *SLOS, "--csv", stdin=CLASSES
    ).stdout.decode()
    names, values = (line.split(",") for line in rows.splitlines())
    found = dict(zip(names, values, strict=True))
    assert (found["goodput_others"], found["goodput_priority=1"]) == ("1.0", "0.5")
    done = batchdecode("plan", "-", *SLOS, stdin=CLASSES)
    lines = done.stdout.decode().splitlines()
    assert lines[0] == (
        "batch 2 is the smallest that meets the SLO: 100% of 6 others and 100% of 2 outputs of "
        "priority=1 do (target: 99% of each class)"
    )
    assert lines[1:3] == [
        "  e2e        p99 40 steps of 80 steps, headroom 50%",
        "  priority=1 e2e p99 30 steps of 30 steps, headroom 0%",
    ]
    assert "  class      priority=1 misses at batch 1, 100% of 6 others," in lines
    found = json.loads(batchdecode("plan", "-", *SLOS, "--json", stdin=CLASSES).stdout)
    assert found["binding_classes"] == ["priority=1"]
    assert found["limits"] == {"e2e": 80.0, "priority=1:e2e": 30.0}
    assert found["outcome"]["classes"]["priority=1"]["goodput"]["share"] == 1.0
