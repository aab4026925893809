"""The entry point, where errors become messages and exit codes.

All imports but those of Python are below `main`, where Ctrl-C already ends the command quietly.
"""

import errno
import gc
import io
import os
import resource
import signal
import sys

FAILURE, USER_ERROR = 1, 2
STOPPED = (128 + signal.SIGINT, 128 + signal.SIGTERM)
PREFIX = "BATCHDECODE_"  # as in cli.command, which is slow to import


def main() -> None:
    """Run the command line; leave the process with its exit status."""
    gc.disable()  # until the command runs: imports make no garbage
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # ends the command quietly
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `| head` ends a command quietly
    _occupy_standard_descriptors()
    from batcher.errors import BatchdecodeError  # noqa: PLC0415 - see the rule above

    from .errors import WriteError  # noqa: PLC0415 - as above

    try:
        _carry_out(sys.argv[1:])
    except SystemExit as error:
        if error.code in STOPPED:
            from .signals import exit_soon  # noqa: PLC0415 - only after a signal

            exit_soon(error.code)
        raise
    except (
        *(BatchdecodeError, WriteError, OSError),
        *(MemoryError, ImportError, RuntimeError),  # out of memory
    ) as error:
        found = _described(error)
        if found is None:
            raise
        message, status = found
        print(f"error: {_printable(message)}", file=sys.stderr)  # noqa: T201 - it is the command line
        sys.exit(status)
    finally:
        from .signals import end_stdout  # noqa: PLC0415 - see the rule above

        end_stdout()


def _carry_out(arguments: list[str]) -> None:
    from typer._click.exceptions import NoArgsIsHelpError, UsageError  # noqa: PLC0415 - as above

    from batcher.errors import BatchdecodeError  # noqa: PLC0415 - as above

    from .commands import app  # noqa: PLC0415 - as above

    if arguments and any(name.startswith(PREFIX) for name in os.environ):
        from .mistakes import unknown_variables  # noqa: PLC0415 - only for a variable

        for unknown in unknown_variables(arguments):
            sys.stderr.write(f"warning: {_printable(unknown)}\n")
    try:
        status = app(prog_name="batchdecode", standalone_mode=False)
        sys.stdout.flush()
        sys.exit(status)
    except NoArgsIsHelpError as error:
        sys.stderr.write(f"{error.message}\n")
        sys.exit(USER_ERROR)
    except UsageError as error:
        from .mistakes import describe  # noqa: PLC0415 - only after a mistake

        raise BatchdecodeError(describe(error, arguments)) from None


def _described(error: Exception) -> tuple[str, int] | None:
    """Return the message and the exit status of an error, None for a bug of ours."""
    from batcher.errors import BatchdecodeError  # noqa: PLC0415 - as above

    from .errors import WriteError  # noqa: PLC0415 - as above

    cause = error.__cause__ or error
    if getattr(cause, "errno", None) == errno.EMFILE:
        most = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        return f"too many files are open at once: `ulimit -n` allows {most}", FAILURE
    if isinstance(error, BatchdecodeError):
        from batcher.foreign import RaisedError  # noqa: PLC0415 - only after an error

        if isinstance(error, RaisedError):  # by the user's code
            sys.stderr.write(_printable(error.raised.traceback))
        return str(error), USER_ERROR
    if isinstance(error, WriteError):
        return str(error), FAILURE
    if isinstance(error, OSError):
        where = f"{error.filename}: " if error.filename is not None else ""
        return f"{where}{error.strerror or error}", FAILURE
    if isinstance(error, ImportError) and "shared object" in str(cause):
        return f"cannot load a library: {cause}", FAILURE  # numpy's message is long
    if isinstance(error, MemoryError) or str(error) == "can't start new thread":
        limits = "`ulimit -v` or the memory of a container may limit it"
        return f"not enough memory; {limits}", FAILURE
    return None


def _occupy_standard_descriptors() -> None:
    """Open closed standard descriptors, so that no other file gets their numbers."""
    for descriptor, mode in enumerate((os.O_WRONLY, os.O_RDONLY, os.O_WRONLY)):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, mode)  # wrong modes: using them is an error
    if sys.stdin is None:
        sys.stdin = open(0, closefd=False)  # noqa: SIM115 - as Python does it
    sys.stdout = io.TextIOWrapper(
        io.BufferedWriter(_Stdout(1, "w", closefd=False)),
        encoding=None if sys.stdout is None else sys.stdout.encoding,
        errors=None if sys.stdout is None else sys.stdout.errors,
        line_buffering=os.isatty(1),
    )
    sys.stderr = io.TextIOWrapper(
        io.BufferedWriter(_ForPeople(2, "w", closefd=False)),
        encoding=None if sys.stderr is None else sys.stderr.encoding,
        errors="backslashreplace",
        line_buffering=True,
    )


class _Stdout(io.FileIO):
    def write(self, data: bytes) -> int:  # type: ignore[override]  # any buffer
        try:
            return super().write(data)
        except BrokenPipeError:
            raise
        except OSError as error:
            from .errors import WriteError  # noqa: PLC0415 - as above

            raise WriteError("stdout", error) from error


class _ForPeople(io.FileIO):
    """A stderr whose errors are ignored, and which does not block the end of a command."""

    def write(self, data: bytes) -> int:  # type: ignore[override]  # any buffer
        from .signals import Interrupted, write_some  # noqa: PLC0415 - if there is anything

        try:
            return write_some(self.fileno(), bytes(data), 0)
        except (OSError, Interrupted):
            return len(data)


def _printable(text: str) -> str:
    from .screen.terminal import printable_lines  # noqa: PLC0415 - see the rule above

    return printable_lines(text)
