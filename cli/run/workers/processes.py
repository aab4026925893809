"""Workers as processes of this machine, each at the other end of a socket.

Rule: this end never waits for one of them to read or write; theirs does, so that one whose reports
nobody takes goes no further.  They end when this process does, however it ends.
"""

import os
import resource
import select
import selectors
import shutil
import socket
import sys
import traceback
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from multiprocessing import get_context
from multiprocessing.process import BaseProcess
from multiprocessing.util import get_temp_dir
from pathlib import Path
from typing import Self

from batcher.errors import BatchdecodeError, LostModelError, describe
from batcher.events import RestartEvent
from batcher.garbage import look_seldom
from batcher.processes import become_helper, helpers_started, threads_shared

from ..run_options import RunOptions
from .frames import CHUNK_BYTES, Inbox, frame_of
from .messages import Failed, Instruction, Report, StoppedByModel, decode_instruction, decode_report
from .telling import Wanted
from .transport import Died, Event
from .worker import Worker

_OWN_FILES, _FILES_OF_WORKER = 16, 4  # at once: of the run itself, and for each worker
_GRACE = 5.0  # seconds, in which the end of a process is known

Waiting = Callable[[], AbstractContextManager[None]]


class Processes:
    """A Transport to processes; a context manager that ends them.

    waiting: entered while nothing comes.
    """

    def __init__(self, options: RunOptions, num_workers: int, waiting: Waiting) -> None:
        self._options, self._num_workers, self._waiting = options, num_workers, waiting
        self._wanted = Wanted.by(options)
        _check_open_files(num_workers)
        # A server to fork from has imported what a worker needs, and has no threads.
        self._context = get_context("forkserver")
        self._context.set_forkserver_preload([f"{__package__}.worker"])
        self._folder = get_temp_dir()  # of the server's socket; removed at the end, if not killed
        self._selector = selectors.DefaultSelector()
        self._peers: dict[int, _Peer] = {}
        self._woken, self._waker = os.pipe()
        os.set_blocking(self._woken, False)
        os.set_blocking(self._waker, False)
        self._selector.register(self._woken, selectors.EVENT_READ)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def start(self, number: int, restart: RestartEvent | None = None) -> None:
        """Start the worker `number`; see Transport."""
        ours, theirs = socket.socketpair()
        process = self._context.Process(
            target=serve, args=(theirs, self._options, number, self._wanted, restart, self._folder)
        )
        try:
            with helpers_started(), threads_shared(self._num_workers):
                process.start()
        except (EOFError, ConnectionError) as error:
            raise BatchdecodeError(
                f"cannot start worker {number}: the process that forks workers has died, perhaps "
                "for want of memory"
            ) from error
        finally:
            theirs.close()
        os.set_blocking(ours.fileno(), False)
        self._peers[number] = _Peer(process, ours)
        self._selector.register(ours, selectors.EVENT_READ, number)

    def send(self, number: int, instruction: Instruction) -> None:
        """Tell a worker something; see Transport."""
        peer = self._peers[number]
        peer.send(frame_of(instruction))
        self._watch(number, peer)

    def receive(self) -> list[Event]:
        """Wait until something has come; see Transport."""
        events: list[Event] = []
        with self._waiting():
            ready = self._selector.select()
        for key, mask in ready:
            if key.data is None:
                os.read(self._woken, CHUNK_BYTES)
                continue
            number, peer = key.data, self._peers[key.data]
            if mask & selectors.EVENT_WRITE:
                peer.flush()
                self._watch(number, peer)
            if mask & selectors.EVENT_READ:
                events += [(number, report) for report in peer.reports()]
                if peer.has_ended:
                    self._selector.unregister(peer.socket)
                    del self._peers[number]
                    events.append((number, peer.end()))
        return events

    def wake(self) -> None:
        """Let `receive` come back; see Transport."""
        with suppress(BlockingIOError):
            os.write(self._waker, b"\0")

    def close(self) -> None:
        """End all workers."""
        for peer in self._peers.values():
            peer.process.kill()
        for peer in self._peers.values():
            peer.end()
        self._peers.clear()
        self._selector.close()

    def _watch(self, number: int, peer: "_Peer") -> None:
        """Wait for what there is to wait for."""
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if peer.unsent else 0)
        self._selector.modify(peer.socket, events, number)


