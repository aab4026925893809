"""SLOs of classes in `batchdecode compare` and `plan`, from arguments to what is told."""

import json

from process import batchdecode, lines_of

ROWS = lines_of(
    *[
        {"prompt": [1], "max_tokens": 10, "ignore_eos": True, "priority": int(number % 4 == 0)}
        for number in range(8)
    ]
)
SLOS = ("--slo", "e2e=80", "--slo", "priority=1:e2e=30")


def test_a_table_has_a_column_for_each_class():
    done = batchdecode("compare", "-", "--batch", "2,8", *SLOS, stdin=ROWS)
    head, titles, two, _ = done.stdout.decode().splitlines()
    assert "good of" in head
    assert titles.split()[8:11] == ["good", "others", "priority=1"]
    assert two.split()[8:11] == ["100%", "100%", "100%"]
    rows = batchdecode("compare", "-", "--batch", "1", *SLOS, "--csv", stdin=ROWS).stdout.decode()
    names, values = (line.split(",") for line in rows.splitlines())
    found = dict(zip(names, values, strict=True))
    assert (found["goodput_others"], found["goodput_priority=1"]) == ("1.0", "0.5")


def test_a_plan_tells_of_each_class_and_which_binds():
    done = batchdecode("plan", "-", *SLOS, stdin=ROWS)
    lines = done.stdout.decode().splitlines()
    assert lines[0] == (
        "batch 2 is the smallest that meets the SLO: 100% of 6 others and 100% of 2 outputs of "
        "priority=1 do, 99% of each class is asked"
    )
    assert lines[1:3] == [
        "  e2e        p99 40 steps of 80 steps, headroom 50%",
        "  priority=1 e2e p99 30 steps of 30 steps, headroom 0%",
    ]
    assert "  class      priority=1 misses at batch 1, 100% of 6 others," in lines
    found = json.loads(batchdecode("plan", "-", *SLOS, "--json", stdin=ROWS).stdout)
    assert found["binding_classes"] == ["priority=1"]
    assert found["limits"] == {"e2e": 80.0, "priority=1:e2e": 30.0}
    assert found["outcome"]["classes"]["priority=1"]["goodput"]["share"] == 1.0
