"""Advice for an input that is not JSON lines: a command that makes JSON lines of it.

Each command can be pasted: it names the input, and prints requests.
"""

import csv
import re
import shlex
from typing import TYPE_CHECKING, NamedTuple

from batcher.requests.suggestions import own_name

if TYPE_CHECKING:
    from batcher.requests.diagnostics import Problem

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


_ARRAY = _Form("a JSON array", "jq -c '.[]'")
_STRINGS = _Form("a JSON array of prompts", "jq -c '.[] | {prompt: .}'")
_PRETTY = _Form("JSON over several lines", "jq -c .")
_SEVERAL = _Form("several objects on a line", "jq -c .")
_TEXTS = _Form("prompts in quotes", "jq -c '{prompt: .}'")
_PLAIN = _Form("plain prompts", "jq -Rc '{prompt: .}'")
_COMMAS = _Form("objects with commas behind them", r"sed 's/,[[:space:]]*$//'")
_CURLY = _Form("JSON in curly quotes", "sed 's/“/\"/g; s/”/\"/g'")
_REMARKS = _Form("JSON with comments", r"grep -Ev '^[[:space:]]*(//|#)'")
_RETURNS = _Form("lines that end in CR", r"tr '\r' '\n'")
_EVENTS = _Form("server-sent events", "sed -n 's/^data: //p'")
_MARKS = _Form("files joined with their byte order marks", r"LC_ALL=C sed 's/^\xef\xbb\xbf//'")
_NULS = _Form("text with NUL bytes", r"tr -d '\000'")
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


def advice_for(problem: "Problem", filename: str) -> str | None:
    """Return what to do about an input with this problem; None if its line is meant as a request.

    filename: as messages call the input.
    """
    form = _form_of(problem, filename)
    return None if form is None else f"{form.name}? {_how(form.command, filename)}"


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
    """Return the sentence with a command, which reads the input."""
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
            form = _MARKS
        elif there.startswith("\x00"):
            form = _NULS
        elif there.startswith(("True", "False", "None")):
            form = _DICTS
        elif "extra data" in problem.message:
            after = {"": _COMMAS, "{": _OBJECTS}.get(there[1:].strip()[:1])
            form = {"\r": _RETURNS, "{": _SEVERAL, ",": after}.get(there[:1])
        if form is None and problem.line == 1:
            form = _table_of(line, filename) or _form_of_first(line, filename)
    return form


def _form_of_first(line: str, filename: str) -> _Form | None:
    """Return what an input is whose first line is not JSON, by that line."""
    form: _Form | None = _PLAIN
    if line.startswith("["):
        form = _STRINGS if line[1:].lstrip().startswith('"') else _ARRAY
    elif line.startswith("{"):
        form = _PRETTY if line.endswith(("{", "[", ",")) else None
        form = {"'": _DICTS, "“": _CURLY}.get(line[1:].lstrip()[:1], form)
    elif line.startswith('"'):
        form = _TEXTS
    elif line.startswith("//") or (line.startswith("#") and _JSON_FILE.match(filename)):
        form = _REMARKS
    elif line.startswith("data: {"):
        form = _EVENTS
    elif not line[:1].isprintable():
        form = None
    elif _YAML_FILE.match(filename) or _YAML_LINE.match(line):
        form = _YAML
    return form


def _table_of(line: str, filename: str) -> _Form | None:
    """Return the form of a table with a head of names, one of which is that of the prompts."""
    for delimiter, name in ((",", "CSV"), ("\t", "TSV"), (";", "CSV")):
        names = next(csv.reader([line], delimiter=delimiter), [])
        fields = {own_name(each.strip().lower(), _NAMES): each for each in names}
        prompt = fields.get("prompt")
        if prompt is None and filename.lower().endswith((".csv", ".tsv")):
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
    """Return what a line with bytes that are not UTF-8 may be, which are shown as escapes."""
    escaped = {int(digits, 16) for digits in re.findall(r"\\x([89a-f][0-9a-f])", line)}
    if not line.isascii() or escaped & {0x81, 0x8D, 0x8F, 0x90, 0x9D}:  # characters are UTF-8 there
        return _Form(
            "UTF-8 with damaged characters, which this drops", "iconv -c -f UTF-8 -t UTF-8"
        )
    return _Form("Windows-1252", "iconv -f WINDOWS-1252 -t UTF-8")
