"""Workers as actors of Ray, on whatever machines of a cluster have room for them.

Rule: of each actor at most CALLS calls are on their way, so that it goes on with the next while the
reports of the last one travel; a call that tells it nothing lets it go on with what it has.  The
run goes on without those that have no room yet.

Messages travel as one stream, in pieces that go with the calls themselves: what is larger, Ray puts
into its object store, which others may have filled, and the disk that it moves objects to.
"""

import os
import re
import time
import traceback
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Event as Flag
from typing import Any, Self

from batcher.errors import BatchdecodeError, LostModelError, describe
from batcher.events import RestartEvent
from batcher.garbage import look_seldom

from ..problems import say
from ..run_options import RunOptions
from .cluster import Cluster, Share, Waiting, share_of
from .frames import Inbox, frame_of
from .messages import Failed, Instruction, Report, StoppedByModel, decode_instruction, decode_report
from .telling import Wanted
from .transport import Died, Event
from .worker import Worker

CALLS = 2
PIECE_BYTES = 90 * 2**10  # Ray stores what is larger than 100 KiB,
MAX_PIECES = 64  # and what makes more than 10 MB of a call
LOOK_SECONDS = 0.1  # after which more of a pipe is noticed
NOTE_SECONDS = 20.0  # after which a person is told that there is no room
ROOM_SECONDS = 300.0  # that a cluster which grows may need for a machine
_FIELD = re.compile(r"\w+: ?")
_LOST_MACHINE = "its node has died"


