"""`batchdecode help` and `schema`: the manual, and the JSON Schemas of the files."""

import os
import re
import shutil
import signal
import subprocess
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from difflib import get_close_matches
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal

from msgspec import Struct
from msgspec.structs import replace
from typer._click.formatting import HelpFormatter

from batcher.errors import BatchdecodeError

from ..command import argument, command
from ..run.files import print_text

MAX_WIDTH = 100  # longer lines are hard to read


# -- topics ----------------------------------------------------------------------------------------

_PACKAGE = Path(__file__).parents[1]
_HEADING = re.compile(r"(#+) (.+)")
_RULE = re.compile(r"\|[-|: ]+\|")
_CODE = re.compile(r"`([^`]+)`")
_PAGE_LINK = re.compile(r"\]\(([^)#:]+\.md)\)")
_GLOSSARY = "glossary"
_NO_WORD = re.compile(r"^-|_")  # in a name: of an option, of a field
_MAX_NEAR = 6
_CLOSE = 0.75  # how alike a name has to be
_ALIASES = {  # words that people type, and the page they mean
    "prompt": "first-file",
    "prompts": "first-file",
    "model": "checkpoints",
    "models": "checkpoints",
    "gguf": "checkpoints",
    "smollm2": "checkpoints",
    "ctrl c": "stop-and-resume",
    "interrupt": "stop-and-resume",
    "stop": "stop-and-resume",
    "error": "when-something-fails",
    "errors": "when-something-fails",
    "player": "live-view",
    "stores": "input-files",
    "urls": "input-files",
    "s3": "input-files",
    "json": "constraints",
    "server": "serve",
    "servers": "serve",
    "openai": "serve",
}


class Topic(Struct, frozen=True):
    """A page of docs/, a section, or a row of a table; the first of its names is shown."""

    page: str
    names: tuple[str, ...]
    text: str
    folder: str = ""  # of a page

    @property
    def title(self) -> str:
        return self.page if self.names[0] == self.page else f"{self.page} {self.names[0]}"

    @property
    def heading(self) -> str:
        return self.text.partition("\n")[0].lstrip("# ").replace("`", "")


def pages() -> dict[str, list[Topic]]:
    """Return a topic for each page, by the headings of docs/README.md."""
    found = [_PACKAGE / "docs", _PACKAGE.parent / "docs"]  # in an installation, and in a clone
    folder = next((path for path in found if (path / "README.md").is_file()), None)
    if folder is None:
        raise BatchdecodeError("the documentation is not installed")
    lines = (folder / "README.md").read_text("utf-8").splitlines()
    starts = [(number, title) for number, _, title in _headings(lines)]
    groups, linked = dict[str, list[Topic]](), set[str]()
    for (start, title), (end, _) in pairwise([*starts, (len(lines), "")]):
        links = dict.fromkeys(_PAGE_LINK.findall("\n".join(lines[start:end])))
        own = sorted(
            links.keys() - linked, key=lambda link: (link.rpartition("/")[0], [*links].index(link))
        )
        linked.update(own)
        groups[title] = []
        for link in own:
            if not link.startswith(".."):
                path = folder / link
                page = Topic(path.stem, (), path.read_text("utf-8"), path.parent.name)
                groups[title].append(replace(page, names=(page.page, page.heading)))
    return groups


def topics() -> list[Topic]:
    """Return pages, their sections and the rows of their tables, with long tables first."""
    found = [page for group in pages().values() for page in group]
    sections = [section for page in found for section in _sections(page)]
    rows = [row for section in sections for row in _rows(section)]
    num_rows = Counter(row.page for row in rows)
    return [*found, *sections, *sorted(rows, key=lambda row: -num_rows[row.page])]


def find(words: str) -> list[Topic]:
    """Return the topics that fit a name, best match first.

    The order: a page, an alias, a command, a word of a page's name or title, a glossary entry, an
    option, a heading, a row of a table.  A name that begins with dashes is an option.  The name of
    a folder is a list of its pages.

    Raises:
        BatchdecodeError: no such topic; the message suggests similar names.
    """
    known, wanted = topics(), _key(words)
    in_folder = [topic for topic in known if topic.folder and topic.folder == wanted]
    if in_folder:
        lines = (f"- `batchdecode help {page.page}`: {page.heading}\n" for page in in_folder)
        return [Topic(wanted, (wanted,), f"# {wanted}\n\n{''.join(lines)}")]
    ranks = ((_rank(topic, words, wanted), topic) for topic in known if wanted)
    fitting = [(rank, topic) for rank, topic in ranks if rank is not None]
    exact = [topic for _, topic in sorted(fitting, key=lambda pair: pair[0])]
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
    hint = f"; did you mean: {', '.join(titles)}?" if titles else ""
    if not titles:  # maybe some pages have the words
        word = re.compile(rf"(?<!\w){re.escape(words)}(?!\w)", re.IGNORECASE)
        counts = Counter({t.page: len(word.findall(t.text)) for t in known if t.title == t.page})
        found = [page for page, count in counts.most_common(_MAX_NEAR) if count]
        hint = f"; pages that mention it: {', '.join(found)}" if found else ""
    raise BatchdecodeError(f"no topic {words!r}{hint} (batchdecode help lists all pages)")


