"""Files at URLs, by fsspec: inputs from a web server, and outputs to a store."""

import gzip
import os
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
import tomllib
from contextlib import nullcontext
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from process import ENVIRONMENT, ROOT, batchdecode, lines_of, on_a_full_disk, refused, start

from cli.commands.run import continuing_command
from cli.run.input import InputError, open_input
from cli.run.urls import is_url, shown
from cli.screen.terminal import shell_line

REQUESTS = lines_of(*({"prompt": f"Tell of number {n}", "max_tokens": 9} for n in range(40)))


class Store(ThreadingHTTPServer):
    """Gives out `files`, by name; asked: for which names; is_asked: once it was for any."""

    daemon_threads = False  # so that none outlives its test

    def __init__(self):
        self.files, self.asked = {}, []
        self.is_asked, self.has_ended = threading.Event(), threading.Event()
        super().__init__(("127.0.0.1", 0), Answer)

    def url(self, name, owner=""):
        return f"http://{owner}127.0.0.1:{self.server_port}/{name}"


class Answer(BaseHTTPRequestHandler):
    def do_GET(self):
        name = self.path.strip("/").partition("?")[0]
        self.server.asked.append(name)
        self.server.is_asked.set()
        if name == "hangs":
            self.server.has_ended.wait()
            return
        if name == "secret":
            self.send_error(403, "Forbidden")
            return
        if (held := self.server.files.get(name)) is None:
            self.send_error(404)
            return
        self.send_response(200)
        is_torn = name == "torn"
        self.send_header("Content-Length", str(len(held) + 1000 * is_torn))
        self.end_headers()
        self.wfile.write(held)
        self.close_connection = True

    def log_message(self, *_):
        pass


@pytest.fixture
def store():
    with Store() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        server.files["requests.jsonl"] = REQUESTS
        yield server
        server.has_ended.set()
        server.shutdown()
        thread.join()


@pytest.fixture
def local(tmp_path):
    (tmp_path / "requests.jsonl").write_bytes(REQUESTS)
    return tmp_path / "requests.jsonl"


@pytest.mark.parametrize("prompt", [[], ["-p", "One"]])
@pytest.mark.parametrize("more", [[], ["--workers", 2, "--keep-order"]])
def test_a_run_of_a_url_is_that_of_the_file_and_asks_once(store, local, more, prompt):
    run = ["run", "-q", "--keep-order", *prompt]
    here = batchdecode(*run, local)
    there = batchdecode(*run, store.url("requests.jsonl"), *more)
    assert (here.returncode, there.returncode) == (0, 0)
    without_steps = [
        [line.split(b',"slot"')[0] for line in d.stdout.splitlines()] for d in (here, there)
    ]
    assert without_steps[0] == without_steps[1] != []
    assert store.asked == ["requests.jsonl"]


def test_a_run_of_a_url_is_resumed(store, local, tmp_path):
    whole = batchdecode("run", local, "-q").stdout
    results, url = tmp_path / "results.jsonl", store.url("requests.jsonl")
    assert batchdecode("run", url, "-q", "-o", results).returncode == 0
    assert store.asked == ["requests.jsonl"]
    kept = results.read_bytes().splitlines(keepends=True)
    results.write_bytes(b"".join(kept[:15]))
    assert batchdecode("run", url, "-q", "-o", results, "--resume").returncode == 0
    assert sorted(results.read_bytes().splitlines()) == sorted(whole.splitlines())
    store.files["requests.jsonl"] = REQUESTS.replace(b"number 3", b"number 4")
    refused = batchdecode("run", url, "-q", "-o", results, "--resume")
    assert refused.returncode == 2


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("a?b", None),
        ("/s3://c", None),
        ("s3://bucket/key?versionId=1", "s3://bucket/key"),
        ("ftp://me:hidden@host/a@b", "ftp://host/a@b"),
        ("simplecache::https://host/a?sig=hidden", "simplecache::https://host/a"),
    ],
)
def test_what_is_a_url_and_how_it_is_shown(path, name):
    assert is_url(path) == (name is not None)
    assert shown(path) == (name or path)


