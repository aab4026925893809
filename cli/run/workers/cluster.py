"""A cluster of Ray: what it has for workers, and whether it is still there."""

import shutil
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, chdir, suppress
from threading import Event as Flag
from threading import Thread
from typing import Any, NamedTuple, Self

from batcher.errors import BatchdecodeError

from ...screen.cells import counted

LOOK_SECONDS = 1.0
HEAD_SECONDS = 30.0  # Ray itself would end this process after 60
KNOCK_SECONDS = 5.0
LEAST_BYTES = 2**20  # of a disk that is not full
_GRAINS = 10_000  # of which Ray makes up a processor or a GPU

Waiting = Callable[[], AbstractContextManager[None]]


class Share(NamedTuple):
    """What a worker takes of its machine."""

    num_cpus: float
    num_gpus: float

    def __str__(self) -> str:
        return f"{self.num_cpus:g} CPU" + (f" and {self.num_gpus:g} GPU" if self.num_gpus else "")

    def num_on(self, machine: Mapping[str, float]) -> int:
        """Return for how many workers a machine has room."""
        there = machine.get("CPU", 0.0), machine.get("GPU", 0.0)
        return min(
            round(has * _GRAINS) // round(wants * _GRAINS)
            for has, wants in zip(there, self, strict=True)
            if wants
        )


def share_of(machines: Sequence[Mapping[str, float]], num_workers: int) -> Share:
    """Return what each of so many workers takes, so that there is room for all of them at once.

    That is a processor and, if there are any, a GPU; the half, the third and so on of one where
    there are too few.  Machines without a GPU have no workers then.
    machines: what each of them has, as Ray names it.
    """
    parts = [(_GRAINS // number) / _GRAINS for number in range(1, min(num_workers, _GRAINS) + 1)]
    gpus = parts if any(machine.get("GPU") for machine in machines) else [0.0]

    def fits(share: Share) -> bool:
        return sum(map(share.num_on, machines)) >= num_workers

    for num_gpus in gpus:
        if fits(Share(parts[-1], num_gpus)):
            return next(filter(fits, (Share(num_cpus, num_gpus) for num_cpus in parts)))
    return Share(1.0, gpus[0])


class Cluster:
    """A connection to a cluster; a context manager that ends it.

    address: "" is the one that RAY_ADDRESS names, or else one that runs on this machine, or
        a new one of this machine alone.
    waiting: entered while nothing comes.

    A thread looks after it: Ray calls for ever from a machine that has dropped out, and ends this
    process when its head has been away for a minute.

    Raises:
        BatchdecodeError: when it is entered, there is no such cluster.
    """

    def __init__(self, ray: Any, address: str, waiting: Waiting) -> None:
        self._ray, self._address, self._waiting = ray, address, waiting
        self._alive: set[str] = set()
        self._own, self._folder, self._head = "", "", ("", 0)
        self._answered_at = self._checked_at = 0.0
        self._is_over = Flag()
        self._thread = Thread(target=self._look, daemon=True)

    def __enter__(self) -> Self:
        ray, address = self._ray, self._address
        try:
            # Ray lets its workers import from the folder that it is started in.
            with self._waiting(), chdir("/"):
                _knock_at(address)
                found = ray.init(address or None, log_to_driver=False, logging_level="ERROR")
        except Exception as error:  # Ray raises all kinds, bare ones included
            where = f" at {address}" if address else ""
            hint = "; RAY_AUTH_MODE=token where the cluster asks for a token" if address else ""
            message = f"cannot connect to a cluster of Ray{where}: {str(error).strip()}{hint}"
            raise BatchdecodeError(message) from error
        # What Ray tells of machines that it loses is pages long, and for its developers.
        ray._private.worker._worker_logs_enabled = False  # noqa: SLF001 - no public way
        context = ray.get_runtime_context()
        self._own = context.get_node_id()
        self._folder = getattr(found, "address_info", {}).get("session_dir", "")
        host, _, port = context.gcs_address.rpartition(":")
        self._head = host.strip("[]"), int(port)
        self._answered_at = self._checked_at = time.monotonic()
        self._alive = {self._own}
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._ray.shutdown()

    def machines(self) -> list[dict[str, float]]:
        """Return what each machine has, as Ray names it."""
        return [each["Resources"] for each in self._ray.nodes() if each["Alive"]]

    def has(self, machine_id: str) -> bool:
        """Return whether a machine belongs to it."""
        return any(each["NodeID"] == machine_id and each["Alive"] for each in self._ray.nodes())

    def check(self) -> None:
        """Do nothing as long as there is a cluster.

        Raises:
            BatchdecodeError: it is lost.
        """
        now = time.monotonic()
        if now - self._checked_at > HEAD_SECONDS / 2:  # this process was stopped itself
            self._answered_at = now
        self._checked_at = now
        if self._own not in self._alive:
            raise BatchdecodeError(
                "the cluster has lost the machine that this command is connected to"
            )
        if now - self._answered_at > HEAD_SECONDS:
            host, port = self._head
            raise BatchdecodeError(
                f"the head of the cluster, at {host}:{port}, has not answered for "
                f"{HEAD_SECONDS:g} seconds"
            )

    def describe_room(self) -> str:
        """Return in words what there is, and how much of it is free."""
        machines, free = self.machines(), self._ray.available_resources()
        there = Share(*(sum(m.get(what, 0.0) for m in machines) for what in ("CPU", "GPU")))
        left = Share(free.get("CPU", 0.0), free.get("GPU", 0.0))
        return f"{counted(len(machines), 'machine')} with {there}, of which {left} free"

    def describe_disk(self) -> str:
        """Return in words that Ray has no room for what it writes on this machine; "" if it has.

        Without its logs no worker starts, and Ray does not say why.
        """
        try:
            is_full = shutil.disk_usage(self._folder).free < LEAST_BYTES
        except OSError:  # that is not there, or in another place
            return ""
        return f"; the disk with {self._folder} is full" if is_full else ""

    def _look(self) -> None:
        """Note again and again who is there, until it is over."""
        while not self._is_over.wait(LOOK_SECONDS):
            with suppress(OSError, self._ray.exceptions.RayError):
                socket.create_connection(self._head, KNOCK_SECONDS).close()
                self._alive = {each["NodeID"] for each in self._ray.nodes() if each["Alive"]}
                self._answered_at = time.monotonic()


def _knock_at(address: str) -> None:
    """Make sure that somebody is at an address with a port: Ray would try for two minutes.

    Raises:
        OSError: nobody is.
    """
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if host and port.isdigit():
        socket.create_connection((host, int(port)), KNOCK_SECONDS).close()
