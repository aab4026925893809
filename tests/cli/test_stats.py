"""`run --stats` and `run --summary-json -`: the numbers of a run, for people and for programs."""

import json
import re

import pytest
from process import ROOT, batchdecode, lines_of

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
    first = next(n for n, line in enumerate(lines) if line.startswith("  finish reasons"))
    return lines[first:], summary


@pytest.mark.parametrize("arguments", [[], LIMITED, DRAFTED], ids=["plain", "limited", "drafted"])
def test_the_tables_are_narrow_and_ascii_and_say_what_the_summary_says(tmp_path, arguments):
    lines, summary = told(tmp_path, *arguments)
    assert all(len(line) <= 80 and line.isascii() for line in lines)
    text = "\n".join(lines)
    assert f"stop {summary['finish_reasons']['stop']}" in text
    assert f"computed {summary['positions']['total']:,}" in text
    times = summary.get("latencies", {"e2e": summary["latency"]})
    for name, found in times.items():
        row = next(line.split() for line in lines if line.split()[0] == name)  # seconds first
        assert row[1] == f"{found['count']:,}"
        for shown, column in zip(row[3:], ("p50", "p90", "p95", "p99", "max"), strict=True):
            assert float(shown.replace(",", "")) == pytest.approx(found[column], rel=0.01)


def test_limits_and_drafts_have_their_lines(tmp_path):
    lines, summary = told(tmp_path, *LIMITED, "--prefix-cache", "on")
    titles = {line[2:16].strip() for line in lines}
    assert {"KV", "prefix cache", "preemptions", "budget", "steps blocked"} <= titles
    count = summary["preemptions"]["count"]
    assert any(line.startswith(f"  preemptions     {count:,}   recomputed") for line in lines)
    lines, summary = told(tmp_path, *DRAFTED)
    drafted, accepted = (summary["speculation"][name] for name in ("drafted", "accepted"))
    assert any(f"drafted {drafted:,}   accepted {accepted:,} (" in line for line in lines)


def test_constraints_tell_what_they_took_and_the_summary_does_not(tmp_path):
    lines, summary = told(tmp_path, source="-", stdin=CONSTRAINED)
    text = " ".join(" ".join(lines).split())
    assert re.search(r"constraints compiled 1 in [\d.]+ m?s longest [\d.]+ m?s reused 2", text)
    assert re.search(r"[\d.,]+ us a token over \d+ tokens", text)
    assert summary["constraints"].keys() == {"compiled", "cache_hits"}
    _, same = told(tmp_path, source="-", stdin=CONSTRAINED)
    assert same == summary
