"""`batchdecode help`, `schema` and `completion`: the manual, and what other programs read."""

import os
import re
import shutil
import signal
import subprocess
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Literal

from msgspec import Struct
from typer._click.formatting import HelpFormatter
from typer._completion_shared import get_completion_script

from batcher.errors import BatchdecodeError

from ..command import argument, command
from ..run.files import print_text

MAX_WIDTH = 100  # longer lines are hard to read


@dataclass(frozen=True, kw_only=True)
class HelpOptions:
    """The options of `batchdecode help`."""

    topic: Annotated[
        list[str] | None,
        argument(
            "A page, command, option, field, heading or word of the glossary; without it the "
            "pages are listed.",
            "TOPIC",
            lambda start: topic_names(start).items(),
        ),
    ] = None


@dataclass(frozen=True, kw_only=True)
class SchemaOptions:
    """The options of `batchdecode schema`."""

    kind: Annotated[
        Literal["request", "result", "trace"], argument("request, result or trace.", "KIND")
    ]


@dataclass(frozen=True, kw_only=True)
class CompletionOptions:
    """The options of `batchdecode completion`."""

    shell: Annotated[Literal["bash", "zsh", "fish"], argument("bash, zsh or fish.", "SHELL")]


def help_(options: HelpOptions) -> None:
    """Open a page of the manual, or list the pages."""
    if options.topic:
        open_topic(" ".join(options.topic))
    else:
        list_pages()


def schema(options: SchemaOptions) -> None:
    """Print the JSON Schema of one line of a file."""
    from batcher.requests.schema import encode_schema  # noqa: PLC0415 - help starts without it

    print_text(encode_schema(options.kind))


def completion(options: CompletionOptions) -> None:
    """Print the completion script of a shell."""
    name, variable = "batchdecode", "_BATCHDECODE_COMPLETE"
    script = get_completion_script(prog_name=name, complete_var=variable, shell=options.shell)
    print_text(f"{script}\n")


COMMANDS = {
    "help": command(
        help_,
        HelpOptions,
        examples=(
            "batchdecode help policies",
            "batchdecode help run",
            "batchdecode help --kv-blocks",
        ),
        takes_dashes=True,
    ),
    "schema": command(schema, SchemaOptions),
    "completion": command(
        completion,
        CompletionOptions,
        examples=(
            'eval "$(batchdecode completion bash)"',
            'eval "$(batchdecode completion zsh)"',
            "batchdecode completion fish | source",
        ),
        notes=("To use it, put the line for your shell into its start-up file.",),
    ),
}

# -- topics ----------------------------------------------------------------------------------------

_INDEX = "README.md"
_PACKAGE = Path(__file__).parents[1]
_HEADING = re.compile(r"(#+) (.+)")
_RULE = re.compile(r"\|[-|: ]+\|")
_CODE = re.compile(r"`([^`]+)`")
_PAGE_LINK = re.compile(r"\]\(([^)#:]+\.md)\)")
_GLOSSARY = "glossary"
_NO_WORD = re.compile(r"^-|_")  # in a name: of an option, of a field
_MAX_NEAR = 6
_CLOSE = 0.75  # how alike a name has to be


class Topic(Struct, frozen=True):
    """Something to read.

    page: the name of its page.  names: what it is called, of which the first is shown.  text: in
    Markdown.
    """

    page: str
    names: tuple[str, ...]
    text: str

    @property
    def title(self) -> str:
        """What `help` takes for this topic and no other."""
        return self.page if self.names[0] == self.page else f"{self.page} {self.names[0]}"


