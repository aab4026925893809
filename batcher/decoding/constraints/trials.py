"""Constraints are compiled in a helper process first, which is killed if one takes too much.

llguidance counts most of what it does and gives up by itself, but not all of it, and what runs
inside a process cannot be stopped there.  The time is that of the processor: the load of the
machine decides nothing.

A task is a line in, an answer a line out.  A task is [kind, text, seconds of processor time, bytes
of memory]; the answer has the text and unenforced of what can be enforced, or the path and message
of an error.
"""

import atexit
import json
import resource
import select
import signal
import subprocess
import sys
import threading
from collections import OrderedDict
from contextlib import suppress
from pathlib import Path
from typing import IO, cast

from batcher.decoding.constraints.matchers import with_large_stack
from batcher.decoding.grammars import ConstraintSource
from batcher.decoding.loosening import Enforceable, enforceable_part
from batcher.errors import BatchdecodeError, GrammarError

BASE_MEMORY = 128 * 2**20  # bytes
MEMORY_PER_CHARACTER = 64  # bytes
_MAX_REMEMBERED = 256
_PATIENCE = 20  # how many times the timeout may pass on the wall, on a machine that is busy
_CODE = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from batcher.decoding.constraints.trials import serve; serve()"
)
_STATUS = Path("/proc/self/status")
_DATA = "VmData:"


class Trials:
    """Tries constraints; its process is started for the first one, and ends with this one."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._passed: OrderedDict[ConstraintSource, Enforceable] = OrderedDict()
        self._lock = threading.Lock()
        atexit.register(self.close)

    def make(self, source: ConstraintSource, timeout: float) -> Enforceable | GrammarError:
        """Return what can be enforced of a constraint, or why it cannot be compiled in that time.

        timeout: seconds of processor time.  A constraint that has passed is not tried again.

        Raises:
            BatchdecodeError: no process can be started.
        """
        with self._lock:
            if source in self._passed:
                self._passed.move_to_end(source)
                return self._passed[source]
            found = self._try(source, timeout)
            if isinstance(found, Enforceable):
                self._passed[source] = found
                if len(self._passed) > _MAX_REMEMBERED:
                    self._passed.popitem(last=False)
            return found

    def close(self) -> None:
        """End the process."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.communicate()

    def _try(self, source: ConstraintSource, timeout: float) -> Enforceable | GrammarError:
        if self._process is None or self._process.poll() is not None:
            self.close()
            self._process = _start()
        process = self._process
        max_bytes = BASE_MEMORY + MEMORY_PER_CHARACTER * len(source.text)
        answer, is_late = b"", False
        try:
            tasks, output = cast(IO[bytes], process.stdin), cast(IO[bytes], process.stdout)
            with suppress(BrokenPipeError):  # it may end before it has read all of the task
                task = [source.kind, source.text, timeout, max_bytes]
                tasks.write(json.dumps(task).encode() + b"\n")
                tasks.flush()
            is_late = not select.select([output], [], [], _PATIENCE * timeout)[0]
            if not is_late:
                answer = output.readline()
                if not answer:
                    process.wait()
        finally:
            if not answer:  # nor will there be, if this was interrupted
                self.close()
        if answer:
            found = json.loads(answer)
            if "message" in found:
                return GrammarError(tuple(found["path"]), found["message"])
            enforced = ConstraintSource(source.kind, found["text"])
            return Enforceable(enforced, tuple(found["unenforced"]))
        if is_late or process.returncode == -signal.SIGPROF:
            message = f"it takes more than {timeout:g} seconds to compile; see --grammar-timeout"
        else:
            message = f"it takes more than {max_bytes // 2**20} MiB of memory to compile"
        return GrammarError((source.kind,), message)


def _start() -> "subprocess.Popen[bytes]":
    """Return a process that serves, beyond the reach of Ctrl-C.

    Raises:
        BatchdecodeError: there is none.
    """
    try:
        return subprocess.Popen(  # noqa: S603 - this interpreter, with a program of ours
            [sys.executable, "-P", "-c", _CODE, json.dumps(sys.path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
    except OSError as error:
        raise BatchdecodeError(f"no process to compile constraints in: {error}") from error


def serve() -> None:
    """Answer tasks until there are no more."""
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with_large_stack(_answer_all)


def _answer_all() -> None:
    from llguidance import LLTokenizer  # noqa: PLC0415 - an optional dependency

    tokenizer = LLTokenizer("byte")
    for line in sys.stdin.buffer:
        kind, text, seconds, max_bytes = json.loads(line)
        _limit_memory(max_bytes)
        signal.setitimer(signal.ITIMER_PROF, seconds)
        found = enforceable_part(tokenizer, ConstraintSource(kind, text))
        signal.setitimer(signal.ITIMER_PROF, 0)
        if isinstance(found, GrammarError):
            answer = {"path": found.path, "message": str(found)}
        else:
            answer = {"text": found.source.text, "unenforced": found.unenforced}
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


def _limit_memory(num_bytes: int) -> None:
    """Let the process take so much more than it has, where the system tells how much that is."""
    if not _STATUS.exists():
        return
    [held] = [line for line in _STATUS.read_text().splitlines() if line.startswith(_DATA)]
    limit = int(held.split()[1]) * 1024 + num_bytes
    resource.setrlimit(resource.RLIMIT_DATA, (limit, resource.RLIM_INFINITY))


TRIALS = Trials()
