"""What is said of an input that is no JSON lines, and that the command it names makes them."""

import bz2
import io
import json
import lzma
import re
import shlex
import shutil
import subprocess
import tarfile
import zipfile

import pytest
from process import batchdecode, lines_of, refused

REQUESTS = [{"prompt": "Once “upon”"}, {"prompt": "a time"}]
OBJECTS = [json.dumps(each, ensure_ascii=False) for each in REQUESTS]
LINES = "".join(f"{each}\n" for each in OBJECTS)
PLAIN = [{"prompt": "Once upon"}, {"prompt": "a time"}]
PLAIN_LINES = "".join(f"{json.dumps(each)}\n" for each in PLAIN)
FORMS = {  # what an input is: its bytes or text, what its requests are, and its name
    "an array": json.dumps(REQUESTS),
    "an array of lines": f"[\n{OBJECTS[0]},\n{OBJECTS[1]}\n]\n",
    "an array of texts": json.dumps([each["prompt"] for each in REQUESTS]),
    "objects over several lines": "\n".join(json.dumps(each, indent=1) for each in REQUESTS),
    "objects on one line": "".join(OBJECTS),
    "Python's dicts": "".join(f"{each}\n" for each in REQUESTS),
    "CR": LINES.replace("\n", "\r"),
    "a second mark": LINES + "\ufeff" + LINES,
    "CSV": 'id,prompt,answer\n7,"Once “upon”",x\n8,a time,"y,\nz"\n',
    "CSV by another name": 'answer,Question\nx,Once “upon”\ny,"a time"\n',
    "CSV in Windows-1252": 'id,prompt\r\n7,"Once “upon”"\r\n8,a time\r\n'.encode("cp1252"),
    "CSV by its name": "answer,what\nOnce “upon”,x\na time,y\n",
    "CSV with semicolons": "prompt;answer\nOnce “upon”;x\na time;y\n",
    "TSV": "id\ttext\n7\tOnce “upon”\n8\ta time\n",
    "Python's words": LINES.replace("}", ', "echo": True, "stop": None}'),
    "UTF-16": LINES.encode("utf-16"),
    "UTF-16, the other end first": b"\xfe\xff" + LINES.encode("utf-16-be"),
    "UTF-16 without a mark": LINES.encode("utf-16-le"),
    "Windows-1252": LINES.encode("cp1252"),
    "Windows-1252 later": PLAIN_LINES.encode() + LINES.encode("cp1252"),
    "bzip2": bz2.compress(LINES.encode()),
    "xz": lzma.compress(LINES.encode()),
    "zip": None,
    "tar": None,
}
NAMES = {"CSV by its name": "my input.csv"}


def content_of(form):
    """The bytes of an input, and its requests."""
    given, requests = FORMS[form], REQUESTS
    if form == "zip":
        packed = io.BytesIO()
        with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr("in.jsonl", LINES)
        given = packed.getvalue()
    elif form == "tar":
        packed = io.BytesIO()
        with tarfile.open(fileobj=packed, mode="w") as archive:
            entry = tarfile.TarInfo("in.jsonl")
            entry.size = len(LINES.encode())
            archive.addfile(entry, io.BytesIO(LINES.encode()))
        given = packed.getvalue()
    elif "later" in form:
        requests = PLAIN + REQUESTS
    elif form == "Python's words":
        requests = [{**each, "echo": True, "stop": None} for each in REQUESTS]
    elif form == "a second mark":
        requests = REQUESTS * 2
    if "CSV" in form or form == "TSV":
        ids = ["7", "8"] if str(given)[:7].count("id") else [None, None]
        requests = [
            each if name is None else {**each, "id": name}
            for each, name in zip(requests, ids, strict=True)
        ]
    return given if isinstance(given, bytes) else given.encode(), requests


@pytest.mark.skipif(shutil.which("jq") is None, reason="there is no jq")
@pytest.mark.parametrize("form", FORMS)
def test_the_command_that_is_named_makes_requests_of_it(tmp_path, form):
    data, requests = content_of(form)
    name = NAMES.get(form, "my input")
    is_piped = form.startswith("CSV") and form not in NAMES
    (tmp_path / name).write_bytes(data)
    stdin = data if is_piped else b""
    said = refused("run", "-" if is_piped else name, cwd=tmp_path, stdin=stdin)
    assert said.count("Decompress it with: ") + said.count("JSON lines of it: ") == 1
    assert said.count("error[") <= 1
    command = re.search(r"(?:JSON lines of it|Decompress it with): (.*)\n", said)[1]
    made = subprocess.run(
        ["bash", "-c", command], cwd=tmp_path, input=stdin, capture_output=True, check=True
    )
    assert [json.loads(line) for line in made.stdout.splitlines() if line] == requests


FILES = [
    (b"<!DOCTYPE html>\n<html><body>Log in</body></html>\n", "is a web page"),
    (b"\n<html>\n", "is a web page"),
    (
        b"version https://git-lfs.github.com/spec/v1\noid sha256:abc\nsize 12345\n",
        "git lfs pull --include in.jsonl",
    ),
    (b"PAR1\x15\x04\x15\x00\n", "is a Parquet file. JSON lines of it: python3 -c"),
    (b"\x7fELF\x02\x01\x01\x00", "is binary data"),
    (b"PK\x03\x04" + bytes(26) + b"[Content_Types].xml\n", "is an Office document"),
]


@pytest.mark.parametrize(("data", "message"), FILES, ids=[message for _, message in FILES])
def test_a_file_that_is_not_lines_of_text_is_told_in_one_line(tmp_path, data, message):
    (tmp_path / "in.jsonl").write_bytes(data)
    for command in ["run", "check", "trace"] if data == FILES[0][0] else ["check"]:
        said = refused(command, "in.jsonl", cwd=tmp_path)
        assert said.startswith("error: in.jsonl is ")
        assert message in said
        assert said.count("\n") == 1


def test_plain_text_is_read_with_the_named_option(tmp_path):
    (tmp_path / "my prompts").write_text("Once upon\na time\n")
    done = batchdecode("run", "my prompts", cwd=tmp_path)
    [command] = re.findall(r"help: one prompt per line\? batchdecode (.*)\n", done.stderr)
    assert command == "run --prompts 'my prompts'"
    done = batchdecode(*shlex.split(command), "-q", cwd=tmp_path)
    assert (done.returncode, done.stdout.count(b"\n")) == (0, 2)


def test_lines_that_suffer_from_the_same_are_counted_and_others_shown(tmp_path):
    lines = lines_of("Once upon", {"prompt": "a", "max_token": 3}, "a time", "there was")
    done = batchdecode("check", "-", cwd=tmp_path, stdin=lines)
    assert re.findall(r"error\[(.*)\]", done.stderr) == ["invalid-json", "unknown-field"]
    assert "... and 2 more problems\n" in done.stderr
    assert "4 invalid of 4 lines" in done.stderr


@pytest.mark.parametrize("line", ['{"prompt": "torn', '{"prompt": }'])
def test_a_line_that_is_meant_as_a_request_is_explained_and_no_more(line):
    done = batchdecode("run", stdin=f"{line}\n".encode())
    assert "help:" not in done.stderr
