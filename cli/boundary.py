"""The boundary: where the command line begins, and where errors become messages and exit codes."""

import errno
import io
import os
import resource
import signal
import sys
from typing import NoReturn

from batcher.errors import BatchdecodeError

from .commands import command_of
from .environment import unknown_variables
from .errors import WriteError
from .run.stdout import end_stdout
from .screen.terminal import printable_lines
from .start import COMPLETION_VARIABLE
from .usual_line import usual_values

FAILURE, USER_ERROR = 1, 2
STOPPED = (128 + signal.SIGINT, 128 + signal.SIGTERM)


def main() -> None:
    """Run the command line; leave the process with its exit status."""
    _occupy_standard_descriptors()
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `| head` ends a command quietly
    try:
        _carry_out(sys.argv[1:])
    except BatchdecodeError as error:
        _fail_of_use(error)
    except SystemExit as error:
        if error.code in STOPPED:
            from .signals import exit_soon  # noqa: PLC0415 - only after a signal

            exit_soon(error.code)
        raise
    except WriteError as error:
        _fail(str(error), FAILURE)
    except KeyboardInterrupt:  # of somebody else's code: before and after a run SIGINT ends us
        _fail("aborted", FAILURE)
    except OSError as error:
        if error.errno == errno.EMFILE:  # whichever file it was, of ours or of Python's
            _fail(_too_many_files(), FAILURE)
        where = f"{error.filename}: " if error.filename is not None else ""
        _fail(f"{where}{error.strerror or error}", FAILURE)
    except (MemoryError, ImportError, RuntimeError) as error:
        message = _lack_of_memory(error)
        if message is None:
            raise
        _fail(message, FAILURE)
    finally:
        end_stdout()


def _carry_out(arguments: list[str]) -> None:
    """Carry out what a command line says, and leave with the exit status.

    Raises:
        BatchdecodeError, WriteError, OSError: it could not be.
    """
    if COMPLETION_VARIABLE in os.environ:
        from .usage.completing import answer  # noqa: PLC0415 - only when asked

        sys.stdout.write(answer(os.environ[COMPLETION_VARIABLE], arguments))
        return
    for unknown in unknown_variables() if arguments else ():
        sys.stderr.write(f"warning: {printable_lines(unknown)}\n")
    if arguments and (command := command_of(arguments[0])) is not None:
        rest = arguments[1:]
        while rest and rest[0] in command.below:
            command, rest = command.below[rest[0]], rest[1:]
        values = usual_values(command, rest)
        if values is not None:
            sys.exit(command.carry_out(values, set()))
    from .app import carry_out  # noqa: PLC0415 - with it comes typer

    sys.exit(carry_out())


def _fail_of_use(error: BatchdecodeError) -> NoReturn:
    """Print the message of an error, after the traceback of somebody else's code if it has one."""
    from batcher.foreign import RaisedError  # noqa: PLC0415 - only after an error

    if isinstance(error, RaisedError):
        sys.stderr.write(printable_lines(error.raised.traceback))
    if getattr(error.__cause__, "errno", None) == errno.EMFILE:
        _fail(_too_many_files(), FAILURE)
    _fail(str(error), USER_ERROR)


def _lack_of_memory(error: Exception) -> str | None:
    """Return the message of an error that too little memory causes; None of any other error."""
    cause = error.__cause__ or error  # numpy's own words are long, those of its cause are not
    if isinstance(error, ImportError) and "shared object" in str(cause):
        return f"cannot load a library: {cause}"
    if isinstance(error, MemoryError) or str(error) == "can't start new thread":
        return "not enough memory; `ulimit -v` or the memory of a container may limit it"
    return None


def _too_many_files() -> str:
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return f"too many files are open at once: `ulimit -n` allows {most}"


def _occupy_standard_descriptors() -> None:
    """Let nothing that is opened later take the place of a closed stdin, stdout or stderr."""
    for descriptor, mode in enumerate((os.O_WRONLY, os.O_RDONLY, os.O_WRONLY)):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, mode)  # 0 and 1 the wrong way round: using them is an error
    if sys.stdin is None:
        sys.stdin = open(0, closefd=False)  # noqa: SIM115 - as Python does it
    if sys.stdout is None:
        sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115 - as above
    sys.stderr = io.TextIOWrapper(
        io.BufferedWriter(_ForPeople(2, "w", closefd=False)),
        encoding=None if sys.stderr is None else sys.stderr.encoding,
        errors="backslashreplace",
        line_buffering=True,
    )


class _ForPeople(io.FileIO):
    """A stderr that is full, or that nobody reads, stops nothing; one that blocks, no end."""

    def write(self, data: bytes) -> int:  # type: ignore[override]  # any buffer
        from .signals import Interrupted, write_some  # noqa: PLC0415 - if there is anything

        try:
            return write_some(self.fileno(), bytes(data), 0)
        except (OSError, Interrupted):
            return len(data)


def _fail(message: str, status: int) -> NoReturn:
    print(f"error: {printable_lines(message)}", file=sys.stderr)  # noqa: T201 - this is the command line
    sys.exit(status)
