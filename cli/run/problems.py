"""Report problems of the input, of options and of a model on stderr."""

import re
import shlex
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, NamedTuple, ParamSpec, Self

from msgspec.structs import replace

from batcher.errors import BatchdecodeError
from batcher.foreign import LISTENERS, Raised
from batcher.requests.lines import BadLine
from batcher.requests.validation import own_name
from batcher.settings import SchedulingSettings

from ..options import WALL
from ..screen.terminal import (
    ColorChoice,
    can_animate,
    counted,
    printable,
    printable_lines,
    progress_bar,
    terminal_size,
    unfinished_percent,
    wants_color,
)

if TYPE_CHECKING:
    from batcher.requests.problems import Problem

MAX_SHOWN = 50
_MAX_KINDS = 5  # of what a model raises
_EARLIER_LINE = re.compile(r"(?<=already used on )line ([0-9]+)\Z")


def say(text: str) -> None:
    sys.stderr.write(text)
    sys.stderr.flush()


class ProblemReport:
    """Collects problems; shows MAX_SHOWN of them, and counts the others.

    num_lines: bad lines.  news: texts that `take` has not returned yet.
    place_of: returns the name of the input that has a line, and the number of the line in it.
    """

    def __init__(
        self,
        filename: str,
        color: ColorChoice = "auto",
        place_of: Callable[[int], tuple[str, int]] | None = None,
    ) -> None:
        self.num_lines = 0
        self._color = color
        self._place_of = place_of or (lambda number: (filename, number))
        self._num_shown = self._num_hidden = 0
        self._hidden_codes: set[str] = set()
        self.news: list[str] = []

    def add(self, bad: BadLine) -> None:
        """Add a bad line; its first problem is shown."""
        self.num_lines += 1
        problem = bad.problems[0]
        if self._num_shown < MAX_SHOWN and problem.code not in self._hidden_codes:
            self._num_shown += 1
            from batcher.requests.problems import render_problem  # noqa: PLC0415 - rare

            width = terminal_size(2).columns
            color = wants_color(self._color, 2)
            # a problem of the whole input: the other lines that have it are only counted
            name, line = self._place_of(problem.line)
            if line != problem.line:  # of several inputs
                message = _EARLIER_LINE.sub(self._in_its_input, problem.message)
                problem = replace(problem, line=line, message=message)
            if not self._hidden_codes and problem.code in {"invalid-json", "invalid-text"}:
                form = _form_of(problem, name)
                if form is not None:
                    self._hidden_codes = {"invalid-text", problem.code}
                    advice = f"{form.name}? {_how(form.command, name)}"
                    problem = replace(problem, hint=advice)
            self.news.append(render_problem(problem, filename=name, width=width, color=color))
        else:
            self._num_hidden += 1

    def _in_its_input(self, found: re.Match[str]) -> str:
        name, line = self._place_of(int(found[1]))
        return f"line {line} of {name}"

    def tell(self, text: str) -> None:
        self.news.append(text.removesuffix("\n"))

    def take(self) -> str:
        shown = "".join(f"{text}\n" for text in self.news)
        self.news.clear()
        return shown

    def closing(self) -> str:
        num_hidden, self._num_hidden = self._num_hidden, 0
        return self.take() + (
            f"... and {counted(num_hidden, 'more problem')}\n" if num_hidden else ""
        )


class InvalidInput(BatchdecodeError):  # noqa: N818 - the fault is the input's
    """The input has bad lines, which were reported."""

    def __init__(self, report: ProblemReport, num_lines: int, what_now: str) -> None:
        lines = "line" if num_lines == 1 else "lines"
        super().__init__(f"{report.num_lines:,} invalid of {num_lines:,} {lines}; {what_now}")


class ModelTracebacks(AbstractContextManager["ModelTracebacks"]):
    """Reports what a model raises while this is entered: each kind once, the others as a count.

    is_quiet: without the traceback.
    """

    def __init__(self, report: ProblemReport, *, is_quiet: bool) -> None:
        self._report, self._is_quiet = report, is_quiet
        self._counts: Counter[str] = Counter()  # by type and place

    def __enter__(self) -> Self:
        LISTENERS.append(self.show)
        return self

    def __exit__(self, *_: object) -> None:
        LISTENERS.remove(self.show)

    def show(self, raised: Raised) -> None:
        kind = f"{raised.said.partition(':')[0]} at {raised.place}"
        self._counts[kind] += 1
        if self._counts[kind] == 1 and len(self._counts) <= _MAX_KINDS:
            text = f"{raised}\n" if self._is_quiet else raised.traceback
            self._report.tell(printable_lines(text))

    def close(self) -> None:
        more = {kind: count - 1 for kind, count in self._counts.items() if count > 1}
        for kind, count in list(more.items())[:_MAX_KINDS]:
            which = "" if len(self._counts) == 1 else f": {kind}"
            self._report.tell(printable_lines(f"... and {count:,} more like it{which}\n"))
        self._counts.clear()


