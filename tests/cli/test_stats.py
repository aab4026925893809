"""`run --stats` and `run --summary-json -`: the numbers of a run, for people and for programs."""

import csv
import gzip
import io
import json
import re

import pytest
from process import ROOT, batchdecode, lines_of, workload

REQUESTS = ROOT / "samples/requests.jsonl"
LIMITED = ["-b", "4", "--kv-blocks", "24", "--max-batch-tokens", "16", "--profile", "constant:0.5"]
DRAFTED = ["--draft", "ngram"]
CONSTRAINED = lines_of(
    *[{"prompt": f"p{i}", "max_tokens": 9, "regex": "[a-d]{8}"} for i in range(3)]
)


def told(tmp_path, *arguments, source=REQUESTS, stdin=b""):
    """Run with --stats; return the tables and the summary of the same run."""
    done = batchdecode(
        *("run", source, "-o", "out.jsonl", "--force", "--stats", "--summary-json", "-"),
        *arguments,
        cwd=tmp_path,
        stdin=stdin,
    )
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout)
    lines = done.stderr.splitlines()
    first = next(n for n, line in enumerate(lines) if line.startswith("  run    "))
    return lines[first:], summary


@pytest.mark.parametrize("arguments", [[], LIMITED, DRAFTED], ids=["plain", "limited", "drafted"])
def test_the_tables_are_narrow_and_ascii_and_say_what_the_summary_says(tmp_path, arguments):
    lines, summary = told(tmp_path, *arguments)
    assert all(len(line) <= 80 and line.isascii() for line in lines)
    text = "\n".join(lines)
    assert f"stop {summary['finish_reasons']['stop']}" in text
    assert f"positions       total {summary['positions']['total']:,}" in text
    times = summary.get("latencies", {"e2e": summary["latency"]})
    for name, found in times.items():
        row = next(line.split() for line in lines if line.split()[0] == name)  # seconds first
        assert row[1] == f"{found['count']:,}"
        for shown, column in zip(row[3:], ("p50", "p90", "p95", "p99", "max"), strict=True):
            assert float(shown.replace(",", "")) == pytest.approx(found[column], rel=0.01)


def test_limits_drafts_and_constraints_have_their_lines(tmp_path):
    lines, summary = told(tmp_path, *LIMITED, "--kv-blocks", "16")
    titles = {line[2:16].strip() for line in lines}
    assert {"kv", "prefix cache", "preemptions", "budget", "blocked"} <= titles
    count = summary["preemptions"]["count"]
    assert any(
        line.startswith(f"  preemptions     count {count:,}   recomputed tokens") for line in lines
    )
    lines, summary = told(tmp_path, *DRAFTED)
    drafted, accepted = (summary["speculation"][name] for name in ("drafted", "accepted"))
    assert any(f"drafted {drafted:,}   accepted {accepted:,}" in line for line in lines)
    lines, summary = told(tmp_path, source="-", stdin=CONSTRAINED)
    text = " ".join(" ".join(lines).split())
    assert re.search(r"compiled 1 cache hits 2 compile time [\d.]+ m?s longest [\d.]+ m?s", text)
    assert re.search(r"[\d.,]+ us per token for \d+ tokens", text)
    assert summary["constraints"].keys() == {"compiled", "cache_hits"}
    _, same = told(tmp_path, source="-", stdin=CONSTRAINED)
    assert same == summary


COLUMNS = [
    "time", "steps", "running", "waiting", "blocks", "kv_share", "prompt_tokens",
    "output_tokens", "tokens_per_s", "arrived", "admitted", "finished", "preemptions",
    "ttft_mean",
]  # fmt: skip


def rows_of(data):
    return list(csv.DictReader(io.StringIO(data.decode())))


