"""Problems of the input, of options and of a model, as people are told of them."""

import os
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
from batcher.requests.openai import own_name
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


def say(text: str) -> None:
    sys.stderr.write(text)
    sys.stderr.flush()


class ProblemReport:
    """Collects problems; the first MAX_SHOWN are kept to be shown, the others counted.

    num_lines: how many lines are bad.  news: what there is to show that was not taken yet.
    """

    def __init__(self, filename: str, color: ColorChoice = "auto") -> None:
        self.num_lines = 0
        self._filename, self._color = filename, color
        self._num_shown = self._num_hidden = 0
        self._hidden_codes: set[str] = set()
        self.news: list[str] = []

    def add(self, bad: BadLine) -> None:
        """Take in one more line, of whose problems the first is shown."""
        self.num_lines += 1
        problem = bad.problems[0]
        if self._num_shown < MAX_SHOWN and problem.code not in self._hidden_codes:
            self._num_shown += 1
            from batcher.requests.problems import render_problem  # noqa: PLC0415 - if there is one

            width = terminal_size(2, os.environ).columns
            color = wants_color(self._color, 2, os.environ)
            # a fault of the whole input: other lines have it, too, and are counted
            if not self._hidden_codes and problem.code in {"invalid-json", "invalid-text"}:
                form = _form_of(problem, self._filename)
                if form is not None:
                    self._hidden_codes = {"invalid-text", problem.code}
                    advice = f"{form.name}? {_how(form.command, self._filename)}"
                    problem = replace(problem, hint=advice)
            name = self._filename
            self.news.append(render_problem(problem, filename=name, width=width, color=color))
        else:
            self._num_hidden += 1

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
    """The input has bad lines, which have been reported."""

    def __init__(self, report: ProblemReport, num_lines: int, what_now: str) -> None:
        lines = "line" if num_lines == 1 else "lines"
        super().__init__(f"{report.num_lines:,} invalid of {num_lines:,} {lines}; {what_now}")


class ModelTracebacks(AbstractContextManager["ModelTracebacks"]):
    """Hears, while it is entered, of what a model raises, and has `report` show it.

    Each kind is shown once, others are counted.

    is_quiet: only what was raised and where, without the traceback.
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
    """Say once where memory has no limit, though the GPU of a profile has one.

    engines: a profile and its settings.
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
    """Say which limits are that many seconds, in a run whose steps take as long as real ones."""
    from batcher.metrics.slo import doubtful_limits  # noqa: PLC0415 - few runs have an SLO

    for remark in doubtful_limits(texts):
        say(f"--slo: {remark}\n")


# -- inputs that are not JSON lines, and commands that make JSON lines of them
#
# Each command can be pasted: it names the input, and prints requests.

_NAMES = ("prompt", "messages", "id", "custom_id")
_JSON_FILE = re.compile(r".*\.(json|jsonl|ndjson)\Z")
_YAML_FILE = re.compile(r".*\.ya?ml\Z")
_YAML_LINE = re.compile(rf"(- )?({'|'.join(_NAMES)}):( |\Z)|---\Z")
_PYTHON = "python3 -c "


class _Form(NamedTuple):
    """What an input is instead, and the command that makes JSON lines of it, without its name."""

    name: str
    command: str


def _from_rows(name: str, modules: str, code: str) -> _Form:
    """Return a form that Python reads with modules: `code` makes the objects of `text`, a file."""
    opened = (
        'raw = open(0, "rb").read(); is_utf8 = raw.decode(errors="ignore").encode() == raw; '
        'text = io.StringIO(raw.decode("utf-8-sig" if is_utf8 else "cp1252", "ignore"), newline="")'
    )
    return _Form(name, _PYTHON + shlex.quote(f"import {modules},io,json; {opened}; {code}"))


_PLAIN = _Form("plain prompts", "jq -Rc '{prompt: .}'")
_COMMAS = _Form("objects with commas behind them", r"sed 's/,[[:space:]]*$//'")
_REMARKS = _Form("JSON with comments", r"grep -Ev '^[[:space:]]*(//|#)'")
_OBJECTS = _from_rows(
    "objects with commas between them",
    "sys",
    '[print(json.dumps(each)) for each in json.loads(f"[{text.read().strip().rstrip(chr(44))}]")]',
)
_DICTS = _from_rows(
    "Python's dicts",
    "ast",
    "[print(json.dumps(ast.literal_eval(row))) for row in text if row.strip()]",
)
_YAML = _Form(
    "YAML",
    _PYTHON
    + shlex.quote(
        'import json,yaml; found = yaml.safe_load(open(0, encoding="utf-8")); '
        'is_one = isinstance(found, dict) and {"prompt", "messages"} & found.keys(); '
        "found = [found] if is_one else found; "
        "found = found if isinstance(found, list) else [*found.values()][0]; "
        "[print(json.dumps(each)) for each in found]"
    ),
)

# What the first line looks like that is not JSON, and what the input is then; in this order.
_FIRST_LINES = (
    (r'\[\s*"', _Form("a JSON array of prompts", "jq -c '.[] | {prompt: .}'")),
    (r"\[", _Form("a JSON array", "jq -c '.[]'")),
    (r"\{\s*'", _DICTS),
    (r"\{\s*“", _Form("JSON in curly quotes", "sed 's/“/\"/g; s/”/\"/g'")),
    (r"\{(.*[{\[,])?\Z", _Form("JSON over several lines", "jq -c .")),
    (r"\{", None),
    (r'"', _Form("prompts in quotes", "jq -c '{prompt: .}'")),
    (r"//", _REMARKS),
    (r"data: \{", _Form("server-sent events", "sed -n 's/^data: //p'")),
)

