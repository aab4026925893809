"""What there is to read about: the pages of docs/, their headings, and the rows of their tables.

Rule: all of it follows from the files; a page that is added is a topic.
"""

import re
from collections import Counter
from collections.abc import Iterable, Iterator
from difflib import get_close_matches
from functools import cache
from itertools import pairwise
from pathlib import Path

from msgspec import Struct

from batcher.errors import BatchdecodeError

_INDEX = "README.md"
_PACKAGE = Path(__file__).parents[1]
_HEADING = re.compile(r"(#+) (.+)")
_RULE = re.compile(r"\|[-|: ]+\|")
_CODE = re.compile(r"`([^`]+)`")
_LINK = re.compile(r"\]\(([^)#:]+\.md)\)")
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
        links = dict.fromkeys(_LINK.findall("\n".join(lines[start:end])))
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
