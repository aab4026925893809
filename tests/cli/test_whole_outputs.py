"""A full disk, or an error on the way, leaves every file of a command as it was."""

import pytest
from examples import mostly_heavy
from process import COMMAND, ROOT, batchdecode, on_a_full_disk, start

SAMPLES = ROOT / "samples"
BLOCK_BYTES = 1024  # of `ulimit -f`

COMMANDS = {
    "a page": f"trace {SAMPLES}/requests.jsonl --format html --force -o OUT.html",
    "a picture": f"trace {SAMPLES}/requests.jsonl --format svg --force -o OUT.svg",
    "a trace for Perfetto": f"trace {SAMPLES}/requests.jsonl --format chrome --force -o OUT",
    "a difference": f"trace diff {SAMPLES}/requests.jsonl - --html --force -o OUT.html",
    "a report": f"run {SAMPLES}/requests.jsonl -q --report OUT.html --force",
    "numbers": f"run {SAMPLES}/requests.jsonl -q --summary-json OUT --force",
    "numbers for Prometheus": f"run {SAMPLES}/tiny.jsonl -q --metrics-file OUT --force",
    "a plot": f"compare {SAMPLES}/requests.jsonl --batch 1,2,4 --plot OUT.svg --force",
    "a workload": "workload constant --requests 200 --force --quiet -o OUT",
}


@pytest.mark.parametrize(
    "command",
    mostly_heavy(COMMANDS.values(), COMMANDS["a page"], COMMANDS["numbers"]),
    ids=COMMANDS,
)
def test_a_full_disk_leaves_what_was_there(tmp_path, command):
    if "--metrics-file" in command:
        pytest.importorskip("prometheus_client")
    if "--plot" in command:
        pytest.importorskip("matplotlib")
    words = command.split()
    name = next(word for word in words if word.startswith("OUT"))
    (tmp_path / name).write_text("what was there")
    process = start(*words, cwd=tmp_path, command=on_a_full_disk())
    stderr = process.communicate()[1].decode()
    assert process.returncode == 1
    assert f"{name}: File too large\n" in stderr
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {name: "what was there"}

    done = batchdecode(*words, cwd=tmp_path)
    assert done.returncode in (0, 1)  # of a difference
    assert (tmp_path / name).stat().st_size > BLOCK_BYTES
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_the_summary_lists_no_file_that_could_not_be_written(tmp_path):
    files = ["--report", "r.html", "--summary-json", "s.json"]
    command = ["run", SAMPLES / "tiny.jsonl", *files]
    process = start(
        *command, cwd=tmp_path, command=["bash", "-c", 'ulimit -f 8; "$@"', "-", *COMMAND]
    )
    stderr = process.communicate()[1].decode()
    assert process.returncode == 1
    assert "numbers: s.json" in stderr
    assert "report: r.html" not in stderr
    assert "error: cannot write r.html: File too large" in stderr
    assert [path.name for path in tmp_path.iterdir()] == ["s.json"]


def test_a_workload_whose_source_is_bad_leaves_what_was_there(tmp_path):
    (tmp_path / "out").write_text("what was there")
    rows = "TIMESTAMP,ContextTokens,GeneratedTokens\n" + "2023-11-16 18:15:46.6,374,44\n" * 9999
    done = batchdecode(
        *["workload", "azure", "-", "-o", "out", "--force"],
        cwd=tmp_path,
        stdin=f"{rows}a\n".encode(),
    )
    assert done.returncode == 2
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"out": "what was there"}