def test_a_run_over_time_is_a_table(tmp_path):
    (tmp_path / "in.jsonl").write_bytes(lines_of(*workload(9, arrivals=lambda i: i * 1.5)))
    options = ["--timeseries", "t.csv", "--timeseries-interval", 4, "--summary-json", "s.json"]
    done = batchdecode("run", "in.jsonl", "-b", 2, *options, "-q", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    rows = rows_of((tmp_path / "t.csv").read_bytes())
    summary = json.loads((tmp_path / "s.json").read_bytes())
    assert list(rows[0]) == COLUMNS
    assert [float(row["time"]) for row in rows] == [4.0 * n for n in range(1, len(rows) + 1)]
    for column, total in (
        ("steps", summary["steps"]),
        ("output_tokens", summary["generated_tokens"]),
        ("prompt_tokens", summary["prompt_tokens"]),
        ("finished", 9),
        ("arrived", 9),
    ):
        assert sum(int(row[column]) for row in rows) == total, column
    assert (rows[-1]["running"], rows[-1]["waiting"]) == ("0", "0")
    assert "latencies" not in summary


def test_the_table_over_time_has_columns_for_drafts_and_is_packed_if_asked(tmp_path):
    (tmp_path / "in.jsonl").write_bytes(lines_of(*workload(4)))
    options = ["--draft", "simulated:0.8", "--timeseries", "t.csv", "--summary-json", "s.json"]
    done = batchdecode("run", "in.jsonl", "-b", 2, *options, "-q", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    rows = rows_of((tmp_path / "t.csv").read_bytes())
    assert list(rows[0]) == [*COLUMNS, "drafted", "accepted"]
    found = json.loads((tmp_path / "s.json").read_bytes())["speculation"]
    for column in ("drafted", "accepted"):
        assert sum(int(row[column]) for row in rows) == found[column] > 0
    done = batchdecode("run", "-q", "--timeseries", "t.csv.gz", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    packed = (tmp_path / "t.csv.gz").read_bytes()
    assert gzip.decompress(packed).decode().splitlines() == [",".join(COLUMNS)]


# One run, one count: a request is a line of the file, an output one of its results, everywhere.

SAMPLE = (ROOT / "samples" / "requests.jsonl").read_bytes()
PLAIN = {"prompt": "Once", "max_tokens": 5}
FILES = {
    "the sample, with a request for no token": (SAMPLE, "27 requests"),
    "samples, beams and no tokens": (
        lines_of(
            PLAIN | {"n": 3, "temperature": 1},
            PLAIN | {"max_tokens": 0},
            PLAIN | {"max_tokens": 0, "n": 2, "temperature": 1},
            PLAIN | {"num_beams": 4, "n": 2},
            PLAIN | {"best_of": 4, "n": 2, "temperature": 1},
            PLAIN | {"negative_prompt": "no", "cfg_scale": 2},
        ),
        "6 requests · 11 outputs",
    ),
    "a line that is no request": (lines_of(PLAIN, {"promt": 1}), "2 requests · 1 failed"),
    "a prompt that can never run": (
        lines_of(PLAIN, PLAIN | {"prompt": [1] * 5000}),
        "2 requests · 1 failed",
    ),
}


SAMPLES = "samples, beams and no tokens"


@pytest.mark.parametrize(("name", "workers"), [*((name, None) for name in FILES), (SAMPLES, "2")])
def test_every_view_counts_alike(tmp_path, name, workers):
    content, told = FILES[name]
    (tmp_path / "in").write_bytes(content)
    options = ["--keep-going", "--kv-blocks", "99", "--summary-json", "s", "--trace", "t"]
    options += [] if workers is None else ["--workers", workers, "-b", "8"]
    batchdecode("run", "in", "-o", "out", *options, cwd=tmp_path)
    summary = json.loads((tmp_path / "s").read_bytes())
    parts = told.split(" · ")
    num_requests = int(parts[0].split()[0])
    num_outputs = int(parts[1].split()[0]) if "outputs" in told else num_requests
    assert (summary["requests"], summary["outputs"]) == (num_requests, num_outputs)
    assert len((tmp_path / "out").read_bytes().splitlines()) == num_outputs
    shown = batchdecode("trace", "t", "--format", "gantt", cwd=tmp_path).stdout.decode()
    assert re.search(rf"busy · {re.escape(told)}(?! · \d+ outputs)\b", shown)
