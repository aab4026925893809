"""The command line: its commands, and the one place where errors become messages and exit codes."""

import io
import os
import select
import signal
import sys
from typing import Annotated, NoReturn

import typer

import batcher
from batcher.errors import BatchdecodeError

from .commands.axis_arguments import takes_axes
from .commands.calibrate import REQUESTS as CALIBRATED_REQUESTS
from .commands.calibrate import calibrate
from .commands.check import check
from .commands.compare import EXAMPLES as COMPARE_EXAMPLES
from .commands.compare import compare
from .commands.completion import COMPLETION_VARIABLE, SET_UP, completion, prepare_completion
from .commands.plan import EXAMPLES as PLAN_EXAMPLES
from .commands.plan import plan
from .commands.profiles import profiles
from .commands.replay import EXAMPLES as REPLAY_EXAMPLES
from .commands.replay import NOT_TAKEN, replay
from .commands.run import EXAMPLES, RunCommand, run
from .commands.schema import schema
from .commands.trace import TraceCommand, trace
from .commands.trace_arguments import REQUESTS
from .commands.verify import verify
from .commands.workload import DISTRIBUTIONS, workload
from .config import ENVIRONMENT
from .errors import WriteError
from .help import GroupedCommand
from .running.stdout import end_stdout
from .scheduling_options import takes_scheduling
from .screen.cells import printable_lines

FAILURE, USER_ERROR = 1, 2
STOPPED = (128 + signal.SIGINT, 128 + signal.SIGTERM)

app = typer.Typer(
    name="batchdecode",
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command(cls=RunCommand, context_settings=ENVIRONMENT, epilog=EXAMPLES)(takes_scheduling(run))
app.command(cls=GroupedCommand, context_settings=ENVIRONMENT)(check)
app.command(cls=TraceCommand)(takes_scheduling(trace, REQUESTS))
app.command(cls=GroupedCommand)(verify)
app.command(cls=GroupedCommand, epilog=DISTRIBUTIONS)(workload)
app.command(cls=GroupedCommand, epilog=COMPARE_EXAMPLES)(takes_axes(compare, as_lists=True))
app.command(cls=GroupedCommand, epilog=PLAN_EXAMPLES)(takes_axes(plan, as_lists=False))
app.command(cls=GroupedCommand, epilog=REPLAY_EXAMPLES)(takes_scheduling(replay, without=NOT_TAKEN))
app.command(cls=GroupedCommand)(profiles)
app.command(cls=GroupedCommand)(
    takes_scheduling(calibrate, CALIBRATED_REQUESTS, without=("check", "profile"))
)
app.command(cls=GroupedCommand)(schema)
app.command(cls=GroupedCommand, epilog=SET_UP)(completion)


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
    from batcher.raised import RaisedError  # noqa: PLC0415 - only after an error

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