def _rank(topic: Topic, words: str, wanted: str) -> int | None:
    """Return how well a topic fits, 0 for best, or None; wanted: the key of `words`."""
    names = [name for name in topic.names if _key(name) == wanted]
    if words.startswith("-"):
        return int(words not in names) if names else None
    if topic.folder:
        if names:
            return 0
        if _ALIASES.get(wanted) == topic.page:
            return 1
        of_names = re.findall(r"\w+", " ".join(topic.names).lower())
        return 3 if wanted in of_names else None
    if not names:
        return 7 if _key(topic.title) == wanted else None
    is_heading = topic.heading == topic.names[0]
    if topic.page == "cli" and is_heading and names[0].islower():
        return 2
    if topic.page == _GLOSSARY and any(_NO_WORD.search(name) is None for name in names):
        return 4
    if all(name.startswith("-") for name in names):
        return 8 if "_" in words else 5  # a name with underscores is a field
    return 6 if is_heading else 7


def _sections(page: Topic) -> Iterator[Topic]:
    """Yield the text below each heading but the first, up to the next heading of that level."""
    lines = page.text.splitlines(keepends=True)
    headings = list(_headings(lines))
    for place, (start, depth, title) in enumerate(headings[1:], 1):
        later = (number for number, other, _ in headings[place + 1 :] if other <= depth)
        text = "".join(lines[start : next(later, len(lines))])
        yield Topic(page=page.page, names=(title.replace("`", ""),), text=text)


def _headings(lines: Iterable[str]) -> Iterator[tuple[int, int, str]]:
    """Yield the line number, level and text of each heading outside code blocks."""
    is_code = False
    for number, line in enumerate(lines):
        is_code ^= line.lstrip().startswith("```")
        found = _HEADING.fullmatch(line.rstrip())
        if found is not None and not is_code:
            yield number, len(found[1]), found[2]


def _rows(section: Topic) -> Iterator[Topic]:
    """Yield the table rows of a section without subsections, each with the table's head."""
    lines = section.text.splitlines(keepends=True)
    head: list[str] = []
    for line in lines[1:]:
        if _HEADING.fullmatch(line.rstrip()) is not None:
            return
        if not line.startswith("|"):
            head = []
        elif len(head) < 2:  # noqa: PLR2004 - the titles of the columns, and the rule below them
            head.append(line)
        elif _RULE.fullmatch(head[1].rstrip()):
            cell = line.split("|")[1]  # its names: what is marked as code, and each of a list
            listed = [name.strip() for name in cell.replace("`", "").split(",")]
            names = dict.fromkeys(name for name in (*_CODE.findall(cell), *listed) if _key(name))
            if names:
                text = f"{lines[0]}\n{''.join(head)}{line}"
                yield Topic(page=section.page, names=tuple(names), text=text)


@cache
def _key(name: str) -> str:
    return " ".join(re.split(r"[\s_/-]+", name.lower())).strip()


def topic_names(start: str) -> Iterable[tuple[str, str]]:
    """Return the pages and, once a letter is typed, every topic of one word, with its heading."""
    found = {page.page: page.heading for group in pages().values() for page in group}
    if start:
        names = (name for topic in topics() for name in topic.names if " " not in name)
        found = dict.fromkeys(sorted(names), "") | found
    return found.items()


# -- reading ---------------------------------------------------------------------------------------

_LINK = re.compile(r"(!?)\[([^]]*)\]\((?!https?:)([^)#]*)#?([^)]*)\)")
_MERMAID = re.compile(r"^```mermaid\n.*\n((?:.*\n)*?)(?=```$)", re.MULTILINE)
_NODE = re.compile(r'\b(\w+)(?:\[|{)"?([^\]"}]+)"?[\]}]')  # a node of a flowchart with its label
_LEADS_ON = re.compile(r"(Next|In full|See also|More): ")
_MAX_OTHERS = 8
_NOT_STARTED = (126, 127)  # the status of a shell that cannot run, or find, a program


