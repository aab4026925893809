"""Workers of Ray without a Ray: pieces of calls, shares of machines, clusters that do not start."""

import json
import shutil
import sys
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
from examples import examples
from hypothesis import given
from hypothesis import strategies as st
from process import lines_of, workload

from batcher.errors import BatchdecodeError
from cli.run.ray_workers import Actors, Share, share_of
from cli.run.run import run
from cli.run.run_options import RunOptions
from cli.signals import StopSignals


class InnerRay:
    """A Ray whose actors are objects of this process.

    sizes: of the pieces of each call, and of the one that came back.  folder: of its session.
    """

    exceptions = SimpleNamespace(
        RayError=RuntimeError,
        RayTaskError=TimeoutError,
        ActorUnavailableError=TimeoutError,
        ActorDiedError=TimeoutError,
        ObjectStoreFullError=MemoryError,
        OutOfDiskError=MemoryError,
    )
    _private = SimpleNamespace(worker=SimpleNamespace())

    def __init__(self, folder=""):
        self.sizes, self.folder = [], str(folder)

    def init(self, *_, **__):
        return SimpleNamespace(address_info={"session_dir": self.folder})

    def shutdown(self):
        pass

    def kill(self, actor):
        pass

    def get_runtime_context(self):
        return SimpleNamespace(get_node_id=lambda: "here", gcs_address="127.0.0.1:1")

    def nodes(self):
        return [{"NodeID": "here", "Alive": True, "Resources": {"CPU": 2.0}}]

    def remote(self, **_):
        return lambda actor: SimpleNamespace(remote=lambda *given: self._started(actor(*given)))

    def wait(self, calls, **_):
        return calls, []

    def get(self, call):
        return call()

    def _started(self, actor):
        def exchange(*pieces):
            def call():
                piece, is_idle = actor.exchange(*pieces)
                self.sizes.append([*map(len, pieces), len(piece)])
                return piece, is_idle

            return call

        methods = {"machine_id": lambda: lambda: "here", "exchange": exchange}
        return SimpleNamespace(
            **{name: SimpleNamespace(remote=method) for name, method in methods.items()}
        )


def results_of(path):
    found = [json.loads(line) for line in path.read_bytes().splitlines()]
    kept = [{k: v for k, v in each.items() if k not in {"slot", "steps"}} for each in found]
    return sorted(map(json.dumps, kept))


@examples(15)
@given(
    piece_bytes=st.integers(1, 3_000),
    max_pieces=st.integers(1, 5),
    num_workers=st.integers(1, 3),
    num_requests=st.integers(0, 80),
)
def test_whatever_the_pieces_all_comes_over(
    tmp_path_factory, piece_bytes, max_pieces, num_workers, num_requests
):
    folder, ray = tmp_path_factory.mktemp("pieces"), InnerRay()
    (folder / "requests.jsonl").write_bytes(lines_of(*workload(num_requests)))
    options = RunOptions(
        input=[str(folder / "requests.jsonl")],
        output=str(folder / "out.jsonl"),
        batch=4,
        quiet=True,
        workers=num_workers,
    )
    with pytest.MonkeyPatch.context() as patch, StopSignals() as stop:
        patch.setitem(sys.modules, "ray", ray)
        patch.setattr("cli.run.ray_workers.PIECE_BYTES", piece_bytes)
        patch.setattr("cli.run.ray_workers.MAX_PIECES", max_pieces)
        workers = Actors(options, num_workers, "", stop.waiting)
        assert run(options, stop, lambda **_: ["batchdecode"], workers) == 0
    assert all(size <= piece_bytes for sizes in ray.sizes for size in sizes)
    assert all(len(sizes) <= max_pieces + 1 for sizes in ray.sizes)
    found = results_of(folder / "out.jsonl")
    options = RunOptions(
        input=options.input, output=options.output, batch=4, quiet=True, force=True
    )
    with StopSignals() as stop:
        assert run(options, stop, lambda **_: ["batchdecode"]) == 0
    assert found == results_of(folder / "out.jsonl")


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
    cpus, gpus = machine.get("CPU", 0) * 10_000, machine.get("GPU", 0) * 10_000
    num_cpus, num_gpus, number = round(num_cpus * 10_000), round(num_gpus * 10_000), 0
    while cpus >= num_cpus and gpus >= num_gpus:
        cpus, gpus, number = cpus - num_cpus, gpus - num_gpus, number + 1
    return number


class LateRay(InnerRay):
    """A Ray that is too slow to start, of which it tells by a bare Exception."""

    def init(self, *_, **__):
        raise Exception("The current node timed out during startup.")  # noqa: TRY002 - as it does


def actors_of(ray, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", ray)
    return Actors(RunOptions(), 1, "", nullcontext)


def test_a_cluster_that_does_not_start_is_an_error_of_the_run(monkeypatch):
    message = "cannot connect to a Ray cluster: The current node timed out during startup."
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
    with actors_of(InnerRay(tmp_path / folder), monkeypatch) as actors:
        died = actors._death(SimpleNamespace(machine_id="here"), ValueError("the actor died"))
        assert died.how == f"was lost: the actor died{told.format(tmp_path / folder)}"
