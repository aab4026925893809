"""Plain words: help, errors and pages say it in the words of the field, to the reader."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
CODE = [path for folder in ("batcher", "cli") for path in sorted((ROOT / folder).rglob("*.py"))]
PLAIN = [ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
PAGES = sorted((ROOT / "docs").rglob("*.md"))

# What is not said -> what is said instead.
STIFF = {
    r"nobody|somebody|whoever|whatever|whom|who": "it, which; no request, any request",
    r"tells? of|told of": "reports, shows",
    r"takes? note": "records",
    r"takes? in": "accepts, reads",
    r"what there is|what becomes": "the thing itself",
    r"is none|are none": "is not a ...",
    r"no matter": "regardless of",
    r"goes? on": "continues, resumes",
    r"so many": "that many; the number",
    r"come to (an|their|its) end": "finish",
    r"gives? way": "is preempted",
    r"lets? go of": "releases, frees",
    r"has to do with": "concerns",
    r"beside(?! the point)": "in addition to, next to",
}
ANY_STIFF = re.compile(rf"\b({'|'.join(STIFF)})\b", re.IGNORECASE)

# How often code and pages still say them: lower it, never raise it.
STILL_IN_CODE = 1095
STILL_IN_PAGES = 12  # in outputs of the simulated model, and in prompts


@pytest.mark.parametrize("path", PLAIN, ids=lambda path: path.name)
def test_these_say_it_plainly(path):
    assert [found[0] for found in ANY_STIFF.finditer(path.read_text())] == []


def test_the_others_say_it_more_plainly_with_every_change():
    in_code = [found[0] for path in CODE for found in ANY_STIFF.finditer(path.read_text())]
    in_pages = [found[0] for path in PAGES for found in ANY_STIFF.finditer(path.read_text())]
    assert len(in_code) <= STILL_IN_CODE, STIFF
    assert len(in_pages) <= STILL_IN_PAGES, STIFF


def test_no_two_classes_have_one_name():
    files = {}
    for path in CODE:
        for name in re.findall(r"(?m)^class ([A-Z]\w*)", path.read_text()):
            files.setdefault(name, []).append(str(path.relative_to(ROOT)))
    assert {name: where for name, where in files.items() if len(where) > 1} == {}
