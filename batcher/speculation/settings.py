"""Settings of speculation, what `--draft` and `--draft-tree` name, and what drafts gain.

All there is to know of a setting stands beside it: options, their help and checks follow.
"""

import re
from typing import Annotated, Literal, NamedTuple

from msgspec import Meta, Struct

from batcher.errors import BatchdecodeError
from batcher.fields import FieldFacts, fields_of
from batcher.hf.settings import is_hf
from batcher.request import MAX_DRAFT_TOKENS
from batcher.transformer.config import is_checkpoint

AUTO: Literal["auto"] = "auto"
DEFAULT_DRAFT_TOKENS = 4
DEFAULT_NGRAM, MAX_NGRAM = 4, 16
FORMS = f"ngram, ngram:N (N from 1 to {MAX_NGRAM}), simulated:RATE or a MODEL"
_FORMER = ("suffix", "lookup", "layers")  # not the names of modules
Acceptance = Literal["exact", "leviathan"]


class SpeculationSetting(FieldFacts, frozen=True):
    """Facts of a setting besides its type, default and help.

    metavar: what stands for its value.  allowed: what that may be, where not all texts are.
    """

    metavar: str
    allowed: str = ""


class SpeculationSettings(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Source, number, shape and acceptance of drafts; see docs/speculation.md."""

    draft: Annotated[
        str,
        "source of drafts, tokens that the model verifies in one step: `ngram[:N]`, or a model as "
        "`--model` takes it",
        SpeculationSetting(metavar="DRAFT"),
    ]
    draft_tokens: Annotated[
        Annotated[int, Meta(ge=1, le=MAX_DRAFT_TOKENS)] | Literal["auto"] | None,
        "drafts per row and step, or `auto`: as many as pay; by default 4, or all of the tree",
        SpeculationSetting(
            metavar="N", allowed=f"an integer from 1 to {MAX_DRAFT_TOKENS}, or auto"
        ),
    ] = None
    draft_tree: Annotated[
        str | None,
        "tree of drafts instead of a line: at most W branches, each of at most D tokens",
        SpeculationSetting(metavar="WxD"),
    ] = None
    acceptance: Annotated[
        Acceptance,
        "acceptance rule: `exact` changes no token; `leviathan` accepts more of what a model "
        "draws and keeps the distribution, but tokens then depend on the drafts",
        SpeculationSetting(metavar="RULE", allowed="exact or leviathan"),
    ] = "exact"


SPECULATION_SETTINGS: dict[str, SpeculationSetting] = fields_of(SpeculationSettings)


class NgramDraft(NamedTuple):
    """Copies what followed the last n-gram of a row, of at most `max_length` tokens."""

    max_length: int = DEFAULT_NGRAM


class ModelDraft(NamedTuple):
    """Asks another model; name: as --model takes it."""

    name: str


def parse_draft(text: str) -> NgramDraft | ModelDraft:
    """Return the source of drafts that `text` names, in one of FORMS.

    Raises:
        BatchdecodeError: `text` names no source.
    """
    kind, colon, rest = text.partition(":")
    if kind == "ngram":
        is_number = rest.isascii() and rest.isdigit() and len(rest) <= len(str(MAX_NGRAM))
        if colon and not (is_number and 1 <= int(rest) <= MAX_NGRAM):
            raise BatchdecodeError(
                f"--draft {text}: expected the length of the longest n-gram, 1 to {MAX_NGRAM}"
            )
        return NgramDraft(int(rest)) if colon else NgramDraft()
    is_dotted = all(map(str.isidentifier, rest.split("."))) and kind not in _FORMER
    if kind and (kind == "simulated" or is_checkpoint(text) or is_hf(text) or is_dotted):
        return ModelDraft(text)
    from difflib import get_close_matches  # noqa: PLC0415 - for a mistake only

    near = get_close_matches(kind, ["ngram", "simulated", "smollm2"], n=1)
    hint = f"; did you mean {near[0]}?" if near else ""
    raise BatchdecodeError(f"--draft {text!r} is not a source of drafts{hint} (use {FORMS})")


class TreeShape(NamedTuple):
    """At most so many branches of drafts, each of at most `depth` tokens."""

    num_branches: int
    depth: int

    @property
    def size(self) -> int:
        return self.num_branches * self.depth


LINE = TreeShape(1, MAX_DRAFT_TOKENS)


def parse_tree(text: str) -> TreeShape:
    """Return the shape that `text` names as WxD.

    Raises:
        BatchdecodeError: it names none, or one of more drafts than a row may be given.
    """
    found = re.fullmatch(r"([1-9]\d?)x([1-9]\d?)", text, re.ASCII)
    shape = TreeShape(*map(int, found.groups())) if found else LINE
    if not found or shape.size > MAX_DRAFT_TOKENS:
        raise BatchdecodeError(
            f"--draft-tree {text}: expected WxD, such as 3x4: W branches of D drafts each, at "
            f"most {MAX_DRAFT_TOKENS} together"
        )
    return shape


# What drafts gain if all are accepted equally often (Leviathan et al. 2023, section 3).


def expected_tokens(acceptance: float, num_drafts: int) -> float:
    """Return the tokens per step on average: (1 - a^(k+1)) / (1 - a).

    acceptance: how likely a draft is accepted if all before it are, 0 to 1.
    """
    if acceptance == 1:
        return num_drafts + 1.0
    return float(1 - acceptance ** (num_drafts + 1)) / (1 - acceptance)


def expected_speedup(acceptance: float, num_drafts: int, draft_cost: float) -> float:
    """Return the speedup over a run without drafts if verifying is free (theorem 3.8).

    draft_cost: what a draft costs, as a share of a step.
    """
    return expected_tokens(acceptance, num_drafts) / (1 + draft_cost * num_drafts)


def simple_return(acceptance: float, num_drafts: float, draft_cost: float) -> float:
    """Return the accepted drafts per cost, as if none depended on those before it.

    num_drafts: per step, on average.
    """
    return num_drafts * acceptance / (1 + draft_cost)
