"""Workers as actors of Ray, on the machines of a cluster.

Up to CALLS calls of an actor are under way, so that it continues while its last report travels; a
call without instructions makes it decode on.  Messages travel as a stream of pieces inside the
calls themselves: Ray would put anything larger into its object store, which others may have filled.

A thread watches the cluster: Ray retries for ever to reach a machine that is lost, and ends this
process when the head of the cluster has been away for a minute.
"""

import os
import re
import shutil
import socket
import struct
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import chdir, contextmanager, suppress
from pathlib import Path
from threading import Event as Flag
from threading import Thread
from typing import Any, Generic, NamedTuple, Self, TypeVar

from batcher.errors import BatchdecodeError
from batcher.events import RestartEvent

from ..screen.terminal import counted
from .input import Waiting
from .problems import say
from .run_options import RunOptions
from .worker import (
    Died,
    Instruction,
    Report,
    Told,
    Worker,
    decode_instruction,
    decode_report,
    encode,
)

CALLS = 2
PIECE_BYTES = 90 * 2**10  # Ray stores arguments of more than 100 KiB,
MAX_PIECES = 64  # and calls of more than 10 MB
POLL_SECONDS = 0.1
LOOK_SECONDS = 1.0  # between two looks at the cluster
NOTE_SECONDS = 20.0  # without a worker, before a message
ROOM_SECONDS = 300.0  # without a worker, before the run ends: a cluster may be growing
HEAD_SECONDS = 30.0  # Ray itself would end this process after 60
CONNECT_SECONDS = 5.0
LEAST_BYTES = 2**20  # free on a disk that is not full
_GRAINS = 10_000  # the smallest part of a processor or GPU in Ray
_FIELD = re.compile(r"\w+: ?")
_LOST_MACHINE = "its node has died"
_LENGTH = struct.Struct("<Q")

Message = TypeVar("Message")


class Inbox(Generic[Message]):
    """Cuts a stream of frames into messages, whatever pieces it comes in."""

    def __init__(self, decode: Callable[[bytes], Message]) -> None:
        self._decode, self._buffer = decode, bytearray()

    def take(self, piece: bytes) -> list[Message]:
        """Add a piece; return the messages that it completes."""
        buffer, found = self._buffer, []
        buffer += piece
        while len(buffer) >= _LENGTH.size:
            end = _LENGTH.size + _LENGTH.unpack_from(buffer)[0]
            if end > len(buffer):
                break
            found.append(self._decode(bytes(buffer[_LENGTH.size : end])))
            del buffer[:end]
        return found


def frame_of(message: Instruction | Report) -> bytes:
    encoded = encode(message)
    return _LENGTH.pack(len(encoded)) + encoded


