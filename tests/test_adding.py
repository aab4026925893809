"""What it takes to add a field, a setting or a policy: each test adds one to a copy of the code."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
RUN = "from cli.main import main; main()"


class Copy:
    """A copy of the code that can be changed and run."""

    def __init__(self, folder):
        self.folder = folder
        for name in ("batcher", "cli"):
            shutil.copytree(
                ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__")
            )

    def insert(self, path, before, lines):
        file = self.folder / path
        text = file.read_text()
        assert text.count(before) == 1, before
        file.write_text(text.replace(before, lines + before))

    def python(self, code, *arguments, status=0):
        """What `code` prints, stdout and stderr together."""
        done = subprocess.run(
            [sys.executable, "-c", code, *arguments],
            cwd=self.folder,
            env={"PATH": os.environ["PATH"], "PYTHONPATH": str(self.folder), "COLUMNS": "80"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            timeout=60,
            check=False,
        )
        assert done.returncode == status, done.stdout.decode()
        return done.stdout.decode()


@pytest.fixture
def copy(tmp_path):
    return Copy(tmp_path)


FIELD = """\
    margin: Annotated[
        UpTo100,
        "draws from tokens whose logit is nearer to the largest",
        Field(excludes=_SAMPLED),
    ] = 100.0
"""
SAMPLER = """\
    scores[scores < scores.max(axis=-1, keepdims=True) - params.margin] = -np.inf
"""
USE_OF_FIELD = """
import json
from batcher import RequestError, SimulatedModel, decode, generate
from batcher.requests.schema import make_schema
from batcher.requests.validation import find_problems
from batcher.requests.validation import ModelCapabilities
from batcher.request import Request

def tokens(**fields):
    [result] = decode([{"prompt": "The", "max_tokens": 9, "seed": 3, **fields}])
    return result.tokens

def told(**fields):
    try:
        tokens(**fields)
    except RequestError as error:
        return str(error)

class LLM:
    def get_stop_token_id(self): return 5
    def next_token_logits(self, prev_token_ids): return [0.0, 0.3, 0, 0, 0, 0.2]

TOKENS_ONLY = ModelCapabilities(gives_logits=False)
line = make_schema("request")["$defs"]["RequestLine"]["properties"]["margin"]
print(json.dumps({
    "works": tokens(temperature=9.0, margin=1e-9) == tokens() != tokens(temperature=9.0),
    "generate": set(generate([1], LLM(), margin=0.2, max_tokens=40)) <= {1, 5},
    "range": told(margin=101), "type": told(margin="1"), "misspelt": told(margn=1),
    "excluded": told(margin=1, num_beams=2), "schema": line,
    "tokens only": find_problems(Request(prompt="", margin=1), TOKENS_ONLY),
}))
"""


@pytest.mark.heavy
def test_a_field_that_chooses_tokens_is_added_in_the_table_and_in_the_sampler(copy):
    copy.insert("batcher/request.py", "    typical_p: Annotated[", FIELD)
    copy.insert("batcher/decoding/sampling.py", "    if params.mirostat == 1:", SAMPLER)
    found = json.loads(copy.python(USE_OF_FIELD))
    assert found["works"]
    assert found["generate"]
    assert "`margin` must be a number from 0 to 100, not 101" in found["range"]
    assert "`margin` must be a number from 0 to 100" in found["type"]
    assert "did you mean `margin`?" in found["misspelt"]
    assert "`margin` cannot go with `num_beams`: beams are not sampled" in found["excluded"]
    assert found["schema"]["maximum"] == 100
    assert found["schema"]["type"] == ["number", "null"]
    assert "nearer to the largest" in found["schema"]["description"]
    assert found["tokens only"] == []


SETTING = """\
    max_admissions: Annotated[
        int | None,
        "prompts that a step begins with at most",
        Setting("N", "admissions", smallest=1),
    ] = None
"""
SCHEDULER = """\
            if len(output.admitted) == self.settings.max_admissions:
                break
"""
USE_OF_SETTING = """
from batcher import BatchdecodeError, Engine, SimulatedModel
from batcher.settings import SchedulingSettings
try:
    Engine(SimulatedModel(), settings=SchedulingSettings(max_admissions=0))
except BatchdecodeError as error:
    print(error)
"""


@pytest.mark.heavy
def test_a_setting_is_added_in_the_table_and_where_it_is_used(copy):
    copy.insert("batcher/settings.py", "    prefill_order: Annotated[", SETTING)
    copy.insert(
        "batcher/scheduling/scheduler.py",
        "            if output.budget < first.num_slots:",
        SCHEDULER,
    )
    write_requests(copy.folder)
    assert copy.python(USE_OF_SETTING) == "max_admissions must be at least 1, not 0\n"
    run = ("run", "in.jsonl", "-b", "4", "-q", "--trace", "trace")
    shown = copy.python(RUN, *run, "--max-admissions", "1")
    assert [json.loads(line)["steps"]["admitted"] for line in sorted(shown.splitlines())] == [
        0,
        1,
        2,
        3,
    ]
    first = json.loads((copy.folder / "trace").read_text().splitlines()[0])
    assert first["scheduling"] == {"max_admissions": 1}
    (copy.folder / "c.yaml").write_text("max-admissions: 1\n")
    assert copy.python(RUN, *run, "--config", "c.yaml") == shown
    assert "--max-admissions must be an integer from 1 to" in copy.python(
        RUN, *run, "--max-admissions", "0", status=2
    )
    compared = copy.python(RUN, "compare", "in.jsonl", "--max-admissions", "1,none", "-q")
    assert compared.splitlines()[1].startswith("admissions")
    assert "--max-admissions N" in copy.python(RUN, "plan", "--help-all")


def write_requests(folder):
    lines = [json.dumps({"prompt": "abc", "max_tokens": 4, "ignore_eos": True})] * 4
    (folder / "in.jsonl").write_text("\n".join(lines))