# -- options that may not be meant as they are written


def say_of_memory(engines: Iterable[tuple[str, SchedulingSettings]]) -> None:
    """Warn about unlimited KV memory where the GPU of a profile has a limit.

    engines: profiles and settings.
    """
    from batcher.timing.profiles import setup_of  # noqa: PLC0415 - with it comes yaml

    notes = dict[str, None]()
    for profile, settings in engines:
        room = None if profile == WALL else setup_of(profile).kv_room
        if room is not None and room.num_tokens == 0:
            notes[f"the weights do not fit into the GPU of {profile}"] = None
        elif room is not None and settings.kv_blocks is None:
            count = f"{room.num_tokens:,} tokens"
            known = count if room.is_reported else f"about {count} by its data sheet"
            num_blocks = room.num_blocks(settings.block_size)
            option = f": --kv-blocks {num_blocks}" if num_blocks else ""
            notes[f"KV is unlimited; the GPU of {profile} has room for {known}{option}"] = None
    for note in notes:
        say(f"{printable(note)}\n")


def say_of_slo(texts: Sequence[str]) -> None:
    """Warn about limits that look like steps, in a run that is timed in seconds."""
    from batcher.metrics.slo import doubtful_limits  # noqa: PLC0415 - few runs have an SLO

    for remark in doubtful_limits(texts):
        say(f"--slo: {remark}\n")


# -- inputs that are not JSON lines, and commands that make JSON lines of them
#
# Each command can be pasted: it names the input, and prints requests.

_NAMES = ("prompt", "messages", "id", "custom_id")
_PYTHON = "python3 -c "


class _Form(NamedTuple):
    """The form of an input, and the command that makes JSON lines of it, without its name."""

    name: str
    command: str


def _from_rows(name: str, modules: str, code: str) -> _Form:
    """Return a form whose command runs Python `code` on `text`, the file as text."""
    opened = (
        'raw = open(0, "rb").read(); is_utf8 = raw.decode(errors="ignore").encode() == raw; '
        'text = io.StringIO(raw.decode("utf-8-sig" if is_utf8 else "cp1252", "ignore"), newline="")'
    )
    return _Form(name, _PYTHON + shlex.quote(f"import {modules},io,json; {opened}; {code}"))


_DICTS = _from_rows(
    "Python's dicts",
    "ast",
    "[print(json.dumps(ast.literal_eval(row))) for row in text if row.strip()]",
)
# Patterns of a first line that is not JSON, and the form of the input; in this order.
_FIRST_LINES = (
    (
        r"\[",
        _Form("a JSON array", "jq -c '.[] | if type == \"string\" then {prompt: .} else . end'"),
    ),
    (r"\{\s*'", _DICTS),
    (r"\{(.*[{\[,])?\Z", _Form("JSON over several lines", "jq -c .")),
    (r"[{\"#]|//|---|data: |(- )?(prompt|messages|id|custom_id):", None),
    (r"", _Form("one prompt per line", "batchdecode run --prompts")),
)
_NO_TEXT = re.compile(rb"[\x01-\x08\x0e-\x1f\x7f-\xff]")


def why_no_lines(start: bytes, filename: str) -> str | None:
    """Return the kind of an input that begins with `start` and is not lines of UTF-8.

    None if it may be lines of UTF-8.
    """
    encoding = {b"\xff\xfe": "UTF-16", b"\xfe\xff": "UTF-16"}.get(start[:2])
    if encoding is None and start[:2].count(0) == 1 and start[2:4].count(0) == 1:
        encoding = "UTF-16LE" if start[1] == 0 else "UTF-16BE"
    if encoding is not None:
        return f"is {encoding}, not UTF-8. {_how(f'iconv -f {encoding} -t UTF-8', filename)}"
    for magic, name, function in (
        (b"PAR1", "a Parquet file", "read_parquet"),
        (b"ARROW1", "an Arrow file", "read_feather"),
    ):
        if start.startswith(magic):
            source = f"import pandas; frame = pandas.{function}({filename!r}); "
            source += "print(frame.to_json(orient='records', lines=True))"
            return f"is {name}. JSON lines of it: {_PYTHON}{shlex.quote(source)}"
    if start.startswith(b"version https://git-lfs.github.com/spec/"):
        file = "" if filename == "<stdin>" else f" --include {shlex.quote(filename)}"
        return f"is a Git LFS pointer, not the file itself. Fetch the file: git lfs pull{file}"
    if re.match(rb"\s*<(!doctype|html|head|\?xml|!--)", start, re.IGNORECASE):
        return (
            "is a web page, such as a login or an error. Download the file itself "
            "(on GitHub and Hugging Face: its raw link, with curl -L)"
        )
    if start[257:262] == b"ustar":
        return f"is a tar archive. {_how('tar -xOf', filename)}"
    if start[:1] not in b'{["' and 0 in start[:512] and _NO_TEXT.search(start[:512]):
        return "is binary data, not JSON lines"
    return None


