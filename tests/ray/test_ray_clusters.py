"""Workers on clusters of several nodes on this machine, which come and go."""

import json
import re
import sys

import pytest
from nodes import Nodes
from running import actors, alone, command_in, fill, kill, results_of, seen_in, wait_for

pytestmark = pytest.mark.timeout(400)
SEEING = ("--model", "seeing:seeing")
NUM_REQUESTS = 250


@pytest.fixture
def folder(tmp_path):
    return fill(tmp_path, NUM_REQUESTS)


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    folder = fill(tmp_path_factory.mktemp("alone"), NUM_REQUESTS)
    return alone(folder, "--model", "killing:sleepy")


def started(folder, nodes, num_workers, *more):
    command = command_in(folder, *SEEING, "--workers", num_workers, *nodes.on, *more)
    num_nodes = 1 + len(nodes.others)
    assert wait_for(lambda: len(seen_in(folder)[0]) == num_nodes or command.poll() is not None)
    assert command.poll() is None
    return command


def num_replaced(told):
    return int(re.search(rb"(\d+) workers? replaced", told)[1])


def test_workers_on_a_node_that_is_lost_are_replaced_by_others_when_there_is_room(folder, expected):
    with Nodes(num_cpus=1) as nodes:
        first = nodes.add(num_cpus=2)
        running = started(folder, nodes, 3)  # on both
        nodes.lose(first)
        wait_for(lambda: len(actors()) == 1)
        later = nodes.add(num_cpus=2)
        assert wait_for(lambda: later.node_id in seen_in(folder)[0])
        out, told = running.communicate()
    assert results_of(out) == expected
    assert num_replaced(told) >= 2
    assert b"raylet" not in told


def test_a_node_that_goes_with_notice_has_no_more_workers(folder, expected):
    with Nodes(num_cpus=1) as nodes:
        first = nodes.add(num_cpus=1)
        running = started(folder, nodes, 2, "-o", "out.jsonl")
        nodes.give_notice(first)
        wait_for(lambda: (folder / "out.jsonl").stat().st_size, 10)
        nodes.lose(first)
        nodes.add(num_cpus=1)
        _, told = running.communicate()
    assert results_of((folder / "out.jsonl").read_bytes()) == expected
    assert num_replaced(told) >= 1


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("raylet", "the cluster has lost the machine that this command is connected to"),
        ("gcs_server", "the head of the cluster"),
    ],
)
def test_a_run_without_its_head_ends_and_goes_on_elsewhere(folder, expected, kind, message):
    more = ("-o", "out.jsonl", "-b", 1)  # so that it takes longer than the head is waited for
    with Nodes(num_cpus=1) as nodes:
        running = started(folder, nodes, 1, *more)
        nodes.lose(nodes.head, kind)
        _, told = running.communicate(timeout=120)
    assert running.returncode == 1
    assert message in told.decode()
    assert "\ncontinue with: " in told.decode()
    some = (folder / "out.jsonl").read_bytes()
    assert 0 < len(some.splitlines()) < NUM_REQUESTS
    with Nodes(num_cpus=1) as nodes:
        nodes.add(num_cpus=1)
        again = command_in(folder, *SEEING, "--workers", 2, *nodes.on, *more, "--resume", "-q")
        assert not again.communicate()[1]
    assert (folder / "out.jsonl").read_bytes().startswith(some)
    assert results_of((folder / "out.jsonl").read_bytes()) == expected


def test_a_killed_driver_leaves_no_actor_on_any_node(folder, expected):
    with Nodes(num_cpus=1) as nodes:
        nodes.add(num_cpus=1)
        running = started(folder, nodes, 2, "-o", "out.jsonl")
        kill(running.pid)
        running.communicate()
        assert wait_for(lambda: not actors())
        again = command_in(
            folder, *SEEING, "--workers", 3, *nodes.on, "-o", "out.jsonl", "--resume", "-q"
        )
        assert not again.communicate()[1]
    assert results_of((folder / "out.jsonl").read_bytes()) == expected


@pytest.fixture
def few(tmp_path):
    return fill(tmp_path)


def test_a_poison_request_fails_alone_whichever_nodes_it_comes_to(few):
    with Nodes(num_cpus=1) as nodes:
        nodes.add(num_cpus=1)
        nodes.add(num_cpus=1)
        model = ("--model", "killing:fatal", "--workers", 3)
        running = command_in(few, *model, *nodes.on)
        out, told = running.communicate()
    (error,) = [row["error"] for row in map(json.loads, out.splitlines()) if "error" in row]
    assert (running.returncode, error["code"]) == (1, "worker-died")
    assert "3 workers died that decoded nothing else" in error["message"]
    assert num_replaced(told) == 5

    def others(results):
        return [line for line in results if json.loads(line)["id"] != "r12"]  # it begins with 13

    assert len(others(results_of(out))) == 39
    assert others(results_of(out)) == others(alone(few, "--model", "killing:sleepy", "-b", 40))


@pytest.mark.parametrize(
    ("gpus", "num_workers", "seen"),
    [
        ((0, 2), 2, ["0", "1"]),
        ((0, 2), 4, ["0", "1"]),
        ((1, 1), 2, ["0", "0"]),
        ((0, 0), 2, ["None"]),
    ],
)
def test_each_worker_has_a_gpu_or_a_part_of_one(few, gpus, num_workers, seen):
    with Nodes(num_cpus=4, num_gpus=gpus[0]) as nodes:
        other = nodes.add(num_cpus=1, num_gpus=gpus[1])
        running = command_in(few, *SEEING, "--workers", num_workers, *nodes.on, "-q")
        assert not running.communicate()[1]
    machines, found = seen_in(few)
    assert sorted(set(found)) == sorted(set(seen))
    if not gpus[0] and gpus[1]:
        assert machines == {other.node_id}


def test_a_run_that_gets_no_room_says_what_there_is_and_ends(few):
    import ray  # noqa: PLC0415 - the environment of the command comes first

    code = (
        "from cli.run import ray_workers as ray; ray.NOTE_SECONDS, ray.ROOM_SECONDS = 1, 5; "
        "from cli.main import main; main()"
    )
    with Nodes(num_cpus=1) as nodes:
        ray.init(nodes.address, log_to_driver=False)
        try:
            other = ray.remote(num_cpus=1)(type("Other", (), {})).remote()
            ray.get(other.__ray_ready__.remote())
            patched = (sys.executable, "-c", code)
            running = command_in(few, "--workers", 2, *nodes.on, command=patched)
            _, told = running.communicate(timeout=100)
        finally:
            ray.shutdown()
    assert running.returncode == 2
    room = (
        "each of 2 needs 0.5 CPU, and the cluster has 1 machine with 1 CPU, of which 0 CPU is free"
    )
    found = re.findall(
        r"^(.*)no worker has started in (\d) seconds: (.*)$", told.decode(), re.MULTILINE
    )
    assert found == [("", "1", room), ("error: ", "5", room)]
