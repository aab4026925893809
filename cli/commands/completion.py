"""`batchdecode completion`: the completion script of a shell, printed or installed."""

import os
import shlex
from pathlib import Path
from typing import Annotated, Literal, get_args

from typer._completion_shared import _get_shell_name, get_completion_script

from batcher.errors import BatchdecodeError

from ..command import argument, command, flag
from ..run.files import print_text

Shell = Literal["bash", "zsh", "fish"]
_HEAD = "#compdef batchdecode\n"
_COMPINIT = "(( $+functions[compdef] )) || { autoload -Uz compinit; compinit; }\n"


def completion(
    shell: Annotated[
        Shell | None, argument("bash, zsh or fish; by default the current shell.", "SHELL")
    ] = None,
    *,
    install: Annotated[
        bool, flag("Options", "Install the script for the shell, and show how to activate it.")
    ] = False,
) -> None:
    """Print the completion script for a shell, or install it."""
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
    print_text(_install(shell, f"{script}\n") if install else f"{script}\n")


def _install(shell: Shell, script: str) -> str:
    """Write the script where the shell finds it; return the report.

    fish loads its file by its name.  bash and zsh get a line in their start-up file, since
    bash-completion may be missing, and a late compinit would not see the folder.
    """
    data = _folder("XDG_DATA_HOME", ".local/share")
    path = {
        "bash": data / "bash-completion/completions/batchdecode",
        "zsh": data / "zsh/site-functions/_batchdecode",
        "fish": _folder("XDG_CONFIG_HOME", ".config") / "fish/completions/batchdecode.fish",
    }[shell]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(script)
    name = shlex.quote(str(path))
    report = f"wrote {path}\n"
    if shell != "fish":
        start = Path.home() / ".bashrc" if shell == "bash" else _folder("ZDOTDIR", "") / ".zshrc"
        line = f"[ -f {name} ] && source {name}\n"
        text = start.read_text(errors="replace") if start.exists() else ""
        if line in text.splitlines(keepends=True):
            report += f"{start} loads it already\n"
        else:
            separator = "" if not text or text.endswith("\n") else "\n"
            start.parent.mkdir(parents=True, exist_ok=True)
            with start.open("a") as file:
                file.write(separator + line)
            report += f"added a line to {start}\n"
    return f"{report}New shells complete batchdecode. To activate it now: source {name}\n"


def _folder(variable: str, default: str) -> Path:
    given = Path(os.environ.get(variable, ""))
    return given if given.is_absolute() else Path.home() / default  # as the XDG rules have it


COMMANDS = {
    "completion": command(
        completion,
        examples=(
            "batchdecode completion --install",
            "batchdecode completion zsh --install",
            'eval "$(batchdecode completion bash)"',
            "batchdecode completion fish | source",
        ),
    )
}
