"""`batchdecode compare`, from its arguments to its table."""

import json
import os
import re
import signal
import time

import pytest
from examples import mostly_heavy
from process import ROOT, batchdecode, lines_of, start, workload

from batcher import Request
from batcher.metrics.slo import parse_slo
from batcher.models.simulated import SimulatedModel
from batcher.planning.compare import compare
from batcher.planning.deployments import AXES, Deployment, grid_of
from batcher.planning.measure import Price, Question
from batcher.planning.workload import workload_of
from cli.views.plan_tables import LEAST_WANTED, table_of

CHAT = ROOT / "samples" / "what-if" / "chat.jsonl"
FLEET = ROOT / "samples" / "what-if" / "fleet.yaml"
PROFILE = ("--profile", "rtx4090_llama3.1-8b")


def rows_of(*arguments):
    done = batchdecode("compare", *arguments, "--json")
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_a_row_for_each_cell_the_same_for_any_processes_and_sorted(tmp_path):
    done = batchdecode("compare", CHAT, *PROFILE, "--batch", "4,8,16,32,64", "--policy", "fcfs,sjf")
    lines = done.stdout.decode().splitlines()
    assert lines[1].split()[:3] == ["policy", "batch", "tokens/s"]
    settings = [line.split()[:2] for line in lines[2:]]
    assert settings == [[p, n] for p in ("fcfs", "sjf") for n in ("4", "8", "16", "32", "64")]
    assert "slots 90%" in lines[2]
    assert [line.endswith("knee") for line in lines[2:7]] == [False, False, False, True, False]
    assert done.stderr == (
        "KV is unlimited; the GPU of rtx4090_llama3.1-8b has room for 41,408 tokens: "
        "--kv-blocks 2587\n"
    )
    cells = rows_of(CHAT, *PROFILE, "--batch", "8,4,16", "--sort", "throughput")
    assert [cell["settings"]["batch"] for cell in cells] == [16, 8, 4]
    path = tmp_path / "r.jsonl"
    path.write_bytes(lines_of(*workload(200, arrivals=lambda i: i)))
    grid = (path, "--batch", "2,3,5,8", "--json")
    one, four = (batchdecode("compare", *grid, "--jobs", jobs).stdout for jobs in (1, 4))
    assert one == four
    assert len(one.splitlines()) == 4


@pytest.mark.parametrize(("width", "wanted"), [(92, ""), (80, ""), (80, "hits"), (60, "")])
def test_a_table_is_as_wide_as_the_terminal_and_says_what_has_no_room(width, wanted):
    requests = [Request(prompt=[1, 2, 3], max_tokens=10, ignore_eos=True)] * 80
    question = Question(workload_of(requests, SimulatedModel()), parse_slo("ttft=30"))
    grid = grid_of({"batch": [2, 4], "kv_blocks": [8, 400]}, Deployment())
    cells = compare(question, grid, growth=0.1)
    lines, whole = table_of(cells, width, wanted).splitlines(), table_of(cells).splitlines()
    table, note = lines[: len(whole)], " ".join(lines[len(whole) :])
    assert max(map(len, lines)) <= width < max(map(len, whole))
    left_out = [name for name in LEAST_WANTED if re.search(rf"\b{name}\b", note)]
    assert wanted not in left_out
    assert len(table[1].split()) == len(whole[1].split()) - len(left_out)
    assert table[0].split().count("ttft") == 1  # told over what is left of its group


def test_long_settings_are_cut_where_leaving_out_columns_does_not_do(tmp_path):
    path = tmp_path / "a-folder-with-a-long-name" / "and-a-file-with-one.yaml"
    path.parent.mkdir()
    path.write_text(
        "replicas: [{count: 2, profile: h100_llama3.1-8b_tp1, batch: 8, kv_blocks: 99}]"
    )
    other = path.with_name("another-one.yaml")
    other.write_text(path.read_text())
    requests = [Request(prompt=[1, 2, 3], max_tokens=10, ignore_eos=True)] * 80
    prices = {"h100-sxm": Price(dollars_per_hour=3.0, busy_watts=600, idle_watts=100)}
    question = Question(
        workload_of(requests, SimulatedModel()), parse_slo("ttft=30"), prices=prices
    )
    fleets = AXES["fleet"].values(f"{path},{other}")
    cells = compare(
        question, [AXES["fleet"].set(Deployment(), each) for each in fleets], growth=0.1
    )
    lines, whole = table_of(cells, 80).splitlines(), table_of(cells)
    assert max(map(len, lines)) <= 80
    assert str(path) in whole
    assert [line.split()[0][-8:] for line in lines if ".yaml" in line] == ["one.yaml"] * 4
    assert " price" in " ".join(lines)


