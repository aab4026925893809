"""The process in which constraints are tried: a task a line in, an answer a line out.

A task is [kind, text, seconds of processor time, bytes of memory]; the answer is null, or the path
and the message of an error.  What takes more ends the process.
"""

import json
import resource
import signal
import sys
from pathlib import Path

from batcher.decoding.constraints.matchers import compile_source, with_large_stack
from batcher.decoding.constraints.source import ConstraintSource
from batcher.errors import GrammarError

_STATUS = Path("/proc/self/status")
_DATA = "VmData:"


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
        found = compile_source(tokenizer, ConstraintSource(kind, text))
        if not isinstance(found, GrammarError):
            found.compute_bitmask()
        signal.setitimer(signal.ITIMER_PROF, 0)
        answer = [found.path, str(found)] if isinstance(found, GrammarError) else None
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


def _limit_memory(num_bytes: int) -> None:
    """Let the process take so much more than it has, where the system tells how much that is."""
    if not _STATUS.exists():
        return
    [held] = [line for line in _STATUS.read_text().splitlines() if line.startswith(_DATA)]
    limit = int(held.split()[1]) * 1024 + num_bytes
    resource.setrlimit(resource.RLIMIT_DATA, (limit, resource.RLIM_INFINITY))
