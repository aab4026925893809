import csv
import gzip
import io
import json

from process import batchdecode, lines_of, workload

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


def test_gz_is_packed_and_no_requests_give_a_header(tmp_path):
    done = batchdecode("run", "-q", "--timeseries", "t.csv.gz", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    packed = (tmp_path / "t.csv.gz").read_bytes()
    assert gzip.decompress(packed).decode().splitlines() == [",".join(COLUMNS)]


def test_a_run_with_drafts_has_columns_for_them(tmp_path):
    (tmp_path / "in.jsonl").write_bytes(lines_of(*workload(4)))
    options = ["--draft", "simulated:0.8", "--timeseries", "t.csv", "--summary-json", "s.json"]
    done = batchdecode("run", "in.jsonl", "-b", 2, *options, "-q", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    rows = rows_of((tmp_path / "t.csv").read_bytes())
    assert list(rows[0]) == [*COLUMNS, "drafted", "accepted"]
    found = json.loads((tmp_path / "s.json").read_bytes())["speculation"]
    for column in ("drafted", "accepted"):
        assert sum(int(row[column]) for row in rows) == found[column] > 0
