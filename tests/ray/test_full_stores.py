"""Runs beside others that have filled what Ray keeps objects in, or the disk it moves them to."""

import subprocess
import sys
from contextlib import contextmanager

import pytest
from nodes import Nodes
from process import lines_of
from running import alone, command_in, fill, results_of, wait_for

pytestmark = pytest.mark.timeout(300)
NO_DISK = {"local_fs_capacity_threshold": 0.0, "automatic_object_spilling_enabled": False}
OTHER = """
import sys, time

import numpy, ray

ray.init(sys.argv[1], log_to_driver=False)
kept, size = [], 2**20
while True:
    try:
        kept.append(ray.put(numpy.zeros(size, numpy.uint8)))
    except (ray.exceptions.ObjectStoreFullError, ray.exceptions.OutOfDiskError):
        if size > 2**10:
            size //= 8
        else:  # and so on, where others have left
            print(len(kept), flush=True)
            time.sleep(0.01)
"""


@contextmanager
def filled(nodes):
    """Have another program keep objects at the head until no more go there."""
    other = subprocess.Popen([sys.executable, "-c", OTHER, nodes.address], stdout=subprocess.PIPE)
    try:
        assert int(other.stdout.readline()) > 50
        yield
    finally:
        other.kill()
        other.communicate()


@pytest.fixture
def folder(tmp_path):
    fill(tmp_path)
    prompts = [{"id": f"long{i}", "prompt": "Once " * 60_000, "max_tokens": 4} for i in range(9)]
    outputs = [{"prompt": f"{i}", "max_tokens": 20_000, "ignore_eos": True} for i in range(9)]
    (tmp_path / "requests.jsonl").write_bytes(lines_of(*prompts, *outputs))
    return tmp_path


def test_a_full_store_is_no_concern_of_a_run(folder):
    with Nodes(num_cpus=2, _system_config=NO_DISK) as nodes, filled(nodes):
        running = command_in(folder, "--workers", 2, *nodes.on, "-q")
        out, told = running.communicate(timeout=120)
    assert not told
    assert results_of(out) == alone(folder)


def test_where_ray_stores_all_a_full_store_ends_a_run_that_goes_on_later(tmp_path):
    folder, paths = fill(tmp_path, 400), ("--model", "killing:sleepy", "-o", "out.jsonl")
    out = folder / "out.jsonl"
    everything = {"max_direct_call_object_size": 0, **NO_DISK}
    with Nodes(num_cpus=2, _system_config=everything) as nodes:
        command = *paths, "--workers", 2, *nodes.on
        running = command_in(folder, *command)
        assert wait_for(lambda: out.exists() and out.stat().st_size > 2_000)
        with filled(nodes):
            _, told = running.communicate(timeout=120)
        assert running.returncode == 1
        assert "error: the object store of Ray is full where " in told.decode()
        assert "\ncontinue with: " in told.decode()
        some = out.read_bytes()
        assert 0 < len(some.splitlines()) < 400
        again = command_in(folder, *command, "--resume", "-q")
        assert not again.communicate()[1]
    assert out.read_bytes().startswith(some)
    assert results_of(out.read_bytes()) == alone(folder, *paths[:2], "-b", 64)
