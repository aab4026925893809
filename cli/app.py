"""The command line: its commands, and the one place where errors become messages and exit codes."""

import io
import os
import select
import signal
import sys
from importlib import import_module
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperGroup

import batcher
from batcher.errors import BatchdecodeError

from .errors import WriteError
from .running.stdout import end_stdout
from .screen.cells import printable_lines
from .start import COMPLETION_VARIABLE

FAILURE, USER_ERROR = 1, 2
STOPPED = (128 + signal.SIGINT, 128 + signal.SIGTERM)

_COMMANDS = (
    *("run", "check", "trace", "verify", "workload", "compare", "plan", "replay", "profiles"),
    *("calibrate", "serve", "train", "draft", "schema", "completion"),
)


class _LazyGroup(TyperGroup):
    """`batchdecode`: to start one of its commands, the others are not imported."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        names: Any = dict.fromkeys(_COMMANDS)  # get_command has what they stand for
        self.commands = names

    def get_command(self, ctx: Any, cmd_name: str) -> Any:  # noqa: ARG002 - typer calls it so
        """Return the command of this name, None if there is none."""
        if cmd_name not in self.commands:
            return None
        return import_module(f".commands.{cmd_name}", __package__).COMMAND


app = typer.Typer(
    name="batchdecode",
    cls=_LazyGroup,
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _show_version(wanted: bool) -> None:  # noqa: FBT001 - typer passes it so
    if wanted:
        typer.echo(f"batchdecode {batcher.__version__}")
        raise typer.Exit


@app.callback()
def batchdecode(
    *,
    version: Annotated[
        bool,
        typer.Option(
            "--version", help="Show the version and exit.", is_eager=True, callback=_show_version
        ),
    ] = False,
) -> None:
    """Decode a JSONL file of requests with dynamic batching, and see every slot at every step."""


def main() -> None:
    """Run the command line; leave the process with its exit status."""
    _occupy_standard_descriptors()
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `| head` ends a command quietly
    if COMPLETION_VARIABLE in os.environ:
        from .commands.completion import prepare_completion  # noqa: PLC0415 - only when asked

        prepare_completion()
    try:
        app(prog_name="batchdecode")
    except BatchdecodeError as error:
        _show_what_was_raised(error)
        _fail(str(error), USER_ERROR)
    except SystemExit as error:
        if error.code in STOPPED:
            from .running.signals import exit_soon  # noqa: PLC0415 - only after a signal

            exit_soon(error.code)
        raise
    except WriteError as error:
        _fail(str(error), FAILURE)
    except OSError as error:
        where = f"{error.filename}: " if error.filename is not None else ""
        _fail(f"{where}{error.strerror or error}", FAILURE)
    finally:
        end_stdout()


def _show_what_was_raised(error: BatchdecodeError) -> None:
    """Print the traceback of somebody else's code, if that is what the error is about."""
    from batcher.foreign import RaisedError  # noqa: PLC0415 - only after an error

    if isinstance(error, RaisedError):
        sys.stderr.write(printable_lines(error.raised.traceback))


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
    """A stderr that is full, or that nobody reads, stops nothing."""

    def write(self, data: bytes) -> int:  # type: ignore[override]  # any buffer
        try:
            while (num_written := super().write(data)) is None:
                select.select([], [self], [])  # somebody has made it non-blocking
        except OSError:
            return len(data)
        return num_written


def _fail(message: str, status: int) -> NoReturn:
    print(f"error: {printable_lines(message)}", file=sys.stderr)  # noqa: T201 - this is the command line
    sys.exit(status)