def test_drafts_are_compared_with_none_and_fleets_by_their_groups(tmp_path):
    path = tmp_path / "r.jsonl"
    path.write_bytes(lines_of(*workload(5)))
    drafts = ("--draft-tokens", "2,4", "--draft-acceptance", "0.7", "--batch", "1")
    cells = rows_of(path, *PROFILE, *drafts)
    assert [cell["settings"]["draft_tokens"] for cell in cells] == [None, 2, 4]
    assert [cell["speedup"] is None for cell in cells] == [True, False, False]
    text = batchdecode("compare", path, *PROFILE, *drafts, "-q").stdout.decode()
    assert text.splitlines()[-2:] == [
        f"drafts {n}: worth it at the largest batch as well" for n in (2, 4)
    ]
    config = tmp_path / "c.yaml"
    config.write_text("batch: 2\n")  # which is for other commands, too
    other = tmp_path / "other.yaml"
    other.write_text(FLEET.read_text().replace("count: 2", "count: 1"))
    command = (CHAT, "--fleet", f"{FLEET},{other}", "--config", config)
    done = batchdecode("compare", *command)
    lines = done.stdout.decode().splitlines()
    assert lines[1].split()[:3] == ["fleet", "replicas", "tokens/s"]
    assert [line.split()[2:4] for line in lines[5:]] == [
        ["group", "replicas"],
        ["h100", "1"],
        ["rtx4090", "2"],
        ["h100", "1"],
        ["rtx4090", "1"],
    ]
    two, one = rows_of(*command)
    assert [use["replicas"] for use in one["outcome"]["groups"]] == [1, 1]
    assert two["settings"]["fleet"]["groups"][1]["settings"]["kv_blocks"] == 400


def test_requests_that_can_never_run_are_told_of_and_if_none_can_it_fails(tmp_path):
    path = tmp_path / "r.jsonl"
    path.write_bytes(lines_of(*[{"prompt": [1] * n, "max_tokens": 9} for n in (40, 60, 12)]))
    done = batchdecode("compare", path, "--kv-blocks", "1,2", "--batch", "2,4")
    lines = done.stdout.decode().splitlines()
    why = "of 3 outputs can never run, as they do not fit into"
    assert lines[-2:] == [
        f"failed: 3 {why} 1 block of 16 tokens",
        f"failed: 2 {why} 2 blocks of 16 tokens",
    ]
    assert done.returncode == 0, "one runs in 2 blocks"
    done = batchdecode("compare", path, "--kv-blocks", "1", "--batch", "2,4")
    assert done.returncode == 1
    assert [line.split()[-2:] for line in done.stdout.decode().splitlines()[2:4]] == [
        ["KV", "100%"]
    ] * 2


@pytest.mark.parametrize("number", mostly_heavy([signal.SIGINT, signal.SIGTERM], signal.SIGINT))
def test_a_signal_ends_it_and_all_its_processes_at_once(tmp_path, number):
    path = tmp_path / "r.jsonl"
    path.write_bytes(lines_of(*workload(3000, max_tokens=200, arrivals=lambda i: i)))
    batches = ",".join(str(size) for size in range(1, 202))
    process = start("compare", path, "--batch", batches, "--jobs", 2, start_new_session=True)
    assert process.stderr.readline() == b"201 cells, 2 at a time\n"
    time.sleep(0.2)  # while processes start, or are at work
    os.killpg(process.pid, number)
    out, error = process.communicate(timeout=10)
    assert (process.returncode, out, error) == (128 + number, b"", b"")
