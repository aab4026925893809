"""`batchdecode serve`: an engine in a thread, and granian in front of it.

After the first signal the server answers the requests that it has; a second one stops it at once.
"""

import asyncio
import logging
import os
import re
import resource
import shutil
import signal
import socket
import sys
import tempfile
from collections.abc import Callable
from contextlib import suppress
from ipaddress import ip_address
from multiprocessing import get_context, parent_process
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import uvloop
from granian._granian import SocketHolder
from granian.constants import HTTPModes, Interfaces
from granian.http import HTTP1Settings
from granian.log import LogLevels, logger
from granian.server.embed import Server as Granian
from starlette.applications import Starlette

from batcher.engine import StepOutcome
from batcher.errors import BatchdecodeError
from batcher.foreign import LISTENERS, Raised
from batcher.models.base import bytes_of
from batcher.request import NOTHING_UNREAD
from batcher.requests.lines import RequestParser
from batcher.scheduling.clock import PacedClock, WallClock
from batcher.serving.app import ServerMetrics, Service, make_app
from batcher.serving.engine_thread import EngineThread, ServerClock
from batcher.serving.http import MAX_HEAD_BYTES, Access, BodyReader, Limits
from batcher.trace.files import is_trace

from .errors import reason_of
from .models import capabilities_of, load
from .run.engine_setup import make_engine
from .run.files import OutFile, check_replaceable, check_writable
from .run.loop import gauges_of
from .run.problems import say
from .run.recording import TraceWriter
from .screen.progress import open_view
from .screen.terminal import can_animate, counted, printable_lines
from .screen.view import MAX_LISTED, GaugeReading, Gauges, RunPlan
from .signals import step_aside_first, stopping_signals

if TYPE_CHECKING:
    from .commands.serve import ServeOptions


BACKLOG = 2048  # connections waiting to be accepted
MAX_CONNECTIONS, FILES_OF_OTHERS = 2**16, 64
HEAD_SECONDS = 10  # for the head of a request, and for the next request to begin
SWITCH_SECONDS = 0.0005  # between threads; in Python's 5 ms some GPUs finish a step
JOIN_SECONDS = 1.0  # for the last step after a second signal
END_SECONDS = 1.0  # for the last answers after a second signal
MAX_STEPS_KEPT = 2**20
MAX_FAILURES = 10  # kinds of model errors that are reported


def serve_requests(options: "ServeOptions") -> int:
    """Serve until a signal comes; return the exit status.

    The kernel spreads connections over --workers processes, which are independent of each other.
    This process forwards signals to them, and stops all when one ends without a signal.
    """
    if options.workers == 1:
        with bound(options) as listener:
            return Server(options, listener).run()
    for name, is_given in (("trace", options.trace is not None), ("live", options.live != "auto")):
        if is_given:
            raise BatchdecodeError(f"--{name} needs --workers 1: it shows one engine")
    stopping = stopping_signals()
    signal.pthread_sigmask(signal.SIG_BLOCK, stopping)  # until they are forwarded
    with tempfile.TemporaryDirectory() as folder, bound(options, is_shared=True) as first:
        context = get_context("fork")  # cheap, and there is no thread yet
        ready, tell_ready = context.Pipe(duplex=False)
        workers = [
            context.Process(target=_work, args=(options, first, number, Path(folder), tell_ready))
            for number in range(options.workers)
        ]
        received: list[int] = []

        def pass_on(number: int, _frame: Any) -> None:
            received.append(number)
            for worker in workers:
                if worker.is_alive() and worker.pid is not None:
                    os.kill(worker.pid, number)

        for worker in workers:
            worker.start()
        for number in stopping:
            signal.signal(number, pass_on)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, stopping)
        sentinels, num_ready = [worker.sentinel for worker in workers], 0
        while num_ready < len(workers) and ready in wait([ready, *sentinels]):
            ready.recv()
            num_ready += 1
        if num_ready == len(workers) and not options.quiet:
            whole = f"{counted(options.workers, 'worker')} of {counted(options.batch, 'slot')}"
            say(printable_lines(f"serving {options.model} with {whole} at {url_of(first)}\n"))
        while alive := [worker for worker in workers if worker.is_alive()]:
            if not received and len(alive) < len(workers):
                for worker in alive:
                    worker.terminate()
                received.append(signal.SIGTERM)
            wait([worker.sentinel for worker in alive])
        codes = [worker.exitcode or 0 for worker in workers]
        return max(128 - code if code < 0 else code for code in codes)  # as in a shell


