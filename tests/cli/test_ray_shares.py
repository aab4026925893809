"""What a worker takes of a machine of Ray, and clusters that do not start: no Ray is needed."""

import shutil
import sys
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
from examples import examples
from hypothesis import given
from hypothesis import strategies as st

from batcher.errors import BatchdecodeError
from cli.run.ray_workers import Actors, Share, share_of
from cli.run.run_options import RunOptions

THIRD = 0.3333


MACHINES = st.lists(
    st.fixed_dictionaries({}, optional={"CPU": st.integers(0, 9), "GPU": st.integers(0, 4)}),
    max_size=5,
)


@examples(100)
@given(machines=MACHINES, num_workers=st.integers(1, 40))
def test_no_larger_part_would_do(machines, num_workers):
    share = share_of(machines, num_workers)
    parts = [int(10_000 / number) / 10_000 for number in range(1, num_workers + 1)]
    gpus = parts if any(machine.get("GPU") for machine in machines) else [0.0]
    fitting = [
        (num_gpus, num_cpus)
        for num_gpus in gpus
        for num_cpus in parts
        if sum(num_placed(machine, num_cpus, num_gpus) for machine in machines) >= num_workers
    ]
    num_gpus, num_cpus = max(fitting, default=(gpus[0], 1.0))
    assert share == Share(num_cpus, num_gpus)


def num_placed(machine, num_cpus, num_gpus):
    """How many workers a machine takes, placed one by one, in ten thousandths as Ray counts."""
    cpus, gpus = machine.get("CPU", 0) * 10_000, machine.get("GPU", 0) * 10_000
    num_cpus, num_gpus, number = round(num_cpus * 10_000), round(num_gpus * 10_000), 0
    while cpus >= num_cpus and gpus >= num_gpus:
        cpus, gpus, number = cpus - num_cpus, gpus - num_gpus, number + 1
    return number


class LateRay:
    """A Ray that is too slow to start, of which it tells by a bare Exception."""

    def init(self, *_, **__):
        raise Exception("The current node timed out during startup.")  # noqa: TRY002 - as it does


class FoundRay:
    """A Ray whose cluster is at once there; its folder is `folder`, and actors die on it."""

    _private = SimpleNamespace(worker=SimpleNamespace())

    class exceptions:  # noqa: N801 - a module
        RayError = RayTaskError = ActorUnavailableError = ActorDiedError = TimeoutError

    def __init__(self, folder):
        self.folder = str(folder)

    def init(self, *_, **__):
        return SimpleNamespace(address_info={"session_dir": self.folder})

    def get_runtime_context(self):
        return SimpleNamespace(get_node_id=lambda: "here", gcs_address="127.0.0.1:1")

    def nodes(self):
        return [{"NodeID": "here", "Alive": True, "Resources": {"CPU": 2.0}}]

    def shutdown(self):
        pass


def actors_of(ray, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", ray)
    return Actors(RunOptions(), 1, "", nullcontext)


def test_a_cluster_that_does_not_start_is_an_error_of_the_run(monkeypatch):
    message = "cannot connect to a cluster of Ray: The current node timed out during startup."
    with pytest.raises(BatchdecodeError, match=message), actors_of(LateRay(), monkeypatch):
        pass


@pytest.mark.parametrize(
    ("folder", "free", "told"),
    [(".", 0, "; the disk with {} is full"), (".", 2**30, ""), ("gone", 0, "")],
)
def test_a_disk_without_room_for_the_logs_of_workers_is_told(
    tmp_path, monkeypatch, folder, free, told
):
    if folder == ".":
        monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=free))
    with actors_of(FoundRay(tmp_path / folder), monkeypatch) as actors:
        died = actors._death(SimpleNamespace(machine_id="here"), ValueError("the actor died"))
        assert died.how == f"was lost: the actor died{told.format(tmp_path / folder)}"
