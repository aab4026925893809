"""One word for one thing: banned words stand nowhere in code, help and docs.

docs/glossary.md has the words there are.  Names are read part by part: `num_leaders` is two words.
"""

import re
import tokenize
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[1]
CODE = [path for folder in ("batcher", "cli") for path in sorted((ROOT / folder).rglob("*.py"))]
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
]

# What is not said -> what is said instead.  In text, and in names whose parts are put apart.
BANNED = {
    r"leaders?|companions?": "the first sequence of a group, its others",
    r"borders?": "boundary; of segments, their ends",
    r"chas(e|es|ed|ing)": "prefill, partial prefill",
    r"(lets?|letting) ((nobody|anybody|others|it|them) )?in": "admit",
    r"gets? in though": "is admitted",
    r"(held|holds?|holding) (\w+ )?back( by)?": "blocked (admission); kept back (text)",
    r"boarding|entrance|endings|roster|journal": "inputs, prepare batch, outputs, recorder",
    r"(a|the|each|every|one|its|all|of|these) stays?( of| in|,|\.)": "slot span, segment",
    r"visits?|(?<!of\s)courses?": "slot span, request timeline",
    r"state machines?|machine tables?|machine readers?": "stop automaton, stop matcher",
    r"token histor(y|ies)": "output token ids",
    r"step loads?": "batch stats",
    r"in the flights?|flights": "in flight",
    r"places? (of \w+ )?in the input": "input index",
    r"known results?": "replayed results, results of an earlier run",
    r"workload rows?|rows of (a|the) workload": "entries of a workload",
    r"named blocks?|block names?|names? of blocks": "block hash, cached block",
    r"who has gone|what that means for (them|it)": "say who and what",
}

PATTERNS = {pattern.replace(" ", r"\s+"): instead for pattern, instead in BANNED.items()}
ANY_BANNED = re.compile(rf"\b(?:{'|'.join(PATTERNS)})(?!\w)")

# Names that are not used: (the parts of a name, where) -> the word for it.  What is an English word
# in the text is banned as the name of something that has another one.
BANNED_IN_NAMES = {
    (r"stays?|visits?", ""): "span, segment",
    (r"holds?", ""): "blocked; kept",
    (r"quiet", "batcher/"): "fast_forward",
    (r"loads?", ""): "stats",
    (r"nodes?", ""): "block hash, parent",
    (r"named", "batcher/scheduling/"): "hashed, cached",
    (r"ranks?", "batcher/scheduling/"): "eviction priority; key of a policy",
    (r"plain", ""): "only for requests, their sequences and rows",
    (r"begun|chasing", "batcher/scheduling/"): "prefill_finished, prefilling",
    (r"roster|journal", ""): "open requests, recorder",
}
BANNED_NAMES = {
    "Target": "ModelCapabilities",
    "StepLoad": "BatchStats",
    "TokenHistory": "OutputTokens",
    "num_computed": "num_computed_tokens",
    "num_hashed": "num_cached_blocks",
    "num_named": "num_cached_blocks",
    "WorkloadRow": "WorkloadEntry",
}

# Names, or whole files, in which such a word has its other sense.
ALLOWED = {
    "NamedTuple": "of typing",
    "holds": "a slot that has a row in a batch; a range that has a value",
    "holds_names": "a JSON object",
    "loads": "of json",
    "load": "read; also of yaml",
    "load_model": "read",
    "load_state_dict": "of torch",
    "load_transformer": "read",
    "load_hf": "read",
    "load_profile": "read",
    "load_gpu": "read",
    "load_model_shape": "read",
    "try_to_load_from_cache": "of the library of the Hub",
    "MAX_LOAD": "of a hash table",
    "is_plain": "of a request; in cli/ of what is shown or read",
    "takes_plain": "rows",
    "PLAIN_FIELDS": "of a request",
    "PLAIN_VALUES": "of a request",
    "NUM_PLAIN": "of a request",
    "PLAIN": "text without colors",
    "plain_line": "--live plain",
    "PLAIN_INTERVAL": "--live plain",
    "plain_yaml": "YAML without tags and aliases",
    "plain_events": "YAML without tags and aliases",
}
ALLOWED_IN = {  # part of a name, folder or file -> its sense
    ("nodes?", "batcher/decoding/"): "of tries",
    ("nodes?", "batcher/models/"): "of trees of drafts",
    ("nodes?", "batcher/timing/catalog.py"): "of YAML",
    ("nodes?", "cli/config.py"): "of YAML",
    ("nodes?", "cli/run/workers/"): "machines, as Ray calls them",
    ("plain", "batcher/requests/schema.py"): "words without Markdown",
    ("plain", "batcher/planning/workload.py"): "a value that asks for nothing",
}


