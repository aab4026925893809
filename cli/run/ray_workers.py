"""Workers as actors of Ray, on whatever machines of a cluster have room for them.

Rule: of each actor at most CALLS calls are on their way, so that it goes on with the next while the
reports of the last one travel; a call without instructions lets it go on with what it has.  The run
goes on without those that have no room yet.

Messages travel as one stream, in pieces that go with the calls themselves: what is larger, Ray puts
into its object store, which others may have filled, and the disk that it moves objects to.

A thread looks after the cluster: Ray calls for ever from a machine that has dropped out, and ends
this process when its head has been away for a minute.
"""

import os
import re
import shutil
import socket
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import chdir, contextmanager, suppress
from pathlib import Path
from threading import Event as Flag
from threading import Thread
from typing import Any, NamedTuple, Self

from batcher.errors import BatchdecodeError
from batcher.events import RestartEvent

from ..screen.terminal import counted
from . import worker
from .input import Waiting
from .problems import say
from .run_options import RunOptions

CALLS = 2
PIECE_BYTES = 90 * 2**10  # Ray stores what is larger than 100 KiB,
MAX_PIECES = 64  # and what makes more than 10 MB of a call
POLL_SECONDS = 0.1  # after which more of a pipe is noticed
LOOK_SECONDS = 1.0  # from one look at the cluster to the next
NOTE_SECONDS = 20.0  # after which a person learns that there is no room
ROOM_SECONDS = 300.0  # that a cluster which grows may need for a machine
HEAD_SECONDS = 30.0  # Ray itself would end this process after 60
KNOCK_SECONDS = 5.0
LEAST_BYTES = 2**20  # of a disk that is not full
_GRAINS = 10_000  # of which Ray makes up a processor or a GPU
_FIELD = re.compile(r"\w+: ?")
_LOST_MACHINE = "its node has died"


class Share(NamedTuple):
    """What a worker takes of its machine."""

    num_cpus: float
    num_gpus: float

    def __str__(self) -> str:
        return f"{self.num_cpus:g} CPU" + (f" and {self.num_gpus:g} GPU" if self.num_gpus else "")

    def num_on(self, machine: Mapping[str, float]) -> int:
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


class _Peer:
    """An actor, and the calls of it that are on their way, first to last.

    machine_id: where it is; "" as long as it has no room.
    unsent: instructions on their way.  inbox: its reports.
    is_idle: when the last call was over that has come back.
    """

    def __init__(self, actor: Any) -> None:
        self.actor = actor
        self.machine_id = ""
        self.unsent, self.inbox = bytearray(), worker.Inbox(worker.decode_report)
        self.calls: deque[Any] = deque([actor.machine_id.remote()])
        self.is_idle = False

    def go_on(self) -> None:
        while self.machine_id and len(self.calls) < CALLS and (self.unsent or not self.is_idle):
            most = min(len(self.unsent), MAX_PIECES * PIECE_BYTES)
            pieces = [_cut_piece(self.unsent) for _ in range(0, most, PIECE_BYTES)]
            self.calls.append(self.actor.exchange.remote(*pieces))