def _check_open_files(num_workers: int) -> None:
    """Make sure that `ulimit -n` allows the files of that many workers, here and where they fork.

    Raises:
        BatchdecodeError: it does not.
    """
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    wanted = (
        len(list(Path("/proc/self/fd").iterdir())) + _OWN_FILES + _FILES_OF_WORKER * num_workers
    )
    if most != resource.RLIM_INFINITY and most < wanted:
        raise BatchdecodeError(
            f"--workers {num_workers} opens up to {wanted} files, and `ulimit -n` allows {most}"
        )


class _Peer:
    """A process, and this end of the socket to it.

    unsent: what it has not read yet.  has_ended: nothing more will come.
    """

    def __init__(self, process: BaseProcess, own_end: socket.socket) -> None:
        self.process, self.socket = process, own_end
        self.unsent: deque[memoryview] = deque()
        self.has_ended = False
        self._inbox = Inbox(decode_report)

    def send(self, frame: bytes) -> None:
        """Send a frame, as much of it as can be now."""
        self.unsent.append(memoryview(frame))
        self.flush()

    def flush(self) -> None:
        """Send as much as can be now; to a process that has ended, nothing."""
        try:
            while self.unsent:
                rest = self.unsent[0]
                num_sent = self.socket.send(rest)
                if num_sent == len(rest):
                    self.unsent.popleft()
                else:
                    self.unsent[0] = rest[num_sent:]
        except BlockingIOError:
            pass
        except OSError:
            self.unsent.clear()

    def reports(self) -> list[Report]:
        """Return the reports that are whole by now."""
        try:
            self.has_ended = not self._inbox.read(self.socket)
        except BlockingIOError:
            pass
        except OSError:
            self.has_ended = True
        return self._inbox.take()

    def end(self) -> Died:
        """Let go of a process that has ended, or is about to; return how it did."""
        self.socket.close()
        self.process.join(_GRACE)
        code = self.process.exitcode
        if code is None:
            self.process.kill()
            return Died("did not answer any more")
        if code < 0:
            how = f"was killed by signal {-code}, perhaps for want of memory"
            return Died(how, "killed", -code)
        return Died(f"left with exit status {code}", "exited", code)


class _Link:
    """A worker's end of the socket."""

    def __init__(self, own_end: socket.socket) -> None:
        self._socket = own_end
        self._inbox = Inbox(decode_instruction)

    def send(self, report: Report) -> None:
        """Send a report; wait until it is taken."""
        self._socket.sendall(frame_of(report))

    def receive(self, *, is_waiting: bool) -> list[Instruction]:
        """Return what has come; wait for something if that is wanted.

        Raises:
            EOFError: nothing more will come.
        """
        found: list[Instruction] = []
        while not found and (is_waiting or select.select([self._socket], [], [], 0)[0]):
            if not self._inbox.read(self._socket):
                raise EOFError
            found = self._inbox.take()
        return found


def serve(
    own_end: socket.socket,
    options: RunOptions,
    number: int,
    wanted: Wanted,
    restart: RestartEvent | None,
    folder: str,
) -> None:
    """Be the worker `number`; what a process does.

    folder: where the socket of the server is that has forked it.
    """
    become_helper(folder)
    link = _Link(own_end)
    with own_end, suppress(ConnectionError):
        try:
            worker = Worker(options, number, wanted, restart)
            look_seldom()
            link.send(worker.ready())
            while True:
                for report in worker.exchange(link.receive(is_waiting=worker.is_idle)):
                    link.send(report)
        except (EOFError, ConnectionError):  # the parent was killed
            shutil.rmtree(folder, ignore_errors=True)
        except KeyboardInterrupt:  # while the model was loaded
            link.send(StoppedByModel())
        except LostModelError as error:  # another worker's may be well
            sys.exit(str(error))
        except BatchdecodeError as error:
            link.send(Failed(str(error)))
        except Exception as error:  # noqa: BLE001 - it is told where the others are
            link.send(Failed(describe(error), traceback.format_exc()))