def _cut_piece(stream: bytearray) -> bytes:
    piece = bytes(stream[:PIECE_BYTES])
    del stream[:PIECE_BYTES]
    return piece


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
    """Return what each worker takes, so that all fit at once.

    That is one processor and, if any machine has some, one GPU, or else the largest fraction that
    fits: a half, a third and so on.  Machines without a GPU get no workers then.
    machines: the resources of each, as Ray names them.
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
    """An actor, and its calls under way, in order.

    machine_id: where it runs; "" until it is scheduled.  unsent: instructions.  inbox: for reports.
    is_idle: as of the last call that has returned.
    """

    def __init__(self, actor: Any) -> None:
        self.actor = actor
        self.machine_id = ""
        self.unsent, self.inbox = bytearray(), Inbox(decode_report)
        self.calls: deque[Any] = deque([actor.machine_id.remote()])
        self.is_idle = False

    def call(self) -> None:
        while self.machine_id and len(self.calls) < CALLS and (self.unsent or not self.is_idle):
            most = min(len(self.unsent), MAX_PIECES * PIECE_BYTES)
            pieces = [_cut_piece(self.unsent) for _ in range(0, most, PIECE_BYTES)]
            self.calls.append(self.actor.exchange.remote(*pieces))


class Actors:
    """A Transport to actors; a context manager that connects to a cluster, and ends the actors.

    address: "" for the cluster in RAY_ADDRESS, or else one that runs on this machine, or else a new
    one of this machine alone.
    waiting: entered while no message comes.

    Raises:
        BatchdecodeError: Ray is not installed, or, on entry, there is no such cluster.
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
            # The actors import from the folder where Ray is started.
            with self._waiting(), chdir("/"):
                host, _, port = address.removeprefix("ray://").rpartition(":")
                if host and port.isdigit():  # or Ray would try for two minutes
                    socket.create_connection((host, int(port)), CONNECT_SECONDS).close()
                found = ray.init(address or None, log_to_driver=False, logging_level="ERROR")
        except Exception as error:  # Ray raises all kinds, bare ones included
            where = f" at {address}" if address else ""
            hint = "; set RAY_AUTH_MODE=token if the cluster needs a token" if address else ""
            message = f"cannot connect to a Ray cluster{where}: {str(error).strip()}{hint}"
            raise BatchdecodeError(message) from error
        # Ray's messages about lost machines are pages long, and for its developers.
        ray._private.worker._worker_logs_enabled = False  # noqa: SLF001 - no public way
        context = ray.get_runtime_context()
        self._own = context.get_node_id()
        self._folder = getattr(found, "address_info", {}).get("session_dir", "")
        host, _, port = context.gcs_address.rpartition(":")
        self._head = host.strip("[]"), int(port)
        self._answered_at = self._checked_at = self._had_room_at = time.monotonic()
        self._alive = {self._own}
        Thread(target=self._watch_cluster, daemon=True).start()
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
        arguments = self._options, number, restart, Path.cwd()
        with self._storing("where the command runs"):
            self._peers[number] = _Peer(remote(ActorWorker).remote(*arguments))

    def send(self, number: int, instruction: Instruction) -> None:
        self._peers[number].unsent += frame_of(instruction)

    def receive(self) -> list[Told]:
        """Wait for messages; see Transport.

        Raises:
            BatchdecodeError: the cluster is lost, or has no room for workers or their reports.
        """
        told: list[Told] = []
        while not (told or self._has_woken.is_set()):
            self._check_head()
            self._check_room()
            with self._storing("where the command runs"):
                for peer in self._peers.values():
                    peer.call()
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

    def _reports(self, number: int) -> list[Told]:
        """Return the reports of a worker's finished first call."""
        peer = self._peers[number]
        try:
            with self._storing(f"where worker {number} runs"):
                answer = self._ray.get(peer.calls.popleft())
        except self._ray.exceptions.RayError as error:
            self._kill(self._peers.pop(number))
            return [(number, self._death(peer, error))]
        if not peer.machine_id:
            peer.machine_id = answer
            return []
        piece, peer.is_idle = answer
        return [(number, report) for report in peer.inbox.take(piece)]

    def _death(self, peer: _Peer, error: Exception) -> Died:
        """Return how a worker died, from the error of its call.

        Ray reports the cause in words alone, after its first line and lines like `ip: 10.0.0.1`.
        """
        exceptions = self._ray.exceptions
        if isinstance(error, exceptions.RayTaskError):
            return Died(f"was lost: {error.cause}")
        lines = [line.strip() for line in str(error).splitlines()]
        if getattr(error, "actor_init_failed", False):
            return Died(f"was lost: {lines[-1]}")
        causes = [line for line in lines[1:] if line and not _FIELD.match(line)]
        # A worker that died on a machine that lives has a cause at once.
        is_cut_off = isinstance(error, exceptions.ActorDiedError) and not causes
        if is_cut_off or isinstance(error, exceptions.ActorUnavailableError):
            return Died("could not be reached", is_machine=True)
        how = f"was lost: {(causes or lines)[0]}{self._describe_disk()}"
        alive = {each["NodeID"] for each in self._ray.nodes() if each["Alive"]}
        is_gone = bool(peer.machine_id) and peer.machine_id not in alive
        return Died(how, is_machine=is_gone or _LOST_MACHINE in how)

    def _check_head(self) -> None:
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
        """Print a message if no worker is scheduled for long, and end the run at last."""
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
            f"no worker has started in {seconds:.0f} seconds: each of {self._num_workers} needs "
            f"{self._share}, and the cluster has {counted(len(machines), 'machine')} with {there}, "
            f"of which {left} is free"
        )
        if seconds > ROOM_SECONDS:
            raise BatchdecodeError(why)
        self._has_noted = True
        if not self._options.quiet:
            say(f"{why}\n")

    @contextmanager
    def _storing(self, where: str) -> Iterator[None]:
        """Explain that the object store is full, on clusters that store even small objects."""
        exceptions = self._ray.exceptions
        try:
            yield
        except (exceptions.ObjectStoreFullError, exceptions.OutOfDiskError) as error:
            raise BatchdecodeError(
                f"the object store of Ray is full {where}, and cannot spill to disk: "
                "run `ray memory` to see what fills it"
            ) from error

    def _describe_disk(self) -> str:
        """Return "" or a warning that Ray's disk is full here.

        Without room for its logs no worker starts, and Ray does not say why.
        """
        try:
            is_full = shutil.disk_usage(self._folder).free < LEAST_BYTES
        except OSError:  # it is on another machine
            return ""
        return f"; the disk with {self._folder} is full" if is_full else ""

    def _machines(self) -> list[dict[str, float]]:
        return [each["Resources"] for each in self._ray.nodes() if each["Alive"]]

    def _watch_cluster(self) -> None:
        while not self._is_over.wait(LOOK_SECONDS):
            with suppress(OSError, self._ray.exceptions.RayError):
                socket.create_connection(self._head, CONNECT_SECONDS).close()
                self._alive = {each["NodeID"] for each in self._ray.nodes() if each["Alive"]}
                self._answered_at = time.monotonic()

    def _kill(self, peer: _Peer) -> None:
        with suppress(self._ray.exceptions.RayError):
            self._ray.kill(peer.actor)


class ActorWorker:
    """An actor.  folder: the current one of the command, used here too if it exists."""

    def __init__(
        self, options: RunOptions, number: int, restart: RestartEvent | None, folder: Path
    ) -> None:
        self._worker = Worker(options, number, restart)
        self._inbox, self._unsent = Inbox(decode_instruction), bytearray()
        self._given: list[Instruction] = []
        if folder.is_dir():
            os.chdir(folder)

    def machine_id(self) -> str:
        import ray  # noqa: PLC0415 - installed wherever this is called

        return str(ray.get_runtime_context().get_node_id())

    def exchange(self, *pieces: bytes) -> tuple[bytes, bool]:
        """Add pieces of instructions; return a piece of reports, and whether the worker is idle.

        It decodes only when less than a piece is left to return.

        Raises:
            LostModelError: the model is lost, but another worker may continue.
        """
        self._given += self._inbox.take(b"".join(pieces))
        if len(self._unsent) < PIECE_BYTES:
            given, self._given = self._given, []
            report = self._worker.exchange(given)
            self._unsent += b"" if report is None else frame_of(report)
        piece = _cut_piece(self._unsent)
        return piece, self._worker.is_idle and not (self._unsent or self._given)
