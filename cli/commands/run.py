"""`batchdecode run`: decodes requests, streams the results and shows the batch at work."""

import gc
import sys
from collections.abc import Sequence
from functools import partial

from batcher.errors import BatchdecodeError

from ..command import command
from ..run.run_options import RunOptions
from ..signals import Interrupted, StopSignals, die_of_closed_pipe, user_code_prints_to_stderr
from . import command_of

EXAMPLES = (
    'batchdecode run -p "What is 2+2?" --model smollm2 --chat',
    "batchdecode run requests.jsonl -o results.jsonl",
    "zcat requests.jsonl.gz | batchdecode run -b 64 | jq -r .text",
    "batchdecode run requests.jsonl -o results.jsonl --resume",
)
NOTES = (
    (
        "Precedence: flags, then the environment (BATCHDECODE_KEEP_ORDER=1, and so on for every "
        "option but --prompt, --prompts and --format), then --config, then the default."
    ),
    (
        "Exit codes: 0 success; 1 a request failed, or the output cannot be written; 2 bad "
        "input or usage; 130 Ctrl-C; 143 SIGTERM; 141 closed pipe."
    ),
)

_ONCE = {"--force", "--retry-failed", "--resume", "--resume=repair"}  # not repeated to continue


def _as_flags(argument: str) -> list[str]:
    """Split --resume=repair into the two flags that it stands for."""
    name, _, how = argument.partition("=")
    if name != "--resume" or not how:
        return [argument]
    if how != "repair":
        raise BatchdecodeError(f"--resume={how}: use --resume or --resume=repair")
    return ["--resume", "--repair"]


def run(options: RunOptions) -> int:
    """Run prompts or requests, and print the results."""
    gc.disable()  # until the run begins: what is imported, or set up, is no garbage
    from batcher.foreign import RaisedError  # noqa: PLC0415 - heavy, as are the others

    from ..run.run import run as run_requests  # noqa: PLC0415 - heavy

    stop = StopSignals()
    try:  # a second signal may come while these end
        with user_code_prints_to_stderr(), stop:
            status = run_requests(options, stop, partial(continuing_command, sys.argv[1:]))
    except (Interrupted, KeyboardInterrupt):  # before the first step, or a second time
        status = stop.exit_status
    except RaisedError as error:
        if options.quiet:
            raise BatchdecodeError(str(error)) from None
        raise
    except BrokenPipeError:
        die_of_closed_pipe()
    return status


def continuing_command(arguments: Sequence[str], *more: str, resume: str = "--resume") -> list[str]:
    """Return the words of the command that resumes a run, with *** for secrets in URLs.

    arguments: of the run.  more: options to add.
    """
    from ..run.urls import masked  # noqa: PLC0415 - as above

    words = command_of(arguments[0]).mark_options(arguments)
    words = [(word, is_option) for word, is_option in words if not (is_option and word in _ONCE)]
    end = words.index(("--", True)) if ("--", True) in words else len(words)
    words[end:end] = [(word, True) for word in (resume, *more)]
    return ["batchdecode", *(masked(word) for word, _ in words)]


COMMANDS = {"run": command(run, RunOptions, examples=EXAMPLES, notes=NOTES, respell=_as_flags)}