def pages() -> dict[str, list[Topic]]:
    """Return a topic for each page, which is called as its file, below the headings of the index.

    Raises:
        BatchdecodeError: the documentation is not installed.
    """
    found = [_PACKAGE / "docs", _PACKAGE.parent / "docs"]  # in an installation, and in a clone
    index = next((path / _INDEX for path in found if (path / _INDEX).is_file()), None)
    if index is None:
        raise BatchdecodeError("the documentation is not installed")
    lines = index.read_text("utf-8").splitlines()
    starts = [(number, title) for number, _, title in _headings(lines)]
    groups, linked = dict[str, list[Topic]](), set[str]()
    for (start, title), (end, _) in pairwise([*starts, (len(lines), "")]):
        links = dict.fromkeys(_PAGE_LINK.findall("\n".join(lines[start:end])))
        own = sorted((link for link in links if link not in linked), key=_folder)
        linked.update(own)
        files = [index.parent / link for link in own if not link.startswith("..")]
        groups[title] = [_page(file) for file in files]
    return groups


def heading_of(page: Topic) -> str:
    """Return the heading of a page, without marks."""
    return _heading_in(page.text)


def topics() -> list[Topic]:
    """Return all topics: pages, then their sections, then the rows of their tables.

    Of rows those go first that stand on a page with many: that is where their kind is defined.
    """
    found = [page for group in pages().values() for page in group]
    sections = [section for page in found for section in _sections(page)]
    rows = [row for section in sections for row in _rows(section)]
    num_rows = Counter(row.page for row in rows)
    return [*found, *sections, *sorted(rows, key=lambda row: -num_rows[row.page])]


def find(words: str) -> list[Topic]:
    """Return the topics that are called so, the best one first.

    Those of a name that begins with dashes are options.  Of others pages go first, then words of
    the glossary, then headings, and options last.

    Raises:
        BatchdecodeError: there is none; the message has some that are called alike.
    """
    known, wanted = topics(), _key(words)
    exact = [t for t in known if wanted and wanted in map(_key, (*t.names, t.title))]
    exact.sort(key=lambda topic: _rank(topic, words))
    parts = wanted.split()
    near = exact or [t for t in known if parts and all(p in _key(t.title).split() for p in parts)]
    if exact or len(near) == 1:
        return near
    in_glossary = [topic for topic in near if topic.page == _GLOSSARY]
    if len(in_glossary) == 1:
        return [*in_glossary, *(topic for topic in near if topic not in in_glossary)]
    names = {_key(name): topic for topic in reversed(known) for name in topic.names}
    near += [names[key] for key in get_close_matches(wanted, names, n=_MAX_NEAR, cutoff=_CLOSE)]
    titles = list(dict.fromkeys(topic.title for topic in near))[:_MAX_NEAR]
    hint = f"; did you mean: {', '.join(titles)}?" if titles else _speaking_of(words, known)
    raise BatchdecodeError(f"no topic {words!r}{hint} (batchdecode help lists all pages)")


def _rank(topic: Topic, words: str) -> int:
    """Return where a topic comes among those that are called `words`, from 0."""
    if words.startswith("-"):
        return int(words not in topic.names)
    names = [name for name in topic.names if _key(name) == _key(words)]
    if topic.title == topic.page:
        return 0
    if topic.page == _GLOSSARY and any(_NO_WORD.search(name) is None for name in names):
        return 1
    return 3 if names and all(name.startswith("-") for name in names) else 2


def _speaking_of(words: str, known: Iterable[Topic]) -> str:
    """Return the end of a message: the pages whose text has the words, most of them first."""
    word = re.compile(rf"(?<!\w){re.escape(words)}(?!\w)", re.IGNORECASE)
    counts = {t.title: len(word.findall(t.text)) for t in known if t.title == t.page}
    found = [page for page in sorted(counts, key=lambda page: -counts[page]) if counts[page]]
    return f"; pages that speak of it: {', '.join(found[:_MAX_NEAR])}" if found else ""


def _heading_in(text: str) -> str:
    return text.partition("\n")[0].removeprefix("# ").replace("`", "")


def _page(file: Path) -> Topic:
    text = file.read_text("utf-8")
    return Topic(page=file.stem, names=(file.stem, _heading_in(text)), text=text)


def _folder(link: str) -> str:
    return link.rpartition("/")[0]