class Actors:
    """A Transport to actors; a context manager that connects to a cluster, and ends all.

    address: "" is the one that RAY_ADDRESS names, or else one that runs on this machine, or
        a new one of this machine alone.
    waiting: entered while nothing comes.

    Raises:
        BatchdecodeError: Ray is not installed or, when it is entered, there is no such cluster.
    """

    def __init__(
        self, options: RunOptions, num_workers: int, address: str, waiting: Waiting
    ) -> None:
        try:
            import ray  # noqa: PLC0415 - an extra
        except ImportError:
            message = "--on ray needs Ray: pip install 'batchdecode[ray]'"
            raise BatchdecodeError(message) from None
        self._ray: Any = ray
        self._options, self._num_workers, self._waiting = options, num_workers, waiting
        self._address = address
        self._share = Share(1.0, 0.0)
        self._peers: dict[int, _Peer] = {}
        self._has_woken, self._is_over = Flag(), Flag()
        self._alive: set[str] = set()
        self._own, self._folder, self._head = "", "", ("", 0)
        self._answered_at = self._checked_at = self._had_room_at = 0.0
        self._has_noted = False

    def __enter__(self) -> Self:
        ray, address = self._ray, self._address
        try:
            # Ray lets its workers import from the folder that it is started in.
            with self._waiting(), chdir("/"):
                host, _, port = address.removeprefix("ray://").rpartition(":")
                if host and port.isdigit():  # or Ray would try for two minutes
                    socket.create_connection((host, int(port)), KNOCK_SECONDS).close()
                found = ray.init(address or None, log_to_driver=False, logging_level="ERROR")
        except Exception as error:  # Ray raises all kinds, bare ones included
            where = f" at {address}" if address else ""
            hint = "; RAY_AUTH_MODE=token where the cluster asks for a token" if address else ""
            message = f"cannot connect to a cluster of Ray{where}: {str(error).strip()}{hint}"
            raise BatchdecodeError(message) from error
        # Ray's messages about machines that it loses are pages long, and for its developers.
        ray._private.worker._worker_logs_enabled = False  # noqa: SLF001 - no public way
        context = ray.get_runtime_context()
        self._own = context.get_node_id()
        self._folder = getattr(found, "address_info", {}).get("session_dir", "")
        host, _, port = context.gcs_address.rpartition(":")
        self._head = host.strip("[]"), int(port)
        self._answered_at = self._checked_at = self._had_room_at = time.monotonic()
        self._alive = {self._own}
        Thread(target=self._look_after_cluster, daemon=True).start()
        self._share = share_of(self._machines(), self._num_workers)
        return self

    def __exit__(self, *_: object) -> None:
        for peer in self._peers.values():
            self._kill(peer)
        self._peers.clear()
        self._is_over.set()
        self._ray.shutdown()

    def start(self, number: int, restart: RestartEvent | None = None) -> None:
        remote = self._ray.remote(scheduling_strategy="SPREAD", **self._share._asdict())
        what = self._options, number, restart, Path.cwd()
        with self._room("where the command runs"):
            self._peers[number] = _Peer(remote(ActorWorker).remote(*what))

    def send(self, number: int, instruction: worker.Instruction) -> None:
        self._peers[number].unsent += worker.frame_of(instruction)

    def receive(self) -> list[worker.Told]:
        """Wait until something has come; see Transport.

        Raises:
            BatchdecodeError: the cluster is lost, or has no room for workers or their reports.
        """
        told: list[worker.Told] = []
        while not (told or self._has_woken.is_set()):
            self._check_cluster()
            self._check_room()
            with self._room("where the command runs"):
                for peer in self._peers.values():
                    peer.go_on()
            first = {peer.calls[0]: n for n, peer in self._peers.items() if peer.calls}
            with self._waiting():
                if first:
                    self._ray.wait(list(first), timeout=POLL_SECONDS)
                else:
                    self._has_woken.wait(POLL_SECONDS)
            if first:
                done, _ = self._ray.wait(list(first), num_returns=len(first), timeout=0)
                for call in done:
                    told += self._reports(first[call])
        self._has_woken.clear()
        return told

    def wake(self) -> None:
        self._has_woken.set()

    def _reports(self, number: int) -> list[worker.Told]:
        """Return what has come of the first call of a worker, which is over."""
        peer = self._peers[number]
        try:
            with self._room(f"where worker {number} runs"):
                answer = self._ray.get(peer.calls.popleft())
        except self._ray.exceptions.RayError as error:
            self._kill(self._peers.pop(number))
            return [(number, self._death(peer, error))]
        if not peer.machine_id:
            peer.machine_id = answer
            return []
        piece, peer.is_idle = answer
        return [(number, report) for report in peer.inbox.take(piece)]

    def _death(self, peer: _Peer, error: Exception) -> worker.Died:
        """Return how a worker has died of which a call has ended so.

        Ray gives the cause in words alone: after its first line, and lines like `ip: 10.0.0.1`.
        """
        exceptions = self._ray.exceptions
        if isinstance(error, exceptions.RayTaskError):
            return worker.Died(f"was lost: {error.cause}")
        if isinstance(error, exceptions.ActorUnavailableError):
            return worker.Died("could not be reached", is_machine=True)
        lines = [line.strip() for line in str(error).splitlines()]
        if getattr(error, "actor_init_failed", False):
            return worker.Died(f"was lost: {lines[-1]}")
        causes = [line for line in lines[1:] if line and not _FIELD.match(line)]
        # One that has died beside a machine that lives has a cause at once.
        if isinstance(error, exceptions.ActorDiedError) and not causes:
            return worker.Died("could not be reached", is_machine=True)
        how = f"was lost: {(causes or lines)[0]}{self._describe_disk()}"
        alive = {each["NodeID"] for each in self._ray.nodes() if each["Alive"]}
        is_gone = bool(peer.machine_id) and peer.machine_id not in alive
        return worker.Died(how, is_machine=is_gone or _LOST_MACHINE in how)

    def _check_cluster(self) -> None:
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

    def _check_room(self) -> None:
        """Report that no worker has room, and end the run if none has had any for too long."""
        now = time.monotonic()
        if any(peer.machine_id for peer in self._peers.values()):
            self._had_room_at, self._has_noted = now, False
        seconds = now - self._had_room_at
        if seconds < NOTE_SECONDS or (self._has_noted and seconds < ROOM_SECONDS):
            return
        machines, free = self._machines(), self._ray.available_resources()
        there = Share(*(sum(m.get(what, 0.0) for m in machines) for what in ("CPU", "GPU")))
        left = Share(free.get("CPU", 0.0), free.get("GPU", 0.0))
        why = (
            f"no worker has started in {seconds:.0f} seconds: each of {self._num_workers} wants "
            f"{self._share}, and the cluster is {counted(len(machines), 'machine')} with {there}, "
            f"of which {left} free"
        )
        if seconds > ROOM_SECONDS:
            raise BatchdecodeError(why)
        self._has_noted = True
        if not self._options.quiet:
            say(f"{why}\n")

    @contextmanager
    def _room(self, where: str) -> Iterator[None]:
        """Hand something to Ray that it may store, or take it."""
        exceptions = self._ray.exceptions
        try:
            yield
        except (exceptions.ObjectStoreFullError, exceptions.OutOfDiskError) as error:
            raise BatchdecodeError(
                f"the object store of Ray is full {where}, and no disk takes what it holds: "
                "`ray memory` shows whose that is"
            ) from error

    def _describe_disk(self) -> str:
        """Return in words that Ray has no room for what it writes on this machine; "" if it has.

        Without its logs no worker starts, and Ray does not say why.
        """
        try:
            is_full = shutil.disk_usage(self._folder).free < LEAST_BYTES
        except OSError:  # that is not there, or in another place
            return ""
        return f"; the disk with {self._folder} is full" if is_full else ""

    def _machines(self) -> list[dict[str, float]]:
        return [each["Resources"] for each in self._ray.nodes() if each["Alive"]]

    def _look_after_cluster(self) -> None:
        while not self._is_over.wait(LOOK_SECONDS):
            with suppress(OSError, self._ray.exceptions.RayError):
                socket.create_connection(self._head, KNOCK_SECONDS).close()
                self._alive = {each["NodeID"] for each in self._ray.nodes() if each["Alive"]}
                self._answered_at = time.monotonic()

    def _kill(self, peer: _Peer) -> None:
        with suppress(self._ray.exceptions.RayError):
            self._ray.kill(peer.actor)


