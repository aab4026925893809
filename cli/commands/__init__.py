"""The commands of `batchdecode`; the module of a command is imported on use."""

from collections.abc import Iterator
from importlib import import_module
from typing import Annotated, Any

import typer
from typer._click.exceptions import UsageError
from typer._click.shell_completion import CompletionItem
from typer._completion_classes import completion_init
from typer.core import TyperGroup

import batcher

COMMANDS = {
    "run": "Run prompts or requests, and print the results.",
    "demo": "Play a small run slowly: continuous batching explained in fifteen seconds.",
    "check": "Validate requests and show what a run would do; decode nothing.",
    "trace": "Show which request held which slot at which step.",
    "trace why": "Explain one request: what it waited for, when it ran, how it finished.",
    "trace diff": "Show where two runs of one workload differ, why, and the effect.",
    "verify": "Prove that outputs do not depend on the batch, or show the first difference.",
    "workload": "Make a requests file from an arrival pattern or a trace.",
    "compare": "Simulate every combination of settings and compare them in a table.",
    "plan": "Find the smallest setting, or the largest rate, that meets an SLO.",
    "replay": "Simulate the requests of a real run, and show the error.",
    "profiles": "List profiles of step times, and check them against their hardware.",
    "calibrate": "Fit a profile to a log of real step times, and report its error.",
    "serve": "Serve OpenAI's API over HTTP: completions, chats and streams.",
    "train": "Train a small Llama on texts, or a draft model for one; needs the extra `train`.",
    "draft diagnose": "Show why the drafts of a model are rejected, position by position.",
    "schema": "Print the JSON Schema of a request, a result or a line of a trace.",
    "completion": "Print the completion script for a shell, or install it.",
    "help": "Open a page of the manual, or list the pages.",
}
_MODULES = {"compare": "plan", "calibrate": "profiles", "schema": "help"}


def command_of(name: str) -> Any:
    """Import one command by its name."""
    module = _MODULES.get(name, name.partition(" ")[0])
    return import_module(f".{module}", __package__).COMMANDS[name]


def all_options() -> Iterator[tuple[str, Any]]:
    for name in COMMANDS:
        for param in command_of(name).params:
            if param.param_type_name == "option" and param.expose_value and not param.hidden:
                yield name, param


class _Commands(TyperGroup):
    """The command group, with commands of one word and of two, such as `trace why`."""

    def list_commands(self, ctx: Any) -> list[str]:  # noqa: ARG002 - typer calls it so
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:  # noqa: ARG002 - as above
        return command_of(cmd_name) if cmd_name in COMMANDS else None

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Return the name of the command in `args`, the command and the other arguments.

        To name a file like the second word of a command, write ./NAME.
        """
        num_words = 2 if " ".join(args[:2]) in COMMANDS else 1
        name = " ".join(args[:num_words])
        command = self.get_command(ctx, name)
        if command is None and not ctx.resilient_parsing:
            from ..mistakes import unknown_command  # noqa: PLC0415 - only for a mistake

            raise UsageError(unknown_command(name, list(COMMANDS)))
        return (None if command is None else name), command, args[num_words:]

    def format_commands(self, ctx: Any, formatter: Any) -> None:  # noqa: ARG002 - as above
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))

    def shell_complete(self, ctx: Any, incomplete: str) -> list[CompletionItem]:
        if incomplete.startswith("-"):
            return super().shell_complete(ctx, incomplete)
        start = "".join(f"{word} " for word in ctx._protected_args)  # noqa: SLF001 - of `draft`
        found = {
            name.removeprefix(start).partition(" ")[0]: text
            for name, text in reversed(COMMANDS.items())
            if name.startswith(start + incomplete)
        }
        return [CompletionItem(word, help=text) for word, text in reversed(found.items())]


completion_init()  # typer does it only with its own options for completion
app = typer.Typer(
    cls=_Commands,
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    help="Run prompts through a language model with continuous batching, and show every slot.",
    epilog="Run `batchdecode COMMAND --help` for options, `batchdecode help` for the manual.",
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
    pass