def _how(command: str, filename: str) -> str:
    file = "" if filename == "<stdin>" else f" {shlex.quote(filename)}"
    if command.startswith("batchdecode"):  # it reads the input as it is
        return f"{command}{file or ' -'}"
    if file and command.startswith((_PYTHON, "tr ")):
        file = f" <{file}"
    elif not file and command.startswith("tar"):
        file = " -"
    return f"JSON lines of it: {command}{file}"


def _form_of(problem: "Problem", filename: str) -> _Form | None:
    line = problem.source.strip()
    there = problem.source[problem.column - problem.source_start :]  # from the problem on
    if problem.code == "invalid-text":
        return _encoding_of(line) if problem.message.startswith("not UTF-8") else None
    if line.startswith("\ufeff"):
        command = r"LC_ALL=C sed 's/^\xef\xbb\xbf//'"
        return _Form("files joined with their byte order marks", command)
    if there.startswith(("True", "False", "None")):
        return _DICTS
    if "extra data" in problem.message and there[:1] in {"\r", "{"}:
        if there[:1] == "{":
            return _Form("several objects on a line", "jq -c .")
        return _Form("lines that end in CR", r"tr '\r' '\n'")
    if problem.line != 1 or not line[:1].isprintable():
        return None
    is_form = (form for pattern, form in _FIRST_LINES if re.match(pattern, line, re.DOTALL))
    return _table_of(line, filename) or next(is_form)


def _table_of(line: str, filename: str) -> _Form | None:
    """Return the form of a table with a header, one column of which holds the prompts."""
    import csv  # noqa: PLC0415 - rare

    for delimiter, name in ((",", "CSV"), ("\t", "TSV"), (";", "CSV")):
        names = next(csv.reader([line.partition("\r")[0]], delimiter=delimiter), [])
        fields = {own_name(each.strip().lower(), _NAMES): each for each in names}
        prompt = fields.get("prompt")
        if prompt is None and names and filename.lower().endswith((".csv", ".tsv")):
            prompt = names[0]
        if prompt is None or len(names) < 2:  # noqa: PLR2004 - one name is a prompt of one word
            continue
        row = f'{{"prompt": row[{prompt!r}]'
        number = fields.get("id") or fields.get("custom_id")
        row += f', "id": row[{number!r}]}}' if number is not None else "}"
        code = (
            f"[print(json.dumps({row})) for row in csv.DictReader(text, delimiter={delimiter!r})]"
        )
        return _from_rows(name, "csv", code)
    return None


def _encoding_of(line: str) -> _Form | None:
    escaped = {int(digits, 16) for digits in re.findall(r"\\x([89a-f][0-9a-f])", line)}
    if not line.isascii() or escaped & {0x81, 0x8D, 0x8F, 0x90, 0x9D}:  # characters are UTF-8 there
        return _Form(
            "UTF-8 with damaged characters, which this drops", "iconv -c -f UTF-8 -t UTF-8"
        )
    return _Form("Windows-1252", "iconv -f WINDOWS-1252 -t UTF-8")


# -- progress on stderr, a bar or seldom lines; short commands print nothing

LARGE_GRID = 100  # cells; larger grids are announced
LINE_INTERVAL = 5.0  # seconds

P = ParamSpec("P")
OnDone = Callable[[float], object]
"""Called with the number of cells that are done, with fractions."""


def seldom(text: Callable[P, str], interval: float | None = None) -> Callable[P, None]:
    """Return a function that prints `text` at most every `interval` seconds, or LINE_INTERVAL."""
    pause = LINE_INTERVAL if interval is None else interval
    due = time.monotonic() + pause

    def show(*args: P.args, **kwargs: P.kwargs) -> None:
        nonlocal due
        if time.monotonic() >= due:
            due = time.monotonic() + pause
            say(f"{text(*args, **kwargs)}\n")

    return show


@contextmanager
def progress_of(total: int, num_jobs: int, *, quiet: bool) -> Iterator[OnDone]:
    """Yield a function that shows how many of `total` cells are done; announce a large grid."""
    if quiet:
        yield lambda _: None
        return
    if total > LARGE_GRID:
        say(f"{counted(total, 'cell')}, {num_jobs} at a time\n")
    if not can_animate(2):
        cells = counted(total, "cell")
        yield seldom(
            lambda done: f"{int(done):,} of {cells}, {unfinished_percent(done / total)} of the work"
        )
        return
    with progress_bar("", "", total, unit="cells") as show:
        yield lambda done: show(completed=done)
