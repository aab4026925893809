"""`batchdecode help`: opens a page of the documentation in the terminal."""

from dataclasses import dataclass

from ..help import argument
from ..options import as_command

EXAMPLES = (
    "batchdecode help policies",
    "batchdecode help run",
    "batchdecode help --kv-blocks",
)


@dataclass(frozen=True, kw_only=True)
class HelpOptions:
    """The options of `batchdecode help`."""

    topic: list[str] | None = argument(
        "A page, a command, an option, a field, a heading or a word of the glossary; without it "
        "the pages are listed.",
        "TOPIC",
        offers="topic",
    )


def help_(options: HelpOptions) -> None:
    """Open a page of the documentation, or list the pages."""
    from ..usage.reading import list_pages, open_topic  # noqa: PLC0415 - --help starts without it

    if options.topic:
        open_topic(" ".join(options.topic))
    else:
        list_pages()


COMMAND = as_command(help_, HelpOptions, examples=EXAMPLES, takes_dashes=True)