def bound(
    options: "ServeOptions", *, is_shared: bool = False, port: int | None = None
) -> socket.socket:
    """Return a socket at the address of the options; is_shared: other processes use it as well."""
    port = options.port if port is None else port
    try:
        found = socket.getaddrinfo(options.host, port, type=socket.SOCK_STREAM)
        family, kind, protocol, _, address = found[0]
        listener = socket.socket(family, kind, protocol)
        for option in (socket.SO_REUSEADDR, *([socket.SO_REUSEPORT] if is_shared else [])):
            listener.setsockopt(socket.SOL_SOCKET, option, 1)
        listener.bind(address)
    except OSError as error:
        where = f"{options.host}, port {port}"
        raise BatchdecodeError(f"cannot listen on {where}: {reason_of(error)}") from error
    return listener


def _work(
    options: "ServeOptions", first: socket.socket, number: int, folder: Path, tell_ready: Connection
) -> None:
    """Run the worker `number`; first: a socket with the address."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, stopping_signals())
    os.setpgid(0, 0)  # Ctrl-C is for the parent, which forwards it
    port = first.getsockname()[1]
    first.close()
    try:
        with bound(options, is_shared=True, port=port) as listener:
            server = Server(options, listener, number, folder, lambda: tell_ready.send(number))
            status = server.run()
    except BatchdecodeError as error:
        say(printable_lines(f"error: {error}\n"))
        status = 2
    if (parent := parent_process()) is not None and not parent.is_alive():
        shutil.rmtree(folder, ignore_errors=True)  # the parent was killed
    sys.exit(status)


class Server(Gauges):
    """A server that is ready to begin; it counts, writes and draws in the thread of its engine.

    worker: its number, from 0.  folder: shared with other workers, if there are any.
    on_ready: called when it listens, instead of a message.
    """

    def __init__(
        self,
        options: "ServeOptions",
        listener: socket.socket,
        worker: int = 0,
        folder: Path | None = None,
        on_ready: Callable[[], object] | None = None,
    ) -> None:
        if options.trace is not None:
            check_writable(options.trace)
            if not options.force:
                check_replaceable("--trace", options.trace, is_trace)
        self._trace_file = OutFile(options.trace)
        self._trace_file.lock()
        self._options, self._listener, self._on_ready = options, listener, on_ready
        model = load(options, is_shown=not options.quiet)
        scheduling = options.scheduling.fitted(model)
        step_time = scheduling.step_time()
        clock: ServerClock = WallClock(max_kept=MAX_STEPS_KEPT)
        if step_time is not None:  # each step takes as long as the profile says
            clock = PacedClock(step_time, MAX_STEPS_KEPT)
        self._engine = engine = make_engine(options, scheduling, model, clock, is_streamed=True)
        name = options.served_model_name or options.model
        self._trace = None if options.trace is None else TraceWriter(self._trace_file.open())
        live = options.live
        if live == "auto" and not can_animate(2):
            live = "never"
        policy = engine.settings.policy
        self._view = open_view(
            RunPlan(name, policy, options.batch, None, is_timed=True, is_endless=True),
            self,
            live=live,
            is_quiet=options.quiet,
            color=options.color,
            has_others=options.model != "simulated",
            has_stdin=True,
        )
        self._metrics = ServerMetrics(engine, name, self._view.fold, worker, folder)
        if self._trace is not None:
            self._trace.write([engine.run_event()])
        self._num_steps = 0
        self._failures: set[str] = set()
        prefix = f"{worker}-" if options.workers > 1 else ""  # of request ids
        engine.capabilities = capabilities = capabilities_of(engine, options)
        token_bytes = model.tokenizer.token_bytes
        self._service = Service(
            engine=EngineThread(engine, clock, self, options.max_queue, prefix),
            reader=BodyReader(
                RequestParser(capabilities), name, asks_tokenizer=capabilities.encode is not None
            ),
            model=name,
            bytes_of=lambda token: bytes_of(token, token_bytes),
            limits=Limits(max_body_bytes=options.max_body),
            access=_access_of(options, listener.getsockname()[0]),
        )
        self._web = WebServer(make_app(self._service, self._metrics.text), listener)
        self._received: list[signal.Signals] = []

    def run(self) -> int:
        """Serve until a signal comes or the engine fails; return the exit status."""
        signal.signal(signal.SIGPIPE, signal.SIG_IGN)  # a client that hangs up fails a write
        sys.setswitchinterval(SWITCH_SECONDS)
        LISTENERS.append(self._hear)
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(self._serve())
        LISTENERS.remove(self._hear)
        thread = self._service.engine
        thread.stop()
        thread.join(JOIN_SECONDS)
        if self._trace is not None:
            self._trace.write([*self._engine.take_outcome().events, self._engine.end_event()])
            self._trace.close()
        self._view.close()
        self._trace_file.settle()
        if thread.has_failed:
            say(printable_lines(f"error: {thread.failure}\n"))
            return 1
        is_at_once = len(self._received) > 1
        return 128 + self._received[1] if is_at_once else 0

    # -- in the event loop -----------------------------------------------------------------------

    async def _serve(self) -> None:
        loop, thread = asyncio.get_running_loop(), self._service.engine
        for number in stopping_signals():
            loop.add_signal_handler(number, self._take, number)
        step_aside_first(self._view.step_aside)
        thread.on_end = self._web.stop
        thread.start()
        if (parent := parent_process()) is not None:
            loop.add_reader(parent.sentinel, self._web.stop)  # the parent was killed
        self._listener.listen(BACKLOG)
        if self._on_ready is not None:
            self._on_ready()
        elif not self._options.quiet:
            slots = counted(self._options.batch, "slot")
            message = f"serving {self._service.model} with {slots} at {url_of(self._listener)}\n"
            self._view.write_message(printable_lines(message))
        await self._web.serve_until_stopped()

    def _take(self, number: signal.Signals) -> None:
        thread = self._service.engine
        self._received.append(number)
        if len(self._received) > 1:
            thread.stop()
            self._web.break_off(END_SECONDS)
        thread.is_draining = True
        self._web.stop()  # type: ignore[no-untyped-call]  # as granian has it

    # -- in the thread of the engine -------------------------------------------------------------

    def after_step(self, outcome: StepOutcome) -> None:
        events, view = outcome.events, self._view
        if events:
            with view.lock:  # the view reads the fold of the metrics
                self._metrics.after_step(outcome)
            if self._trace is not None:
                self._trace.write(events)
        num_steps = self._engine.num_steps
        if num_steps > self._num_steps:
            self._num_steps = num_steps
            if view.is_watched:
                view.after_step(num_steps - 1)
        elif view.is_watched:
            view.keep_up()

    def while_idle(self) -> float | None:
        self._metrics.share()
        if self._trace is not None:
            self._trace.flush()
        return self._view.refresh() or None

    def read_gauges(self) -> GaugeReading:
        return gauges_of(self._engine, self._engine.next_waiting(MAX_LISTED), NOTHING_UNREAD)

    def _hear(self, raised: Raised) -> None:
        """Report each kind of model error once, without its text: that may contain a prompt."""
        kind = f"the model raised {raised.said.partition(':')[0]} at {raised.place}"
        if kind not in self._failures and len(self._failures) < MAX_FAILURES:
            self._failures.add(kind)
            self._view.write_message(printable_lines(f"{kind}\n"))


def url_of(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    where = f"[{host}]" if ":" in host else host
    return f"http://{where}:{port}/v1"


class WebServer(Granian):
    """granian at a given socket; it limits heads, trailers, chunks and the time of heads."""

    def __init__(self, app: Starlette, listener: socket.socket) -> None:
        super().__init__(
            app,
            interface=Interfaces.ASGINL,
            http=HTTPModes.http1,
            websockets=False,
            backlog=BACKLOG,
            backpressure=_most_connections(),
            http1_settings=HTTP1Settings(
                header_read_timeout=round(HEAD_SECONDS * 1000), max_buffer_size=MAX_HEAD_BYTES
            ),
            log_level=LogLevels.error,
        )
        self._listener = listener
        self._serving: asyncio.Task[None] | None = None

    async def serve_until_stopped(self) -> None:
        """Serve until `stop` is called and all answers are read, or cut off by `break_off`."""
        self._serving = asyncio.create_task(self.serve())
        with suppress(asyncio.CancelledError):
            await self._serving

    def break_off(self, seconds: float) -> None:
        """Cut off answers that are not read in time, and report no error of them."""
        logger.handlers = [logging.NullHandler()]
        if self._serving is not None:
            loop = self._serving.get_loop()
            loop.set_exception_handler(lambda *_: None)
            loop.call_later(seconds, self._serving.cancel)

    def _init_shared_socket(self) -> None:
        holder = SocketHolder(self._listener.detach(), False, BACKLOG)  # type: ignore[call-arg]  # noqa: FBT003 - no UDS
        self._shd = holder  # type: ignore[assignment]  # as granian has it


def _most_connections() -> int:
    num_files, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if num_files == resource.RLIM_INFINITY:
        return MAX_CONNECTIONS
    wanted = MAX_CONNECTIONS + FILES_OF_OTHERS
    num_files = max(num_files, wanted if most == resource.RLIM_INFINITY else min(wanted, most))
    with suppress(ValueError, OSError):  # macOS has another limit as well
        resource.setrlimit(resource.RLIMIT_NOFILE, (num_files, most))
    return max(1, min(num_files - FILES_OF_OTHERS, MAX_CONNECTIONS))


def _access_of(options: "ServeOptions", address: str) -> Access:
    origins = tuple(origin.lower().rstrip("/") for origin in options.allow_origin or ())
    hosts = None
    if ip_address(address).is_loopback:
        allowed = (urlsplit(origin).netloc.rpartition("@")[2] for origin in origins)
        names = {re.sub(r":\d*$", "", host) for host in allowed}
        bound = f"[{options.host}]" if ":" in options.host else options.host.lower()
        hosts = frozenset({"localhost", "127.0.0.1", "[::1]", bound} | names)
    return Access(options.api_key, origins, hosts)
