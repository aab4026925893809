"""Where the command line begins, and where errors become messages and exit codes.

Rule: what imports for long is imported below `main`, when Ctrl-C already ends the command quietly.
"""

import errno
import gc
import io
import os
import resource
import signal
import sys
from typing import NoReturn

from batcher.errors import BatchdecodeError

from .errors import WriteError

FAILURE, USER_ERROR = 1, 2
STOPPED = (128 + signal.SIGINT, 128 + signal.SIGTERM)
PREFIX = "BATCHDECODE_"  # as cli.command has it, which takes long to import


def main() -> None:
    """Run the command line; leave the process with its exit status."""
    gc.disable()  # until a command is carried out: what is imported is no garbage
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # ends the command quietly from here on
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `| head` ends a command quietly
    _occupy_standard_descriptors()
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
    except KeyboardInterrupt:  # raised by code of the user: otherwise SIGINT ends the process
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
        from .run.stdout import end_stdout  # noqa: PLC0415 - see the rule above

        end_stdout()


def _carry_out(arguments: list[str]) -> None:
    """Carry out a command line, and leave with its exit status.

    Raises:
        BatchdecodeError, WriteError, OSError: it could not be carried out.
    """
    from typer._click.exceptions import NoArgsIsHelpError, UsageError  # noqa: PLC0415 - as above

    from .commands import app  # noqa: PLC0415 - as above

    if arguments and any(name.startswith(PREFIX) for name in os.environ):
        from .mistakes import unknown_variables  # noqa: PLC0415 - it imports every command

        for unknown in unknown_variables():
            sys.stderr.write(f"warning: {_printable(unknown)}\n")
    try:
        sys.exit(app(prog_name="batchdecode", standalone_mode=False))
    except NoArgsIsHelpError as error:
        sys.stderr.write(f"{error.message}\n")
        sys.exit(USER_ERROR)
    except UsageError as error:
        from .mistakes import describe  # noqa: PLC0415 - only after a mistake

        raise BatchdecodeError(describe(error, arguments)) from None


def _fail_of_use(error: BatchdecodeError) -> NoReturn:
    """Print the message of an error, after the traceback if code of the user raised it."""
    from batcher.foreign import RaisedError  # noqa: PLC0415 - only after an error

    if isinstance(error, RaisedError):
        sys.stderr.write(_printable(error.raised.traceback))
    if getattr(error.__cause__, "errno", None) == errno.EMFILE:
        _fail(_too_many_files(), FAILURE)
    _fail(str(error), USER_ERROR)


def _lack_of_memory(error: Exception) -> str | None:
    """Return the message of an error that too little memory causes; None for any other error."""
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
    """A stderr that is full, or closed by its reader, stops nothing; one that blocks, no end."""

    def write(self, data: bytes) -> int:  # type: ignore[override]  # any buffer
        from .signals import Interrupted, write_some  # noqa: PLC0415 - if there is anything

        try:
            return write_some(self.fileno(), bytes(data), 0)
        except (OSError, Interrupted):
            return len(data)


def _fail(message: str, status: int) -> NoReturn:
    print(f"error: {_printable(message)}", file=sys.stderr)  # noqa: T201 - this is the command line
    sys.exit(status)


def _printable(text: str) -> str:
    from .screen.terminal import printable_lines  # noqa: PLC0415 - see the rule above

    return printable_lines(text)
