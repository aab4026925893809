"""`batchdecode run`: decodes requests, streams the results and shows the batch at work."""

import gc
import shlex
import sys
from typing import Any

import typer

from ..config import ENVIRONMENT
from ..help import GroupedCommand, as_command
from ..options import RunOptions
from .records import help_without_input, takes_record

EXAMPLES = """\b
Examples:
  batchdecode run requests.jsonl -o results.jsonl
  zcat requests.jsonl.gz | batchdecode run -b 64 | jq -r .text
  batchdecode run requests.jsonl -o results.jsonl --resume

\b
Settings: a flag goes before the environment (BATCHDECODE_KEEP_ORDER=1, so for
every option), that before --config, and that before the default.

\b
Exit codes: 0 all is well; 1 a request failed, or the output cannot be
written; 2 bad input or usage; 130 Ctrl-C; 143 SIGTERM; 141 closed pipe.
"""


_SAID_ONCE = {"--force", "--retry-failed", "--resume=repair"}  # not again to go on


class RunCommand(GroupedCommand):
    """`run`, whose flag --resume may be given with how to go on: --resume=repair."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse `args`, in which that is two flags."""
        return super().parse_args(ctx, [part for arg in args for part in _as_flags(arg)])


def _as_flags(argument: str) -> list[str]:
    name, _, how = argument.partition("=")
    if name != "--resume" or not how:
        return [argument]
    if how != "repair":
        raise typer.BadParameter(f"{how}: it is --resume or --resume=repair")
    return ["--resume", "--repair"]


def run(context: typer.Context, options: RunOptions) -> None:
    """Decode requests; results go to stdout, one JSON object per line."""
    help_without_input(context, options.input)
    gc.disable()  # until the run begins: what is imported, or set up, is no garbage
    from batcher.errors import BatchdecodeError  # noqa: PLC0415 - heavy, as are the others
    from batcher.foreign import RaisedError  # noqa: PLC0415 - heavy

    from ..running.runner import run as run_requests  # noqa: PLC0415 - heavy
    from ..running.signals import Interrupted, StopSignals, die_of_closed_pipe  # noqa: PLC0415 - as above
    from ..running.stdout import user_code_prints_to_stderr  # noqa: PLC0415 - as above

    with user_code_prints_to_stderr(), StopSignals() as stop:
        try:
            status = run_requests(options, stop, _continuing_command())
        except (Interrupted, KeyboardInterrupt):  # before the first step, or a second time
            status = stop.exit_status
        except RaisedError as error:
            if options.quiet:
                raise BatchdecodeError(str(error)) from None
            raise
        except BrokenPipeError:
            die_of_closed_pipe()
    raise typer.Exit(status)


def _continuing_command() -> str:
    """Return the command line that continues this run."""
    arguments = [argument for argument in sys.argv[1:] if argument not in _SAID_ONCE]
    return shlex.join(
        ["batchdecode", *arguments, *([] if "--resume" in arguments else ["--resume"])]
    )


COMMAND = as_command(
    takes_record(run, RunOptions), cls=RunCommand, epilog=EXAMPLES, context_settings=ENVIRONMENT
)