NO_CODE = re.compile(r'""".*?"""|"(?:[^"\\\n]|\\.)*"|#[^\n]*', re.DOTALL)


def parts_of(text: str) -> str:
    """The text in lower case, with the parts of names put apart."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])|_+", " ", text).lower()


class Use(NamedTuple):
    """A banned word where it stands."""

    path: str
    line: int
    said: str
    instead: str


def banned_in(text: str) -> Iterator[tuple[int, str, str]]:
    """Yield the banned words of a text: where each stands, what it is, and what is said instead."""
    text = parts_of(text)
    if not ANY_BANNED.search(text):  # one look instead of one for each of them
        return
    for pattern, instead in PATTERNS.items():
        for found in re.finditer(rf"\b(?:{pattern})(?!\w)", text):
            yield found.start(), found[0], instead


def words_in(path: Path) -> Iterator[Use]:
    """Yield the banned words of a file, in whatever it says."""
    where, text = path.relative_to(ROOT).as_posix(), path.read_text()
    for start, said, instead in banned_in(text):
        yield Use(where, parts_of(text).count("\n", 0, start) + 1, said, instead)


def names_in(path: Path) -> Iterator[Use]:
    """Yield the names of a file that have a banned word for a part."""
    where = path.relative_to(ROOT).as_posix()
    roughly = re.findall(r"\b[a-zA-Z_]\w*", NO_CODE.sub("", path.read_text()))
    if not any(instead_of(name.strip("_"), where) for name in set(roughly)):
        return  # without the time that it takes to read it as Python does
    names: dict[str, int] = {}  # each with the first line that it is in
    with path.open("rb") as file:
        for token in tokenize.tokenize(file.readline):
            if token.type == tokenize.NAME:
                names.setdefault(token.string.strip("_"), token.start[0])
    for name, line in names.items():
        for instead in instead_of(name, where):
            yield Use(where, line, name, instead)


def instead_of(name: str, where: str) -> list[str]:
    """Return what is said instead of a name in a file; nothing if it may be said."""
    if name in ALLOWED:
        return []
    found = [BANNED_NAMES[name]] if name in BANNED_NAMES else []
    for pattern, folder in patterns_of(name):
        is_allowed = any(
            other == pattern and where.startswith(place) for other, place in ALLOWED_IN
        )
        if where.startswith(folder) and not is_allowed:
            found.append(BANNED_IN_NAMES[pattern, folder])
    return found


@cache
def patterns_of(name: str) -> list[tuple[str, str]]:
    """Return the keys of BANNED_IN_NAMES that a part of a name has, wherever it is."""
    parts = parts_of(name).split()
    return [key for key in BANNED_IN_NAMES if any(re.fullmatch(key[0], part) for part in parts)]


def test_no_file_uses_a_banned_word() -> None:
    assert [use for path in (*CODE, *PAGES) for use in words_in(path)] == []


def test_no_name_has_a_banned_word_in_it() -> None:
    assert [use for path in CODE for use in names_in(path)] == []


def test_no_two_classes_have_one_name() -> None:
    files: dict[str, list[str]] = {}
    for path in CODE:
        for name in re.findall(r"(?m)^class ([A-Z]\w*)", path.read_text()):
            files.setdefault(name, []).append(str(path.relative_to(ROOT)))
    assert {name: where for name, where in files.items() if len(where) > 1} == {}


def test_what_is_allowed_is_there() -> None:
    names = {name for path in CODE for name in re.findall(r"\w+", path.read_text())}
    for name in ALLOWED:
        assert name in names or f"_{name}" in names, name
    for _, place in ALLOWED_IN:
        assert (ROOT / place).exists(), place


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("class RowLeaders:", "leaders"),
        ("the leader's slot", "leader"),
        ("nobody is let\nin", "let\nin"),
        ("it lets in nobody", "lets in"),
        ("_num_companions = 1", "companions"),
        ("in order of their place in the input", "place in the input"),
        ("text is kept back", None),
        ("what held it back", "held it back"),
    ],
)
def test_words_are_found_in_names_and_in_text(text: str, said: str | None) -> None:
    assert [found for _, found, _ in banned_in(text)] == ([] if said is None else [said])
