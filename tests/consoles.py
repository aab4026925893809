"""Runs the commands shown in the documentation; `python tests/consoles.py` renews their output.

A block of a Markdown file that is fenced as `console` holds commands, after "$ ", each with what it
prints (stdout and stderr together).  The commands of one file run in one folder, in order, with
samples/ in it.  A command goes on after a line that ends in a backslash, and with <<'EOF' up to the
line EOF.  Blocks fenced as `console torch` are those of tests/parity, which has torch;
`python tests/consoles.py torch` renews them.

A picture that a page shows and its commands draw, into a file of the same name, is renewed with it.
"""

import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

TOOLS = Path(sys.executable).parent
INSTALLED = [str(TOOLS / "batchdecode")]
ROOT = Path(__file__).parent.parent
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]

PLAIN, WITH_TORCH = (
    re.compile(rf"(?<=^```{fence}\n).*?(?=^```$)", re.DOTALL | re.MULTILINE)
    for fence in ("console", "console torch")
)
COMMAND = re.compile(r"^\$ (.*<<'EOF'.*\n(?:.*\n)*?EOF|(?:.*\\\n)*.*)\n", re.MULTILINE)
WALL = re.compile(r"wall clock [\d.,]+ m?s, [\d.,]+ output tokens/s")
ELAPSED = re.compile(r"(?<= · )\d+\.\d s$", re.MULTILINE)
PICTURE = re.compile(r"!\[[^\]]*\]\(([^):]+)\)")
PROGRESS = re.compile(  # of a command that takes more than five seconds
    r"^([\d,]+ of [\d,]+ cells?, .* of the work|"
    r"tried [\d,]+ values? and \d+% of .*|looking for .* so far)\n",
    re.MULTILINE,
)


class Page(NamedTuple):
    """A page as its commands make it: its text, and of its pictures those that they draw."""

    text: str
    pictures: dict[Path, str]


def regenerated(page, tool, blocks=PLAIN):
    """`page` with the output and the pictures its commands give now; `tool` starts batchdecode."""
    with tempfile.TemporaryDirectory() as commands, tempfile.TemporaryDirectory() as folder:
        batchdecode = Path(commands, "batchdecode")
        batchdecode.write_text(f'#!/bin/sh\nexec {shlex.join(tool)} "$@"\n')
        batchdecode.chmod(0o755)
        shutil.copytree(ROOT / "samples", Path(folder) / "samples")
        environ = {
            name: os.environ[name] for name in ("HOME", "LANG", "TMPDIR") if name in os.environ
        } | {
            "PATH": os.pathsep.join([commands, str(TOOLS), os.environ["PATH"]]),
            "PYTHONUTF8": "1",
            "PYTHONDONTWRITEBYTECODE": "1",  # under `ulimit -f` Python leaves half a .pyc behind
            "COLUMNS": "80",
        }
        text = page.read_text()
        shown = blocks.sub(lambda block: run_block(block.group(), folder, environ), text)
        pictures = {}
        for link in PICTURE.findall(text):
            drawn = Path(folder, Path(link).name)
            if drawn.exists():
                pictures[page.parent / link] = drawn.read_text()
        return Page(shown, pictures)


def run_block(block, folder, environ):
    """The commands of `block`, each followed by what it prints."""
    return "".join(
        f"$ {command}\n{output_of(command, folder, environ)}" for command in COMMAND.findall(block)
    )


def output_of(command, folder, environ):
    """What `command` prints in `folder`, however slow it is, and its exit status if not 0."""
    done = subprocess.run(
        ["bash", "-c", command],
        cwd=folder,
        env=environ,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=60,
        check=False,
    )
    output = PROGRESS.sub("", ELAPSED.sub("0.1 s", done.stdout.decode()))
    output = WALL.sub("wall clock 0.16 s, 650 output tokens/s", output)
    if output and not output.endswith("\n"):
        output += "\n"
    return output + (f"(exit status {done.returncode})\n" if done.returncode else "")


if __name__ == "__main__":
    blocks = WITH_TORCH if "torch" in sys.argv else PLAIN
    for page in PAGES:
        shown = regenerated(page, INSTALLED, blocks)
        page.write_text(shown.text)
        for path, picture in shown.pictures.items():
            path.write_text(picture)