def _sections(page: Topic) -> Iterator[Topic]:
    """Yield what stands below each heading but the first, up to the next as high as that."""
    lines = page.text.splitlines(keepends=True)
    headings = list(_headings(lines))
    for place, (start, depth, title) in enumerate(headings[1:], 1):
        later = (number for number, other, _ in headings[place + 1 :] if other <= depth)
        text = "".join(lines[start : next(later, len(lines))])
        yield Topic(page=page.page, names=(title.replace("`", ""),), text=text)


def _headings(lines: Iterable[str]) -> Iterator[tuple[int, int, str]]:
    """Yield the number, the depth and the words of each heading; code blocks have none."""
    is_code = False
    for number, line in enumerate(lines):
        is_code ^= line.lstrip().startswith("```")
        found = _HEADING.fullmatch(line.rstrip())
        if found is not None and not is_code:
            yield number, len(found[1]), found[2]


def _rows(section: Topic) -> Iterator[Topic]:
    """Yield the rows of the tables of a section that has no other below it, each with its head."""
    lines = section.text.splitlines(keepends=True)
    head: list[str] = []
    is_below = False
    for number, line in enumerate(lines):
        is_below |= number > 0 and _HEADING.fullmatch(line.rstrip()) is not None
        if not line.startswith("|"):
            head = []
        elif len(head) < 2:  # noqa: PLR2004 - the titles of the columns, and the rule below them
            head.append(line)
        elif not is_below and _RULE.fullmatch(head[1].rstrip()):
            names = _names_in(line.split("|")[1])
            if names:
                text = f"{lines[0]}\n{''.join(head)}{line}"
                yield Topic(page=section.page, names=names, text=text)


def _names_in(cell: str) -> tuple[str, ...]:
    """Return what the first cell of a row names: each of a list, and what is marked as code."""
    listed = [name.strip() for name in cell.replace("`", "").split(",")]
    return tuple(dict.fromkeys(name for name in (*_CODE.findall(cell), *listed) if _key(name)))


@cache
def _key(name: str) -> str:
    """Return a name as it is compared: by its words, however they are joined."""
    return " ".join(re.split(r"[\s_/-]+", name.lower())).strip()


def topic_names(start: str) -> dict[str, str]:
    """Return the pages, and from the first letter on every topic of one word, with its heading."""
    found = {page.page: heading_of(page) for group in pages().values() for page in group}
    if not start:
        return found
    names = (name for topic in topics() for name in topic.names if " " not in name)
    return dict.fromkeys(sorted(names), "") | found


# -- reading ---------------------------------------------------------------------------------------

_LINK = re.compile(r"(!?)\[([^]]*)\]\((?!https?:)([^)#]*)#?([^)]*)\)")
_LEADS_ON = re.compile(r"(Next|In full|See also|More): ")
_MAX_OTHERS = 8


def list_pages() -> None:
    """List the pages, a line for each.

    Raises:
        BatchdecodeError: the documentation is not installed.
        WriteError, BrokenPipeError: stdout takes no more.
    """
    page = HelpFormatter(max_width=MAX_WIDTH)
    page.write_usage("batchdecode help", "[TOPIC]")
    for title, group in pages().items():
        if group:
            with page.section(title):
                page.write_dl([(topic.page, heading_of(topic)) for topic in group])
    page.write_paragraph()
    page.write_text(
        "Commands, options, fields, headings and words of the glossary are topics, too."
    )
    if os.isatty(1):
        ChosenPager().show(page.getvalue())
    else:
        print_text(page.getvalue())


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

    console = Console(theme=Theme({"markdown.code": "cyan", "markdown.code_block": ""}))
    names = {page.page for group in pages().values() for page in group}
    readable = "".join(_readable(line, names) for line in text.splitlines(keepends=True))
    with console.pager(ChosenPager(), styles=not console.no_color):  # type: ignore[arg-type]  # it shows
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


class ChosenPager:
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