def test_the_command_that_continues_a_run_has_no_secret():
    line = ["run", "https://me:hidden@host/a?sig=hidden", "-o", "b?", "--force"]
    told = "batchdecode run 'https://***@host/a?***' -o 'b?' --resume"
    assert shell_line(continuing_command(line)) == told


@pytest.mark.parametrize("name", ["run", "train"])
def test_the_command_that_continues_can_be_pasted(name):
    odd = ["it's", "a\tb \x1b[31m0", "two\nlines' \\x", "ü\u202e", "\udcff0"]
    told = shell_line(continuing_command([name, *odd]))
    assert told.isprintable()
    assert r"$'a\tb \x1b[31m0' $'two\nlines\' \\x' " in told
    pasted = ["bash", "-c", told.replace("batchdecode", "printf '%s\\0'", 1)]
    given = subprocess.run(pasted, capture_output=True, check=True).stdout.split(b"\0")
    assert list(map(os.fsdecode, given)) == [name, *odd, "--resume", ""]


@pytest.mark.parametrize(
    ("line", "continued"),
    [
        ("in --force --retry-failed -q", "in -q --resume"),
        ("in --resume -q --resume=repair", "in -q --resume"),
        ("--force -- in --force", "--resume -- in --force"),
        ("-p --force --prompt --retry-failed", "-p --force --prompt --retry-failed --resume"),
        ("-qp --resume --force", "-qp --resume --resume"),
        ("-p=-p --force", "-p=-p --resume"),
        ("-b8 -p -- --force in --", "-b8 -p -- in --resume --"),
        ("-p --resume=repair - --prompt=--force", "-p --resume=repair - --prompt=--force --resume"),
    ],
)
def test_only_options_are_left_out_of_the_command_that_continues(line, continued):
    assert continuing_command(["run", *line.split()])[2:] == continued.split()
    repaired = continuing_command(["run", "in"], "--retry-failed", resume="--resume=repair")
    assert repaired[2:] == ["in", "--resume=repair", "--retry-failed"]


@pytest.mark.parametrize("prompt", ["--resume", "--resume=repair", "--resume=else", "--force"])
def test_a_prompt_may_look_like_an_option(prompt):
    done = batchdecode("run", "-p", prompt, "--max-tokens", "1", "--format", "jsonl")
    assert (done.returncode, done.stdout.count(b"\n")) == (0, 1), done.stderr


@pytest.mark.parametrize("scheme", ["s3", "gs"])
def test_a_missing_package_is_told_with_what_installs_it(scheme, monkeypatch):
    package = {"s3": "s3fs", "gs": "gcsfs"}[scheme]
    loaded = import_module("fsspec.registry")._registry
    monkeypatch.delitem(loaded, scheme, raising=False)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(InputError) as told:
        open_input(f"{scheme}://bucket/requests.jsonl", nullcontext)
    need = f"{scheme}:// needs {package}: pip install {package}"
    assert str(told.value) == f"cannot read {scheme}://bucket/requests.jsonl: {need}"


def test_what_cannot_be_read_is_an_error_that_tells_no_secret(store, tmp_path):
    store.files["torn"] = REQUESTS
    for url, shown_as, why in [
        (store.url("none?s=hidden", "a:hidden@"), store.url("none"), ": there is no such file"),
        (store.url("secret?s=hidden", "a:hidden@"), store.url("secret"), "403"),
        (store.url("torn", "a:hidden@"), store.url("torn"), ""),
        (f"file://{tmp_path}", f"file://{tmp_path}", ": it is a folder"),
        ("nowhere://a/b", "nowhere://a/b", ": "),
        ("adl://a/b", "adl://a/b", "nstall"),
    ]:
        said = refused("run", url)
        assert f"cannot read {shown_as}" in said
        assert why in said
        assert "hidden" not in said


def test_a_signal_breaks_off_a_store_that_hangs(store):
    with start("run", store.url("hangs")) as process:
        assert store.is_asked.wait(30)
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == 130


def test_a_disk_without_room_is_an_error(store, tmp_path):
    store.files["requests.jsonl"] = REQUESTS * 4
    done = subprocess.run(
        [*on_a_full_disk(), "run", store.url("requests.jsonl")],
        env=ENVIRONMENT,
        capture_output=True,
        check=False,
        cwd=tmp_path,
    )
    assert (done.returncode, done.stdout) == (2, b"")
    assert b"File too large" in done.stderr


