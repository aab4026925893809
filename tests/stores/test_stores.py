"""Runs from and to S3 and Google's store: `pip install -e ".[stores]"` brings what stands for them.

That is moto, and gcp-storage-emulator; both answer at this machine.
"""

import os
import socket
import subprocess
import sys
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

from process import batchdecode, lines_of, workload  # noqa: E402 - as above

pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("default"),  # of packages that are not ours
]
SECRET, NO_TOKEN = "hidden", "anon"
REQUESTS = lines_of(*workload(60))


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


@pytest.fixture(params=["s3", "gs"])
def bucket(request, tmp_path):
    port, name = free_port(), f"bucket-{os.urandom(4).hex()}"
    endpoint = f"http://127.0.0.1:{port}"
    if request.param == "s3":
        server = "-m", "moto.server", "-H", "127.0.0.1", "-p", port
        keys = {"AWS_ACCESS_KEY_ID": "id", "AWS_SECRET_ACCESS_KEY": SECRET}
        environment = keys | {"AWS_ENDPOINT_URL": endpoint, "AWS_DEFAULT_REGION": "us-east-1"}
        files = s3fs.S3FileSystem(endpoint_url=endpoint, key="id", secret=SECRET)
    else:
        program = which("gcp-storage-emulator", path=str(Path(sys.executable).parent))
        server = program, "start", "--in-memory", "--host", "127.0.0.1", "--port", port
        environment = {"STORAGE_EMULATOR_HOST": endpoint, **PLAIN}
        files = gcsfs.GCSFileSystem(endpoint_url=endpoint, token=NO_TOKEN, project="p")
    (tmp_path / "requests.jsonl").write_bytes(REQUESTS)

    def run(*arguments):
        return batchdecode("run", "-q", *arguments, cwd=tmp_path, **environment)

    with served(*server):
        files.mkdir(name)
        files.pipe_file(f"{name}/requests.jsonl", REQUESTS)
        yield f"{request.param}://{name}", files, run


def test_a_run_from_and_to_a_store_is_that_of_files(bucket, tmp_path):
    url, files, run = bucket
    for requests, output in [("requests.jsonl", "out.jsonl"), (f"{url}/requests.jsonl", url)]:
        where = output if output != url else f"{url}/out.jsonl"
        done = run(requests, "-o", where, "--trace", where.replace("out", "trace"))
        assert (done.returncode, done.stderr) == (0, "")
    files.invalidate_cache()
    for name in ("out.jsonl", "out.jsonl.run.json", "out.jsonl.run.sums", "trace.jsonl"):
        assert files.cat_file(f"{url}/{name}") == (tmp_path / name).read_bytes()
    done = run("requests.jsonl", "-o", f"{url}/out.jsonl", "--model", "no:model")
    assert f"{url}/out.jsonl: the file has content of another kind" in done.stderr


def test_what_is_not_there_is_told(bucket):
    url, _, run = bucket
    done = run(f"{url}/none.jsonl")
    assert done.stderr == f"error: cannot read {url}/none.jsonl: there is no such file\n"
    assert f"cannot read {url}: that is a bucket" in run(url).stderr
    gone = f"{url.partition('://')[0]}://no-such-bucket-here/out.jsonl"
    done = run("requests.jsonl", "-o", gone)
    assert done.returncode == 1
    assert done.stderr.startswith(f"error: cannot write {gone}: ")
    assert "60 results went to /" in done.stderr
    assert SECRET not in done.stderr
