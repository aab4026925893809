"""Runs from and to S3 and Google's store: `pip install -e ".[stores]"` brings what stands for them.

That is moto, and gcp-storage-emulator; both answer at this machine.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import closing, contextmanager
from pathlib import Path
from shutil import which

import pytest

PLAIN = {"GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false"}  # what it asks by gRPC no emulator knows
os.environ |= PLAIN  # before gcsfs is imported

import gcsfs  # noqa: E402 - as above
import s3fs  # noqa: E402 - as above

sys.path.insert(0, str(Path(__file__).parents[1] / "cli"))

from process import ENVIRONMENT, ROOT, batchdecode, lines_of, workload  # noqa: E402 - as above

from cli.run.urls import Store  # noqa: E402 - as above

pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("default"),  # of packages that are not ours
]
SECRET, NO_TOKEN = "hidden", "anon"
REQUESTS = lines_of(*workload(60))
SHELF = [sys.executable, str(ROOT / "tests" / "shelf.py")]  # adds parts of results often


def free_port():
    with closing(socket.create_server(("127.0.0.1", 0))) as listening:
        return listening.getsockname()[1]


@contextmanager
def served(*command):
    """A server that answers at the port that ends its command line, and ends with us."""
    with subprocess.Popen(
        [sys.executable, *map(str, command)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as process:
        deadline = time.monotonic() + 120
        while True:
            try:
                socket.create_connection(("127.0.0.1", command[-1])).close()
                break
            except OSError:
                assert process.poll() is None
                assert time.monotonic() < deadline
                time.sleep(0.1)
        yield
        process.kill()


class Bucket:
    """A bucket of a store, and how runs come to it."""

    def __init__(self, url, files, environment, folder):
        self.url, self.files, self.folder = url, files, folder
        self.environment = ENVIRONMENT | environment
        self.machine("a")

    def machine(self, name):
        (self.folder / name).mkdir()
        self.environment["TMPDIR"] = str(self.folder / name)

    def read(self, name):
        self.files.invalidate_cache()
        return self.files.cat_file(f"{self.url}/{name}")

    def names(self):
        self.files.invalidate_cache()
        found = self.files.find(self.url)
        return sorted(name.partition("/")[2] for name in found)

    def start(self, *arguments, **environment):
        command = [*SHELF, "run", "-q", *map(str, arguments)]
        return subprocess.Popen(
            command,
            cwd=self.folder,
            env=self.environment | environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(self, *arguments, **environment):
        process = self.start(*arguments, **environment)
        out, told = process.communicate(timeout=200)
        assert (out, "Traceback" in told) == ("", False), told
        return process.returncode, told


@pytest.fixture(scope="module")
def s3():
    port = free_port()
    with served("-m", "moto.server", "-H", "127.0.0.1", "-p", port):
        yield f"http://127.0.0.1:{port}"


@pytest.fixture(scope="module")
def google():
    program = which("gcp-storage-emulator", path=str(Path(sys.executable).parent))
    port = free_port()
    with served(program, "start", "--in-memory", "--host", "127.0.0.1", "--port", port):
        yield f"http://127.0.0.1:{port}"


@pytest.fixture(params=["s3", "google"])
def bucket(request, tmp_path):
    endpoint = request.getfixturevalue(request.param)
    name = f"bucket-{os.urandom(4).hex()}"
    if request.param == "s3":
        keys = {"AWS_ACCESS_KEY_ID": "id", "AWS_SECRET_ACCESS_KEY": SECRET}
        environment = keys | {"AWS_ENDPOINT_URL": endpoint, "AWS_DEFAULT_REGION": "us-east-1"}
        files = s3fs.S3FileSystem(endpoint_url=endpoint, key="id", secret=SECRET)
        url = f"s3://{name}"
    else:
        environment = {"STORAGE_EMULATOR_HOST": endpoint, **PLAIN}
        files = gcsfs.GCSFileSystem(endpoint_url=endpoint, token=NO_TOKEN, project="p")
        url = f"gs://{name}"
    files.mkdir(name)
    files.pipe_file(f"{name}/requests.jsonl", REQUESTS)
    (tmp_path / "requests.jsonl").write_bytes(REQUESTS)
    return Bucket(url, files, environment, tmp_path)


def alone(bucket, *arguments):
    done = batchdecode(
        "run", "requests.jsonl", "-q", "-o", "here.jsonl", *arguments, cwd=bucket.folder
    )
    assert done.returncode == 0, done.stderr
    return (bucket.folder / "here.jsonl").read_bytes()


WHOLE = ["out.jsonl", "out.jsonl.run.json", "out.jsonl.run.sums", "requests.jsonl"]


def test_a_run_from_and_to_a_store_is_that_of_files(bucket):
    expected = alone(bucket)
    out = f"{bucket.url}/out.jsonl"
    assert bucket.run(f"{bucket.url}/requests.jsonl", "-o", out) == (0, "")
    assert bucket.names() == WHOLE
    assert bucket.read("out.jsonl") == expected
    for ending in (".run.json", ".run.sums"):
        assert (
            bucket.read(f"out.jsonl{ending}")
            == (bucket.folder / f"here.jsonl{ending}").read_bytes()
        )
    status, told = bucket.run(f"{bucket.url}/requests.jsonl", "-o", out, "--model", "no:model")
    assert status == 2
    assert f"{out} holds the complete results of a run" in told


@pytest.mark.parametrize("more", [[], ["--keep-order"], ["--workers", 2]])
def test_a_killed_run_goes_on_on_another_machine(bucket, more):
    expected = alone(bucket, "-b", 2, *more)
    paths = f"{bucket.url}/requests.jsonl", "-o", f"{bucket.url}/out.jsonl", "-b", 2, *more
    slow = [] if "--workers" in more else ["--step-delay", 0.02]
    resume = []
    for number in range(2):
        process = bucket.start(*paths, *slow, *resume)
        before = len(bucket.names())
        deadline = time.monotonic() + 100
        while len(bucket.names()) < before + 6 and process.poll() is None:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        process.send_signal(signal.SIGKILL)
        process.communicate()
        bucket.machine(f"{number}")
        resume = ["--resume"]
    assert bucket.run(*paths, "--resume") == (0, "")
    assert results_of(bucket.read("out.jsonl")) == results_of(expected)
    if more == ["--keep-order"]:
        assert bucket.read("out.jsonl") == expected
    assert bucket.names() == WHOLE


def results_of(lines):
    found = [json.loads(line) for line in lines.splitlines()]
    kept = [{k: v for k, v in each.items() if k not in {"slot", "steps"}} for each in found]
    return sorted(map(json.dumps, kept))


def test_a_large_file_is_put_and_got_whole(bucket, monkeypatch):
    for name, value in bucket.environment.items():
        monkeypatch.setenv(name, value)
    store = Store(f"{bucket.url}/large")
    with tempfile.TemporaryFile() as file, tempfile.TemporaryFile() as copy:
        file.write(os.urandom(5 * 2**23))  # several chunks
        file.flush()
        store.put(store.path, file)
        store.get(store.path, copy)
        file.seek(0)
        assert file.read() == copy.read()


def test_what_is_not_there_is_told(bucket):
    scheme = bucket.url.partition("://")[0]
    status, told = bucket.run(f"{bucket.url}/none.jsonl")
    assert (status, told) == (
        2,
        f"error: cannot read {bucket.url}/none.jsonl: there is no such file\n",
    )
    status, told = bucket.run(bucket.url)
    assert f"cannot read {bucket.url}: that is a bucket: behind it goes the name" in told
    gone = f"{scheme}://no-such-bucket-here/out.jsonl"
    status, told = bucket.run("requests.jsonl", "-o", gone, "--model", "no:model")
    assert (status, told.count("\n")) == (2, 1)
    assert told.startswith(f"error: cannot write {gone}: ")
    assert "hidden" not in told


def test_what_others_remove_during_a_run_is_told_and_nothing_is_lost(bucket):
    expected = alone(bucket, "-b", 2)
    paths = "requests.jsonl", "-o", f"{bucket.url}/out.jsonl", "-b", 2
    process = bucket.start(*paths, "--step-delay", 0.05)
    deadline = time.monotonic() + 100
    while len(bucket.names()) < 6:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    bucket.files.rm_file(f"{bucket.url}/out.jsonl.parts/writer")
    _, told = process.communicate(timeout=200)
    assert process.returncode == 1
    assert told.startswith(f"error: cannot write {bucket.url}/out.jsonl: what this run has written")
    (here,) = Path(bucket.environment["TMPDIR"]).rglob("results.jsonl")
    assert f"results went to {here}" in told
    assert set(here.read_bytes().splitlines()) <= set(expected.splitlines())
    assert bucket.run(*paths, "--resume") == (0, "")
    assert results_of(bucket.read("out.jsonl")) == results_of(expected)
    assert bucket.names() == WHOLE


def test_a_server_that_is_not_there_is_told(tmp_path):
    address = f"http://127.0.0.1:{free_port()}"
    environment = {
        "AWS_ACCESS_KEY_ID": "id",
        "AWS_SECRET_ACCESS_KEY": SECRET,
        "AWS_ENDPOINT_URL": address,
    }
    status, told = Bucket("s3://b", None, environment, tmp_path).run("s3://b/a.jsonl")
    assert (status, told.count("\n")) == (2, 1)
    assert told.startswith("error: cannot read s3://b/a.jsonl: ")


IMPATIENT = "from cli.run import urls; urls.PATIENCE = 2; from cli.main import main; main()"


def test_googles_store_is_given_up_soon_though_its_package_would_try_for_minutes(tmp_path):
    environment = PLAIN | {"STORAGE_EMULATOR_HOST": f"http://127.0.0.1:{free_port()}"}
    done = subprocess.run(
        [sys.executable, "-c", IMPATIENT, "run", "gs://b/a.jsonl"],
        capture_output=True,
        check=False,
        text=True,
        env=ENVIRONMENT | environment,
        cwd=tmp_path,
        timeout=60,
    )
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert done.stderr.startswith("error: cannot read gs://b/a.jsonl: Connect call failed")
