"""`batchdecode completion`: the script that lets a shell complete commands and options."""

from dataclasses import dataclass
from typing import Literal

from ..help import REQUIRED, argument
from ..options import as_command
from ..start import COMPLETION_VARIABLE

EXAMPLES = (
    'eval "$(batchdecode completion bash)"',
    'eval "$(batchdecode completion zsh)"',
    "batchdecode completion fish | source",
)
NOTES = ("To use it, put the line for your shell into its start-up file.",)


@dataclass(frozen=True, kw_only=True)
class CompletionOptions:
    """The options of `batchdecode completion`."""

    shell: Literal["bash", "zsh", "fish"] = argument("bash, zsh or fish.", "SHELL", REQUIRED)


def completion(options: CompletionOptions) -> None:
    """Print the script that lets a shell complete commands and options."""
    from typer._completion_shared import (  # noqa: PLC0415 - only this command
        get_completion_script,
    )

    from ..printing import print_text  # noqa: PLC0415 - --help starts without it

    script = get_completion_script(
        prog_name="batchdecode", complete_var=COMPLETION_VARIABLE, shell=options.shell
    )
    print_text(f"{script}\n")


def prepare_completion() -> None:
    """Let typer answer the shell, which asks through COMPLETION_VARIABLE."""
    from typer._completion_classes import completion_init  # noqa: PLC0415 - only when asked

    completion_init()


COMMAND = as_command(completion, CompletionOptions, examples=EXAMPLES, notes=NOTES)