def test_every_extra_that_is_named_is_there():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")]
    code = [*(ROOT / "cli").rglob("*.py"), *(ROOT / "batcher").rglob("*.py")]
    named = {
        extra
        for path in [*pages, *code]
        for several in re.findall(r"(?:batchdecode|-e \"\.)\[([a-z,]+)\]", Path(path).read_text())
        for extra in several.split(",")
    }
    assert "fsspec" in named
    assert named <= extras.keys()


# -- outputs

SHELF = {"COMMAND_SETUP": str(ROOT / "tests" / "shelf.py")}
BESIDE = (".run.json", ".run.sums")


def kept_in(folder):
    """The results that runs have kept in the temporary folders of a machine."""
    return [path for path in folder.glob("batchdecode-*/[!.]*") if not path.name.endswith(BESIDE)]


@pytest.fixture
def shelf(tmp_path, local):
    with TemporaryDirectory() as folder:  # of a short name: processes have sockets there
        (tmp_path / "tmp").symlink_to(folder)

        def run(*arguments, command="run", **more):
            environment = SHELF | {"TMPDIR": folder} | more
            return batchdecode(command, "requests.jsonl", *arguments, cwd=tmp_path, **environment)

        run.url = f"shelf://{tmp_path}/there"
        yield run


@pytest.mark.parametrize(("ending", "more"), [(".gz", []), ("", ["--workers", 2, "--keep-order"])])
def test_outputs_at_urls_are_those_in_files(shelf, tmp_path, ending, more):
    (tmp_path / "there").mkdir()
    (tmp_path / "here").mkdir()
    for place in ("here", shelf.url):
        names = {"-o": "out.jsonl", "--trace": "trace.jsonl", "--timeseries": "series.csv"}
        paths = [each for o, name in names.items() for each in (o, f"{place}/{name}{ending}")]
        done = shelf("-q", "--report", f"{place}/report.html", *paths, *more)
        assert (done.returncode, done.stdout, done.stderr) == (0, b"", "")
    found = sorted(path.name for path in (tmp_path / "here").iterdir())
    assert found == sorted(path.name for path in (tmp_path / "there").iterdir())
    if not more:  # or else slots depend on how fast each worker is
        for name in found:
            here, there = ((tmp_path / each / name).read_bytes() for each in ("here", "there"))
            if name.endswith(".gz"):  # pieces may be packed at other times
                here, there = gzip.decompress(here), gzip.decompress(there)
            assert here == there != b""
    assert list((tmp_path / "tmp").iterdir()) == []


def test_results_at_a_url_are_overwritten_only_by_force(shelf, tmp_path):
    (tmp_path / "there").write_text("mine")
    done = shelf("-o", shelf.url)
    assert (done.returncode, done.stderr.count("another kind: use --force")) == (2, 1)
    assert (tmp_path / "there").read_text() == "mine"
    assert shelf("-q", "-o", shelf.url, "--force").returncode == 0
    assert (tmp_path / "there").read_bytes() == shelf("-q").stdout


def test_results_that_cannot_be_uploaded_are_kept(shelf, tmp_path):
    done = shelf("-q", "-o", f"{shelf.url}/out.jsonl", SHELF_FAULT="broken")
    (kept,) = kept_in((tmp_path / "tmp").resolve())
    assert kept.read_bytes() == shelf("-q").stdout
    assert (done.returncode, "hidden" in done.stderr) == (1, False)
    url = f"{shelf.url}/out.jsonl"
    assert f"error: cannot write {url}: 503 Service Unavailable at shelf://host/a" in done.stderr
    assert f"40 results went to {kept}\n" in done.stderr


def test_results_of_an_input_that_breaks_off_are_kept(shelf, tmp_path):
    lines = b'{"id":"a","prompt":"x","max_tokens":2}\nnot a request\n'
    environment = SHELF | {"TMPDIR": str((tmp_path / "tmp").resolve())}
    done = batchdecode("run", "-q", "-o", shelf.url, stdin=lines, **environment)
    (kept,) = kept_in((tmp_path / "tmp").resolve())
    assert kept.read_bytes().startswith(b'{"id":"a"')
    assert (done.returncode, f"the results so far are kept as {kept}\n" in done.stderr) == (2, True)
    assert not (tmp_path / "there").exists()