def open_topic(words: str) -> None:
    """Show the topic named by `words`, and list the others with that name."""
    best, *others = find(words)
    titles = [best.page] if best.title != best.page else []
    titles += dict.fromkeys(other.title for other in others if other.title != best.title)
    more = "".join(f"- `batchdecode help {title}`\n" for title in titles[:_MAX_OTHERS])
    text = f"{best.text}\n---\n\nMore:\n\n{more}" if titles else best.text
    if not os.isatty(1):
        print_text(text)
        return
    from rich.console import Console  # noqa: PLC0415 - only on a terminal
    from rich.markdown import Markdown  # noqa: PLC0415 - as above
    from rich.theme import Theme  # noqa: PLC0415 - as above

    console = Console(theme=Theme({"markdown.code": "cyan", "markdown.code_block": ""}))
    names = {page.page for group in pages().values() for page in group}
    text = _MERMAID.sub(_diagram_as_text, text)
    readable = "".join(_readable(line, names) for line in text.splitlines(keepends=True))
    pager: Any = Pager()
    with console.pager(pager, styles=not console.no_color):
        page = Markdown(readable, code_theme="ansi_dark", hyperlinks=False)
        console.print(page, width=min(console.width, MAX_WIDTH))


def _readable(line: str, known: Collection[str]) -> str:
    """Return Markdown for a terminal: no pictures, and links as commands or text."""
    leads_on = _LEADS_ON.search(line) is not None

    def readable(link: re.Match[str]) -> str:
        if link[1]:
            return f"(picture: {link[2]})"
        name = Path(link[3]).stem
        command = f"batchdecode help {name} {link[4]}".rstrip()
        return f"{link[2]} (`{command}`)" if leads_on and name in known else link[2]

    return _LINK.sub(readable, line)


def _diagram_as_text(diagram: re.Match[str]) -> str:
    """Return the arrows of a Mermaid diagram, one chain per line, with labels for node ids."""
    lines = re.sub(r"(?m)^ *(subgraph .*|end)\n", "", diagram[1].replace("<br>", " "))
    labels = dict(_NODE.findall(lines))
    lines = _NODE.sub(r"\2", lines)
    for node, label in labels.items():
        lines = re.sub(rf"(?m)(^ *|> ){node}(?= *<?--| *$)", rf"\g<1>{label}", lines)
    return f"```text\n{lines}"


class Pager:
    """Shows a text in $PAGER, or prints it if the pager does not start."""

    def show(self, content: str) -> None:
        """Show a text; return when the pager ends.  Ctrl-C goes to the pager alone."""
        installed = filter(shutil.which, ("less", "more"))
        os.environ.setdefault("LESS", "FRX")  # as git has it: colors, and no pager for what fits
        command = os.environ.get("PAGER", "").strip() or next(installed, None)
        interrupted = signal.signal(signal.SIGINT, lambda *_: None)  # not ignored: a child would
        unread = signal.signal(signal.SIGPIPE, signal.SIG_IGN)
        text, status = content.encode(errors="backslashreplace"), _NOT_STARTED[0]
        if command is not None:
            status = subprocess.run(command, shell=True, input=text, check=False).returncode  # noqa: S602 - as $PAGER is meant
        signal.signal(signal.SIGINT, interrupted)
        signal.signal(signal.SIGPIPE, unread)
        if status in _NOT_STARTED:
            print_text(content)


# -- the commands ----------------------------------------------------------------------------------


def help_(
    topic: Annotated[
        list[str] | None,
        argument(
            "A page, command, option, field, heading or glossary entry. Without it, list the "
            "pages.",
            "TOPIC",
            topic_names,
        ),
    ] = None,
) -> None:
    """Open a page of the manual, or list the pages."""
    if topic:
        open_topic(" ".join(topic))
        return
    page = HelpFormatter(max_width=MAX_WIDTH)
    page.write_usage("batchdecode help", "[TOPIC]")
    for title, group in pages().items():
        if group:
            with page.section(title):
                page.write_dl([(each.page, each.heading) for each in group])
    page.write_paragraph()
    page.write_text("A command, option, field, heading or word of the glossary is a topic, too.")
    if os.isatty(1):
        Pager().show(page.getvalue())
    else:
        print_text(page.getvalue())


def schema(
    kind: Annotated[
        Literal["request", "result", "trace"], argument("request, result or trace.", "KIND")
    ],
) -> None:
    """Print the JSON Schema of a request, a result or a line of a trace."""
    from batcher.requests.schema import encode_schema  # noqa: PLC0415 - help starts without it

    print_text(encode_schema(kind))


COMMANDS = {
    "help": command(
        help_,
        examples=(
            "batchdecode help policies",
            "batchdecode help run",
            "batchdecode help --kv-blocks",
        ),
        takes_dashes=True,
    ),
    "schema": command(schema),
}
