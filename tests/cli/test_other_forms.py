"""What is said of an input that is no JSON lines, and that the command it names makes them."""

import json
import re
import shlex
import shutil
import subprocess

import pytest
from process import batchdecode, lines_of

REQUESTS = [{"prompt": "Once upon"}, {"prompt": "a time"}]
FORMS = {
    "an array": json.dumps(REQUESTS),
    "an array over several lines": json.dumps(REQUESTS, indent=2),
    "an array of texts": '["Once upon", "a time"]',
    "objects over several lines": "\n".join(json.dumps(each, indent=1) for each in REQUESTS),
    "texts in quotes": '"Once upon"\n"a time"\n',
    "plain text": "Once upon\na time\n",
}


@pytest.mark.skipif(shutil.which("jq") is None, reason="there is no jq")
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("is_piped", [False, pytest.param(True, marks=pytest.mark.heavy)])
def test_the_command_that_is_named_makes_requests_of_it(tmp_path, form, is_piped):
    (tmp_path / "my input").write_text(FORMS[form])
    stdin = FORMS[form].encode() if is_piped else b""
    done = batchdecode("run", "-" if is_piped else "my input", cwd=tmp_path, stdin=stdin)
    assert done.returncode == 2
    name = "<stdin>" if is_piped else "my input"
    assert f" --> {name}:1:" in done.stderr
    command = re.search(r"= help: .*\? JSON lines of it: (jq .*)\n", done.stderr)[1]
    arguments = shlex.split(command)
    made = subprocess.run(arguments, cwd=tmp_path, input=stdin, capture_output=True, check=True)
    assert [json.loads(line) for line in made.stdout.splitlines()] == REQUESTS


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