@pytest.mark.parametrize("option", ["--trace", "--report", "--summary-json"])
def test_other_files_that_cannot_be_uploaded_are_kept(shelf, tmp_path, option):
    done = shelf("-q", "-o", "out.jsonl", option, f"{shelf.url}/file", SHELF_FAULT="broken@file")
    (kept,) = kept_in((tmp_path / "tmp").resolve())
    assert kept.read_bytes()
    assert done.returncode == 1
    assert f"shelf://host/a; the file is kept as {kept}" in done.stderr


@pytest.mark.parametrize("kind", ["stopped", "killed"])
def test_a_run_that_ends_early_keeps_its_results_and_resumes_there(shelf, tmp_path, kind):
    environment = ENVIRONMENT | SHELF | {"TMPDIR": str((tmp_path / "tmp").resolve())}
    command = ["run", "requests.jsonl", "-o", f"{shelf.url}/out.jsonl", "-b", 2]
    with start(*command, "--step-delay", 0.05, cwd=tmp_path, env=environment) as process:
        while not any(path.stat().st_size for path in kept_in((tmp_path / "tmp").resolve())):
            assert process.poll() is None
            time.sleep(0.01)
        process.send_signal(signal.SIGINT if kind == "stopped" else signal.SIGKILL)
        told = process.communicate(timeout=20)[1].decode()
    (kept,) = kept_in((tmp_path / "tmp").resolve())
    resuming = ["run", "requests.jsonl", "-o", str(kept), "-b", "2"]
    if kind == "stopped":
        assert f"results went to {kept}\n" in told
        told = shlex.split(told.partition("continue with: ")[2].partition("\n")[0])
        assert told == ["batchdecode", *resuming, "--step-delay", "0.05", "--resume"]
    assert batchdecode(*resuming, "--resume", cwd=tmp_path).returncode == 0
    assert kept.read_bytes() == shelf("-q", "-b", 2).stdout
    assert not (tmp_path / "there").exists()


def test_results_at_a_url_are_not_resumed(shelf):
    done = shelf("-o", f"{shelf.url}?signature=hidden", "--resume", "--model", "no:model")
    assert done.returncode == 2
    assert done.stderr == (
        f"error: --resume needs a local --output: download {shelf.url} with its .run.json and "
        ".run.sums, resume there, and upload it when it is complete\n"
    )


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("http://host/out.jsonl", "a web server takes no files"),
        ("simplecache::shelf://out.jsonl", "not through another one"),
        ("shelf://folder/", "it is a folder"),
        ("s3://bucket/out.jsonl", "s3://"),
        ("nowhere://out.jsonl", "nowhere"),
    ],
)
def test_urls_that_take_no_output_are_refused_before_a_model_is_loaded(shelf, url, why):
    for option in ("-o", "--trace"):
        done = shelf(option, url, "--model", "no:model")
        assert (done.returncode, done.stderr.count("\n")) == (2, 1)
        assert f"cannot write {url}: " in done.stderr
        assert why in done.stderr


def test_a_signal_breaks_off_an_upload_that_hangs(shelf, tmp_path):
    environment = (
        ENVIRONMENT | SHELF | {"TMPDIR": str((tmp_path / "tmp").resolve()), "SHELF_FAULT": "hangs"}
    )
    command = ["run", "requests.jsonl", "-q", "-o", f"{shelf.url}/out.jsonl"]

    def records():
        return (tmp_path / "tmp").resolve().glob("batchdecode-*/*.run.json")

    with start(*command, cwd=tmp_path, env=environment) as process:
        while not any(b'"finished": true' in path.read_bytes() for path in records()):
            assert process.poll() is None
            time.sleep(0.01)
        process.send_signal(signal.SIGINT)
        told = process.communicate(timeout=20)[1].decode()
        assert process.returncode == 130
    (kept,) = kept_in((tmp_path / "tmp").resolve())
    assert f"40 results went to {kept}\n" in told