class Actors:
    """A Transport to actors; a context manager that ends them.

    address, waiting: see Cluster.

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
        self._cluster = Cluster(ray, address, waiting)
        self._options, self._num_workers, self._waiting = options, num_workers, waiting
        self._wanted = Wanted.by(options)
        self._share = Share(1.0, 0.0)
        self._peers: dict[int, _Peer] = {}
        self._has_woken = Flag()
        self._had_room_at, self._has_noted = 0.0, False

    def __enter__(self) -> Self:
        self._cluster.__enter__()
        self._share = share_of(self._cluster.machines(), self._num_workers)
        self._had_room_at = time.monotonic()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
        self._cluster.__exit__()

    def start(self, number: int, restart: RestartEvent | None = None) -> None:
        """Start the worker `number`; see Transport."""
        remote = self._ray.remote(scheduling_strategy="SPREAD", **self._share._asdict())
        what = self._options, number, self._wanted, restart, Path.cwd()
        with self._room("where the command runs"):
            self._peers[number] = _Peer(remote(ActorWorker).remote(*what))

    def send(self, number: int, instruction: Instruction) -> None:
        """Tell a worker something; see Transport."""
        self._peers[number].unsent += frame_of(instruction)

    def receive(self) -> list[Event]:
        """Wait until something has come; see Transport.

        Raises:
            BatchdecodeError: the cluster is lost, or has no room for workers or what they tell.
        """
        events: list[Event] = []
        while not (events or self._has_woken.is_set()):
            self._cluster.check()
            self._check_room()
            with self._room("where the command runs"):
                for peer in self._peers.values():
                    peer.go_on()
            first = {peer.calls[0]: n for n, peer in self._peers.items() if peer.calls}
            with self._waiting():
                if first:
                    self._ray.wait(list(first), timeout=LOOK_SECONDS)
                else:
                    self._has_woken.wait(LOOK_SECONDS)
            if first:
                done, _ = self._ray.wait(list(first), num_returns=len(first), timeout=0)
                for call in done:
                    events += self._taken(first[call])
        self._has_woken.clear()
        return events

    def wake(self) -> None:
        """Let `receive` come back; see Transport."""
        self._has_woken.set()

    def close(self) -> None:
        """End all workers."""
        for peer in self._peers.values():
            self._kill(peer)
        self._peers.clear()

    def _taken(self, number: int) -> list[Event]:
        """Return what has come of the first call of a worker, which is over.

        Raises:
            BatchdecodeError: Ray has no room for what it tells.
        """
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
        peer.inbox.add(piece)
        return [(number, report) for report in peer.inbox.take()]

    def _death(self, peer: "_Peer", error: Exception) -> Died:
        """Return how a worker has died of which a call has ended so.

        Ray gives the cause in words alone: after its first line, and lines like `ip: 10.0.0.1`.
        """
        exceptions = self._ray.exceptions
        if isinstance(error, exceptions.RayTaskError):
            return Died(f"was lost: {error.cause}")
        if isinstance(error, exceptions.ActorUnavailableError):
            return Died("could not be reached", is_machine=True)
        lines = [line.strip() for line in str(error).splitlines()]
        if getattr(error, "actor_init_failed", False):
            return Died(f"was lost: {lines[-1]}")
        causes = [line for line in lines[1:] if line and not _FIELD.match(line)]
        # One that has died beside a machine that lives has a cause at once.
        if isinstance(error, exceptions.ActorDiedError) and not causes:
            return Died("could not be reached", is_machine=True)
        how = f"was lost: {(causes or lines)[0]}{self._cluster.describe_disk()}"
        is_gone = bool(peer.machine_id) and not self._cluster.has(peer.machine_id)
        return Died(how, is_machine=is_gone or _LOST_MACHINE in how)

    def _check_room(self) -> None:
        """Tell of it if no worker has room.

        Raises:
            BatchdecodeError: none has had any for too long.
        """
        now = time.monotonic()
        if any(peer.machine_id for peer in self._peers.values()):
            self._had_room_at, self._has_noted = now, False
        seconds = now - self._had_room_at
        if seconds < NOTE_SECONDS or (self._has_noted and seconds < ROOM_SECONDS):
            return
        why = (
            f"no worker has started in {seconds:.0f} seconds: each of {self._num_workers} wants "
            f"{self._share}, and the cluster is {self._cluster.describe_room()}"
        )
        if seconds > ROOM_SECONDS:
            raise BatchdecodeError(why)
        self._has_noted = True
        if not self._options.quiet:
            say(f"{why}\n")

    @contextmanager
    def _room(self, where: str) -> Iterator[None]:
        """Hand something to Ray that it may store, or take it.

        Raises:
            BatchdecodeError: it has no room, though it has been set up to store small objects, too.
        """
        exceptions = self._ray.exceptions
        try:
            yield
        except (exceptions.ObjectStoreFullError, exceptions.OutOfDiskError) as error:
            raise BatchdecodeError(
                f"the object store of Ray is full {where}, and no disk takes what it holds: "
                "`ray memory` shows whose that is"
            ) from error

    def _kill(self, peer: "_Peer") -> None:
        with suppress(self._ray.exceptions.RayError):
            self._ray.kill(peer.actor)


class _Peer:
    """An actor, and the calls of it that are on their way, first to last.

    machine_id: where it is; "" as long as it has no room.
    unsent: what it is to be told.  inbox: what it has told.
    is_idle: when the last call was over that has come back.
    """

    def __init__(self, actor: Any) -> None:
        self.actor = actor
        self.machine_id = ""
        self.unsent, self.inbox = bytearray(), Inbox(decode_report)
        self.calls: deque[Any] = deque([actor.machine_id.remote()])
        self.is_idle = False

    def go_on(self) -> None:
        """Call it as often as there is something to do."""
        while self.machine_id and len(self.calls) < CALLS and (self.unsent or not self.is_idle):
            most = min(len(self.unsent), MAX_PIECES * PIECE_BYTES)
            pieces = [_taken(self.unsent) for _ in range(0, most, PIECE_BYTES)]
            self.calls.append(self.actor.exchange.remote(*pieces))


def _taken(stream: bytearray) -> bytes:
    """Return the first piece of a stream, which is there no longer."""
    piece = bytes(stream[:PIECE_BYTES])
    del stream[:PIECE_BYTES]
    return piece


class ActorWorker:
    """What an actor is: a worker, which is made by the first exchange.

    folder: where the command runs, and this does if there is such a one on its machine.
    """

    def __init__(
        self,
        options: RunOptions,
        number: int,
        wanted: Wanted,
        restart: RestartEvent | None,
        folder: Path,
    ) -> None:
        self._options, self._number = options, number
        self._wanted, self._restart = wanted, restart
        self._worker: Worker | None = None
        self._inbox, self._unsent = Inbox(decode_instruction), bytearray()
        if folder.is_dir():
            os.chdir(folder)

    def machine_id(self) -> str:
        """Return on which machine this is, as Ray names it."""
        import ray  # noqa: PLC0415 - it is there wherever this is called

        return str(ray.get_runtime_context().get_node_id())

    def exchange(self, *pieces: bytes) -> tuple[bytes, bool]:
        """Take in what is said, and go on for a while; return a piece, and whether that is all.

        As long as there is another whole piece to tell, it goes no further.

        Raises:
            LostModelError: another worker may go on with what this one cannot.
        """
        for piece in pieces:
            self._inbox.add(piece)
        if len(self._unsent) >= PIECE_BYTES:
            return _taken(self._unsent), False
        for report in self._reports():
            self._unsent += frame_of(report)
        piece = _taken(self._unsent)
        return piece, not self._unsent and (self._worker is None or self._worker.is_idle)

    def _reports(self) -> Iterator[Report]:
        """Do what was said, and go on for a while; yield what comes of it.

        Raises:
            LostModelError: as above.
        """
        try:
            if self._worker is None:
                self._worker = Worker(self._options, self._number, self._wanted, self._restart)
                look_seldom()
                yield self._worker.ready()
            yield from self._worker.exchange(self._inbox.take())
        except LostModelError:
            raise
        except KeyboardInterrupt:  # while the model was loaded
            yield StoppedByModel()
        except BatchdecodeError as error:
            yield Failed(str(error))
        except Exception as error:  # noqa: BLE001 - it is told where the others are
            yield Failed(describe(error), traceback.format_exc())
