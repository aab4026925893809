"""No process of a command imports what lies in the current folder, unless MODULE:NAME names it."""

import json
import re
import subprocess
import sys
from importlib.metadata import packages_distributions

import httpx
import pytest
from examples import mostly_heavy
from process import ENVIRONMENT, ROOT, start

SAMPLES = ROOT / "samples"
TINY = ["--model", SAMPLES / "tiny.gguf", "--tensor-parallel", 2]
SCRIPT = "from cli.main import main\nif __name__ == '__main__':\n    main()\n"
MODULE = [sys.executable, "-m", "batchdecode"]
CHOICE = {"prompt": "a", "choice": ["yes", "no"]}
MODEL = """
import subprocess, sys

def model(prefixes):
    subprocess.run([sys.executable, "-c", "import beside"], check=True)
    return [1 for _ in prefixes]
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("current")
    names = {*sys.stdlib_module_names, *packages_distributions(), "cli", "batcher"}
    for name in names - {"batchdecode"}:
        (folder / f"{name}.py").write_text(f"open({str(folder / name)!r} + '.run', 'w').close()\n")
    (folder / "choice.jsonl").write_text(json.dumps(CHOICE) + "\n")
    many = ({"prompt": [1], "max_tokens": 1, "arrival_time": at} for at in range(2_000))
    (folder / "many.jsonl").write_text("".join(json.dumps(each) + "\n" for each in many))
    for sample in ("requests.jsonl", "tiny.jsonl"):
        (folder / sample).write_bytes((SAMPLES / sample).read_bytes())
    return folder


@pytest.fixture(scope="module")
def script(tmp_path_factory):
    path = tmp_path_factory.mktemp("bin") / "batchdecode"
    path.write_text(SCRIPT)
    return [sys.executable, str(path)]


def marks_of(folder, command, *arguments, **environment):
    """Run a command line; return its exit status, the marks, and how stderr ends if it failed."""
    done = subprocess.run(
        [*command, *map(str, arguments)],
        cwd=folder,
        env=ENVIRONMENT | environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        check=False,
    )
    marks = sorted(path.name for path in folder.glob("*.run"))
    for mark in marks:
        (folder / mark).unlink()
    return done.returncode, marks, done.stderr.decode()[-500:] if done.returncode else ""


HELPED = {  # these start processes
    "constraint": ["run", "choice.jsonl", "-q"],
    "ranks of workers": ["run", "tiny.jsonl", *TINY, "--workers", 2],
    "compare": ["compare", "many.jsonl", "-b", "2,3", "--jobs", 2],
}
ALONE = {
    "run": ["run", "requests.jsonl", "-o", "out", "--report", "a", "--trace", "b.gz", "--force"],
    "file url": ["run", SAMPLES.as_uri() + "/requests.jsonl"],
    "trace": ["trace", "requests.jsonl", "--format", "html"],
    "verify": ["verify", "requests.jsonl"],
    "completion": ["completion", "bash"],
    "help": ["run", "--help"],
}


@pytest.mark.parametrize("arguments", HELPED.values(), ids=HELPED)
def test_a_helper_imports_nothing_from_the_current_folder(folder, script, arguments):
    assert marks_of(folder, script, *arguments) == (0, [], "")


@pytest.mark.parametrize(
    "arguments", mostly_heavy([*HELPED.values(), *ALONE.values()], ALONE["run"])
)
def test_a_module_of_python_imports_nothing_from_the_current_folder(folder, arguments):
    assert marks_of(folder, MODULE, *arguments) == (0, [], "")


def test_completing_imports_nothing_from_the_current_folder(folder, script):
    line = {"COMP_WORDS": "batchdecode run --mo", "COMP_CWORD": "2"}
    asked = {"_BATCHDECODE_COMPLETE": "complete_bash", **line}
    assert marks_of(folder, script, **asked) == (0, [], "")


@pytest.mark.heavy
def test_a_server_imports_nothing_from_the_current_folder(folder, script):
    line = ["serve", "--port", "0", "--workers", 2]
    server = start(*line, cwd=folder, command=script)
    try:
        where = re.search(r"at (http://\S+)\n", server.stderr.readline().decode())
        body = {"prompt": "a", "structured_outputs": {"choice": ["yes", "no"]}}
        assert httpx.post(f"{where[1]}/completions", json=body).status_code == 200
    finally:
        server.terminate()
        server.communicate()
    assert marks_of(folder, script, "--version") == (0, [], "")


@pytest.mark.parametrize(
    "more", mostly_heavy([[], ["--workers", "2"]], []), ids=["alone", "workers"]
)
def test_a_model_of_the_current_folder_may_import_and_start_what_lies_there(tmp_path, script, more):
    (tmp_path / "mine.py").write_text(MODEL)
    (tmp_path / "beside.py").write_text("")
    (tmp_path / "in.jsonl").write_text('{"prompt": [1], "max_tokens": 1}\n')
    line = ["run", "in.jsonl", "--model", "mine:model", *more]
    assert marks_of(tmp_path, script, *line) == (0, [], "")
