"""What goes with a call of Ray and comes back from it: small pieces, which nothing stores."""

import json
import sys
from types import SimpleNamespace

import pytest
from examples import examples
from hypothesis import given
from hypothesis import strategies as st
from process import lines_of, workload

from cli.run.ray_workers import Actors
from cli.run.run import run
from cli.run.run_options import RunOptions
from cli.run.workers import run_by_workers
from cli.signals import StopSignals


class InnerRay:
    """A Ray whose actors are objects of this process.

    sizes: of the pieces of each call, and of the one that came back.
    """

    exceptions = SimpleNamespace(
        RayError=RuntimeError, ObjectStoreFullError=MemoryError, OutOfDiskError=MemoryError
    )
    _private = SimpleNamespace(worker=SimpleNamespace())

    def __init__(self):
        self.sizes = []

    def init(self, *_, **__):
        pass

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
        input=str(folder / "requests.jsonl"), output=str(folder / "out.jsonl"), batch=4, quiet=True
    )
    with pytest.MonkeyPatch.context() as patch, StopSignals() as stop:
        patch.setitem(sys.modules, "ray", ray)
        patch.setattr("cli.run.ray_workers.PIECE_BYTES", piece_bytes)
        patch.setattr("cli.run.ray_workers.MAX_PIECES", max_pieces)
        workers = Actors(options, num_workers, "", stop.waiting)
        assert run_by_workers(options, num_workers, stop, "batchdecode", workers) == 0
    assert all(size <= piece_bytes for sizes in ray.sizes for size in sizes)
    assert all(len(sizes) <= max_pieces + 1 for sizes in ray.sizes)
    found = results_of(folder / "out.jsonl")
    options = RunOptions(
        input=options.input, output=options.output, batch=4, quiet=True, force=True
    )
    with StopSignals() as stop:
        assert run(options, stop, "batchdecode") == 0
    assert found == results_of(folder / "out.jsonl")
