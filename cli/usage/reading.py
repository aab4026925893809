"""`batchdecode help`: topics in a pager on a terminal, as Markdown in a pipe."""

import os
import re
import shutil
import signal
import subprocess
from collections.abc import Collection, Sequence
from pathlib import Path

from rich.pager import Pager

from ..printing import print_text
from .page import MAX_WIDTH, Page
from .topics import Topic, find, heading_of, pages

_LINK = re.compile(r"(!?)\[([^]]*)\]\((?!https?:)([^)#]*)#?([^)]*)\)")
_LEADS_ON = re.compile(r"(Next|In full|See also|More): ")
_MAX_OTHERS = 8


def list_pages() -> None:
    """List the pages, a line for each.

    Raises:
        BatchdecodeError: the documentation is not installed.
        WriteError, BrokenPipeError: stdout takes no more.
    """
    groups = pages()
    page = Page(topic.page for group in groups.values() for topic in group)
    page.usage("batchdecode help", "TOPIC")
    for title, group in groups.items():
        if group:
            page.definitions(title, ((topic.page, heading_of(topic)) for topic in group))
    page.paragraph(
        "A heading, a command, an option, a field and a word of the glossary are topics, too."
    )
    if os.isatty(1):
        from .reading import ChosenPager  # noqa: PLC0415 - only on a terminal

        ChosenPager().show(f"{page}\n")
    else:
        print_text(f"{page}\n")


def open_topic(words: str) -> None:
    """Show the topic that `words` name, and say where else something is called so.

    Raises:
        BatchdecodeError: there is none.
        WriteError, BrokenPipeError: stdout takes no more.
    """
    best, *others = find(words)
    text = best.text + _where_else(best, others)
    if os.isatty(1):
        _page_through(text)
    else:
        print_text(text)


def _where_else(topic: Topic, others: Sequence[Topic]) -> str:
    """Return what follows a topic: the page it is from, and others that are called so."""
    titles = [topic.page] if topic.title != topic.page else []
    titles += dict.fromkeys(other.title for other in others if other.title != topic.title)
    if not titles:
        return ""
    lines = "".join(f"- `batchdecode help {title}`\n" for title in titles[:_MAX_OTHERS])
    return f"\n---\n\nMore:\n\n{lines}"


def _page_through(text: str) -> None:
    """Show Markdown in $PAGER."""
    from rich.console import Console  # noqa: PLC0415 - only on a terminal
    from rich.markdown import Markdown  # noqa: PLC0415 - as above
    from rich.theme import Theme  # noqa: PLC0415 - as above

    from .reading import ChosenPager  # noqa: PLC0415 - as above

    console = Console(theme=Theme({"markdown.code": "cyan", "markdown.code_block": ""}))
    names = {page.page for group in pages().values() for page in group}
    readable = "".join(_readable(line, names) for line in text.splitlines(keepends=True))
    with console.pager(ChosenPager(), styles=not console.no_color):
        page = Markdown(readable, code_theme="ansi_dark", hyperlinks=False)
        console.print(page, width=min(console.width, MAX_WIDTH))


def _readable(line: str, known: Collection[str]) -> str:
    """Return a line of Markdown without what is no use on a terminal: pictures, and links.

    Where it leads to other pages, the commands that open them take the place of the links.
    known: the names of the pages.
    """
    leads_on = _LEADS_ON.search(line) is not None

    def told(link: re.Match[str]) -> str:
        if link[1]:
            return f"(picture: {link[2]})"
        name = Path(link[3]).stem
        command = f"batchdecode help {name} {link[4]}".rstrip()
        return f"{link[2]} (`{command}`)" if leads_on and name in known else link[2]

    return _LINK.sub(told, line)


_NOT_STARTED = (126, 127)  # what a shell says of a program that it cannot run, or not find


class ChosenPager(Pager):
    """Shows a text in that pager; where none can be started, on the terminal itself."""

    def show(self, content: str) -> None:
        """Show a text, and come back when its reader has left it."""
        installed = filter(shutil.which, ("less", "more"))
        os.environ.setdefault("LESS", "FRX")  # as git has it: colors, and no pager for what fits
        command = os.environ.get("PAGER", "").strip() or next(installed, None)
        if command is None or _status_of(command, content) in _NOT_STARTED:
            print_text(content)


def _status_of(command: str, content: str) -> int:
    """Return the exit status of a pager, which has Ctrl-C to itself and may leave a text unread."""
    interrupted = signal.signal(signal.SIGINT, lambda *_: None)  # not ignored: a child would, too
    unread = signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    try:
        text = content.encode(errors="backslashreplace")
        return subprocess.run(command, shell=True, input=text, check=False).returncode  # noqa: S602 - as $PAGER is meant
    finally:
        signal.signal(signal.SIGINT, interrupted)
        signal.signal(signal.SIGPIPE, unread)
