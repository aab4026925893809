"""`batchdecode completion`: the completion script of a shell."""

import os
from pathlib import Path
from typing import Annotated, Literal, get_args

from typer._completion_shared import _get_shell_name, get_completion_script

from batcher.errors import BatchdecodeError

from ..command import argument, command
from ..run.files import print_text

Shell = Literal["bash", "zsh", "fish"]
_HEAD = "#compdef batchdecode\n"
_COMPINIT = "(( $+functions[compdef] )) || { autoload -Uz compinit; compinit; }\n"


def completion(
    shell: Annotated[
        Shell | None, argument("bash, zsh or fish; by default the current shell.", "SHELL")
    ] = None,
) -> None:
    """Print the completion script for a shell."""
    if shell is None:
        candidates = (_get_shell_name(), Path(os.environ.get("SHELL", "")).name)
        shell = next(
            (known for name in candidates for known in get_args(Shell) if known == name), None
        )
    if shell is None:
        raise BatchdecodeError("cannot detect the shell: name it, bash, zsh or fish")
    script = get_completion_script(
        prog_name="batchdecode", complete_var="_BATCHDECODE_COMPLETE", shell=shell
    )
    script = script.replace(_HEAD, _HEAD + _COMPINIT)  # for a .zshrc without compinit
    print_text(f"{script}\n")


COMMANDS = {
    "completion": command(
        completion,
        examples=(
            'eval "$(batchdecode completion bash)"',
            "batchdecode completion fish >> ~/.config/fish/config.fish",
        ),
    ),
}