# How inputs begin that are not lines of UTF-8, what they are, and what of pandas reads them.
_ENCODINGS = (
    (b"\xff\xfe\x00\x00", "UTF-32"),
    (b"\x00\x00\xfe\xff", "UTF-32"),
    (b"\xff\xfe", "UTF-16"),
    (b"\xfe\xff", "UTF-16"),
)
_FRAMES = (
    (b"PAR1", "a Parquet file", "read_parquet"),
    (b"ARROW1", "an Arrow file", "read_feather"),
)
_LFS = b"version https://git-lfs.github.com/spec/"
_HEAD, _NO_TEXT = 512, re.compile(rb"[\x01-\x08\x0e-\x1f\x7f-\xff]")
_USTAR = 257  # where a tar archive says that it is one


def why_no_lines(start: bytes, filename: str) -> str | None:
    """Return what an input is, that begins so and is not lines of UTF-8, and how to read it.

    None if it may be lines.
    """
    found = None
    encoding = next((name for mark, name in _ENCODINGS if start.startswith(mark)), None)
    if encoding is None and start[:2].count(0) == 1 and start[2:4].count(0) == 1:
        encoding = "UTF-16LE" if start[1] == 0 else "UTF-16BE"
    package = next((each for each in _FRAMES if start.startswith(each[0])), None)
    if encoding is not None:
        found = f"is {encoding}, not UTF-8. {_how(f'iconv -f {encoding} -t UTF-8', filename)}"
    elif package is not None:
        _, name, function = package
        source = f"import pandas; frame = pandas.{function}({filename!r}); "
        source += "print(frame.to_json(orient='records', lines=True))"
        found = f"is {name}. JSON lines of it: {_PYTHON}{shlex.quote(source)}"
    elif start.startswith(_LFS):
        file = "" if filename == "<stdin>" else f" --include {shlex.quote(filename)}"
        found = f"is a Git LFS pointer, not the file itself. Fetch that: git lfs pull{file}"
    elif re.match(rb"\s*<(!doctype|html|head|\?xml|!--)", start, re.IGNORECASE):
        found = (
            "is a web page, such as a login or an error. Download the file itself "
            "(on GitHub and Hugging Face: its raw link, with curl -L)"
        )
    elif start[_USTAR : _USTAR + 5] == b"ustar":
        found = f"is a tar archive. {_how('tar -xOf', filename)}"
    elif start[:1] not in b'{["' and 0 in start[:_HEAD] and _NO_TEXT.search(start[:_HEAD]):
        found = "is binary data, not JSON lines"
    return found


def _how(command: str, filename: str) -> str:
    file = "" if filename == "<stdin>" else f" {shlex.quote(filename)}"
    if file and command.startswith((_PYTHON, "tr ")):
        file = f" <{file}"
    elif not file and command.startswith("tar"):
        file = " -"
    return f"JSON lines of it: {command}{file}"


def _form_of(problem: "Problem", filename: str) -> _Form | None:
    line, form = problem.source.strip(), None
    there = problem.source[problem.column - problem.source_start :]  # from the fault on
    if problem.code == "invalid-text" and problem.message.startswith("not UTF-8"):
        form = _encoding_of(line)
    elif problem.code == "invalid-json":
        if line.startswith("\ufeff"):
            command = r"LC_ALL=C sed 's/^\xef\xbb\xbf//'"
            form = _Form("files joined with their byte order marks", command)
        elif there.startswith("\x00"):
            form = _Form("text with NUL bytes", r"tr -d '\000'")
        elif there.startswith(("True", "False", "None")):
            form = _DICTS
        elif "extra data" in problem.message and there[:1] == "\r":
            form = _Form("lines that end in CR", r"tr '\r' '\n'")
        elif "extra data" in problem.message and there[:1] == "{":
            form = _Form("several objects on a line", "jq -c .")
        elif "extra data" in problem.message and there[:1] == ",":
            form = {"": _COMMAS, "{": _OBJECTS}.get(there[1:].strip()[:1])
        if form is None and problem.line == 1:
            form = _table_of(line, filename) or _form_of_first(line, filename)
    return form


def _form_of_first(line: str, filename: str) -> _Form | None:
    for pattern, form in _FIRST_LINES:
        if re.match(pattern, line, re.DOTALL):
            return form
    if line.startswith("#") and _JSON_FILE.match(filename):
        return _REMARKS
    if not line[:1].isprintable():
        return None
    return _YAML if _YAML_FILE.match(filename) or _YAML_LINE.match(line) else _PLAIN


def _table_of(line: str, filename: str) -> _Form | None:
    """Return the form of a table with a head of names, one of which is that of the prompts."""
    import csv  # noqa: PLC0415 - good input does without

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


# How far a comparison is: a bar on a terminal, else a plain line now and then, on stderr.
#
# Rule: what is over soon says nothing.

LARGE_GRID = 100  # cells: more are announced
LINE_INTERVAL = 5.0  # seconds

P = ParamSpec("P")
OnDone = Callable[[float], object]
"""Called with how many are done, a part of one counted as such."""


def seldom(text: Callable[P, str], interval: float | None = None) -> Callable[P, None]:
    """Return what says the `text` of how far it is, at most every `interval` seconds.

    interval: None for LINE_INTERVAL.
    """
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
    """Give what shows how many of `total` cells are done; a large grid is announced."""
    if quiet:
        yield lambda _: None
        return
    if total > LARGE_GRID:
        say(f"{counted(total, 'cell')}, {num_jobs} at a time\n")
    if not can_animate(2, os.environ):
        cells = counted(total, "cell")
        yield seldom(
            lambda done: f"{int(done):,} of {cells}, {unfinished_percent(done / total)} of the work"
        )
        return
    with progress_bar("", "", total, unit="cells") as show:
        yield lambda done: show(completed=done)
