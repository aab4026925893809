"""Workers as actors of Ray, on whatever machines of a cluster have room for them.

Rule: of each actor at most CALLS calls are on their way, so that it goes on with the next while the
reports of the last one travel; a call that tells it nothing lets it go on with what it has.
"""

import socket
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from threading import Event as Flag
from typing import Any, Self

from batcher.errors import BatchdecodeError, LostModelError
from batcher.events import RestartEvent

from ...commands.run import RunOptions
from ..garbage import look_seldom
from .messages import Failed, Instruction, Interrupted, decode_instruction, decode_report, encode
from .telling import Wanted
from .transport import Died, Event
from .worker import Worker

CALLS = 2
KNOCK_SECONDS = 5.0
LOOK_SECONDS = 0.1  # after which more of a pipe is noticed

Waiting = Callable[[], AbstractContextManager[None]]


class Actors:
    """A Transport to actors; a context manager that ends them.

    address: of a cluster; "" is the one that RAY_ADDRESS names, or else one of this machine alone.
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
        self._options, self._num_workers = options, num_workers
        self._address, self._waiting = address, waiting
        self._wanted = Wanted.by(options)
        self._peers: dict[int, _Peer] = {}
        self._has_woken = Flag()
        self._resources: dict[str, float] = {}

    def __enter__(self) -> Self:
        ray = self._ray
        try:
            with self._waiting():
                _knock_at(self._address)
                ray.init(self._address or None, log_to_driver=False, logging_level="ERROR")
        except (OSError, ValueError, RuntimeError) as error:
            where = f" at {self._address}" if self._address else ""
            raise BatchdecodeError(f"there is no cluster of Ray{where}: {error}") from error
        there = ray.cluster_resources()
        # All of them must have room at once: one that waits for a processor would wait for ever.
        self._resources["num_cpus"] = min(1.0, there.get("CPU", 1) // self._num_workers or 0.01)
        self._resources["num_gpus"] = float(there.get("GPU", 0) >= self._num_workers)
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
        self._ray.shutdown()

    def start(self, number: int, restart: RestartEvent | None = None) -> None:
        """Start the worker `number`; see Transport."""
        remote = self._ray.remote(scheduling_strategy="SPREAD", **self._resources)(ActorWorker)
        actor = remote.remote(self._options, number, self._wanted, restart)
        self._peers[number] = _Peer(actor)

    def send(self, number: int, instruction: Instruction) -> None:
        """Tell a worker something; see Transport."""
        self._peers[number].unsent.append(encode(instruction))

    def receive(self) -> list[Event]:
        """Wait until something has come; see Transport."""
        events: list[Event] = []
        while not (events or self._has_woken.is_set()):
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
        """Return what has come of the first call of a worker, which is over."""
        peer = self._peers[number]
        try:
            reports, peer.is_idle = self._ray.get(peer.calls.popleft())
        except self._ray.exceptions.RayError as error:
            self._kill(self._peers.pop(number))
            return [(number, Died(f"was lost: {str(error).strip().splitlines()[0]}"))]
        return [(number, decode_report(report)) for report in reports]

    def _kill(self, peer: "_Peer") -> None:
        with suppress(self._ray.exceptions.RayError):
            self._ray.kill(peer.actor)


def _knock_at(address: str) -> None:
    """Make sure that somebody is at an address with a port: Ray would try for two minutes.

    Raises:
        OSError: nobody is.
    """
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if host and port.isdigit():
        socket.create_connection((host, int(port)), KNOCK_SECONDS).close()


class _Peer:
    """An actor, and the calls of it that are on their way, first to last.

    unsent: what it is to be told.  is_idle: when the last call was over that has come back.
    """

    def __init__(self, actor: Any) -> None:
        self.actor = actor
        self.unsent: list[bytes] = []
        self.calls: deque[Any] = deque()
        self.is_idle = False

    def go_on(self) -> None:
        """Call it as often as there is something to do."""
        while len(self.calls) < CALLS and (self.unsent or not self.is_idle):
            self.calls.append(self.actor.exchange.remote(self.unsent))
            self.unsent = []


class ActorWorker:
    """What an actor is: a worker, which is made by the first call."""

    def __init__(
        self, options: RunOptions, number: int, wanted: Wanted, restart: RestartEvent | None
    ) -> None:
        self._options, self._number = options, number
        self._wanted, self._restart = wanted, restart
        self._worker: Worker | None = None

    def exchange(self, instructions: list[bytes]) -> tuple[list[bytes], bool]:
        """Do what is said, and go on for a while; return reports, and whether it is idle.

        Raises:
            LostModelError: another worker may go on with what this one cannot.
        """
        reports: list[bytes] = []
        try:
            if self._worker is None:
                self._worker = Worker(self._options, self._number, self._wanted, self._restart)
                look_seldom()
                reports.append(encode(self._worker.ready()))
            given = [decode_instruction(instruction) for instruction in instructions]
            reports += [encode(report) for report in self._worker.exchange(given)]
        except LostModelError:
            raise
        except KeyboardInterrupt:  # while the model was loaded
            return [encode(Interrupted())], True
        except BatchdecodeError as error:
            return [encode(Failed(str(error)))], True
        return reports, self._worker.is_idle
