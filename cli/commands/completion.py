"""`batchdecode completion`: the script that lets a shell complete commands and options."""

from typing import Annotated, Literal

from msgspec import Struct

from ..help import argument
from ..options import as_command
from ..start import COMPLETION_VARIABLE

SET_UP = """\b
To use it, put the line for your shell into its start-up file:
  eval "$(batchdecode completion bash)"
  eval "$(batchdecode completion zsh)"
  batchdecode completion fish | source
"""


class CompletionOptions(Struct, frozen=True, kw_only=True):
    """The options of `batchdecode completion`."""

    shell: Annotated[Literal["bash", "zsh", "fish"], argument("The shell.", "bash|zsh|fish")]


def completion(options: CompletionOptions) -> None:
    """Print the script that lets a shell complete commands and options."""
    from typer._completion_shared import (  # noqa: PLC0415 - only this command
        get_completion_script,
    )

    from ..running.output import stdout_sink  # noqa: PLC0415 - --help starts without it

    script = get_completion_script(
        prog_name="batchdecode", complete_var=COMPLETION_VARIABLE, shell=options.shell
    )
    stdout_sink().write(f"{script}\n".encode())


def prepare_completion() -> None:
    """Let typer answer the shell, which asks through COMPLETION_VARIABLE."""
    from typer._completion_classes import completion_init  # noqa: PLC0415 - only when asked

    completion_init()


COMMAND = as_command(completion, CompletionOptions, epilog=SET_UP)