class ActorWorker:
    """An actor; folder: where the command runs, and this does if its machine has such a folder."""

    def __init__(
        self, options: RunOptions, number: int, restart: RestartEvent | None, folder: Path
    ) -> None:
        self._worker = worker.Worker(options, number, restart)
        self._inbox, self._unsent = worker.Inbox(worker.decode_instruction), bytearray()
        self._given: list[worker.Instruction] = []
        if folder.is_dir():
            os.chdir(folder)

    def machine_id(self) -> str:
        import ray  # noqa: PLC0415 - it is there wherever this is called

        return str(ray.get_runtime_context().get_node_id())

    def exchange(self, *pieces: bytes) -> tuple[bytes, bool]:
        """Take in what is said, and go on for a while; return a piece, and whether that is all.

        As long as there is another whole piece to return, it goes no further.

        Raises:
            LostModelError: another worker may go on with what this one cannot.
        """
        self._given += self._inbox.take(b"".join(pieces))
        if len(self._unsent) >= PIECE_BYTES:
            return _cut_piece(self._unsent), False
        given, self._given = self._given, []
        for report in self._worker.exchange(given):
            self._unsent += worker.frame_of(report)
        piece = _cut_piece(self._unsent)
        return piece, self._worker.is_idle and not self._unsent


def _cut_piece(stream: bytearray) -> bytes:
    piece = bytes(stream[:PIECE_BYTES])
    del stream[:PIECE_BYTES]
    return piece
