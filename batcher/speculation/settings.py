"""Settings of speculation, the forms of `--draft` and `--draft-tree`, and the gain of drafts."""

import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Literal, NamedTuple, Protocol

from msgspec import Meta, Struct

from batcher.errors import BatchdecodeError
from batcher.fields import FieldFacts, fields_of
from batcher.request import MAX_DRAFT_TOKENS
from batcher.tokens import Tokens
from batcher.transformer.config import is_checkpoint, is_hf

# Something cheap proposes the next tokens of a row, and the model verifies them in one step. Drafts
# decide how many tokens a step gives, never which (Leviathan et al. 2023; Chen et al. 2023); but
# see SpeculationSettings.acceptance.


class Proposal(Struct, frozen=True, gc=False):
    """The drafts of a row, numbered from 1; number 0 is its last token.

    tokens: of each draft. parents: for each the smaller number of the draft it follows; () for a
    line, in which each follows the one before.
    """

    tokens: list[int]
    parents: tuple[int, ...] = ()

    def __len__(self) -> int:
        return len(self.tokens)

    def child(self, number: int, token: int) -> int:
        """Return the draft that follows `number` and is `token`, or 0."""
        if not self.parents:
            is_next = self.tokens[number : number + 1] == [token]
            return number + 1 if is_next else 0
        for draft, (parent, own) in enumerate(zip(self.parents, self.tokens, strict=True), 1):
            if parent == number and own == token:
                return draft
        return 0

    def only(self, drafts: Sequence[int]) -> "Proposal":
        """Return these drafts alone, ascending; the parent of each is among them."""
        numbers = {0: 0} | {draft: number for number, draft in enumerate(drafts, 1)}
        parents = self.parents or range(len(self.tokens))
        return proposal_of(
            [self.tokens[draft - 1] for draft in drafts],
            [numbers[parents[draft - 1]] for draft in drafts],
        )


def proposal_of(tokens: list[int], parents: Sequence[int]) -> Proposal:
    """Return drafts with these parents; a tree without branches is a line."""
    is_line = all(draft == parent for draft, parent in enumerate(parents))
    return Proposal(tokens) if is_line else Proposal(tokens, tuple(parents))


def merged(branches: Sequence[Sequence[int]], number: int) -> Proposal:
    """Return branches as a tree with shared beginnings, of at most `number` drafts.

    The first drafts of all branches come first, then the second ones.
    """
    tokens, parents = list[int](), list[int]()
    drafts: dict[tuple[int, int], int] = {}  # (parent, token) -> draft
    ends = [0] * len(branches)
    for depth in range(max(map(len, branches), default=0)):
        for place, branch in enumerate(branches):
            if depth >= len(branch):
                continue
            follows = ends[place], branch[depth]
            if follows not in drafts:
                if len(tokens) == number:
                    return proposal_of(tokens, parents)
                tokens.append(branch[depth])
                parents.append(ends[place])
                drafts[follows] = len(tokens)
            ends[place] = drafts[follows]
    return proposal_of(tokens, parents)


class Drafter(Protocol):
    """Proposes the next tokens of the rows that speculate, by slot."""

    def open(self, slot: int, tokens: Tokens) -> None:
        """Begin a row with `tokens`: its prompt, and its output before a preemption."""

    def extend(self, given: Mapping[int, Sequence[int]]) -> None:
        """Append the tokens of one step, by slot."""

    def propose(self, num_wanted: Mapping[int, int]) -> dict[int, Proposal]:
        """Return drafts, by slot: as many as are wanted of each, fewer, or none.

        num_wanted: slot -> how many, at least one. A tree of drafts is at most as deep as its
        branches with equal shares, rounded up.
        """

    def close(self, slot: int, *, has_ended: bool) -> None:
        """Forget the row in `slot`; has_ended: finished, not preempted."""


class CheckedDrafter:
    """A user's drafter; its proposals are validated."""

    def __init__(self, drafter: Drafter, *, takes_trees: bool) -> None:
        self._drafter, self._takes_trees = drafter, takes_trees
        self.open, self.extend, self.close = drafter.open, drafter.extend, drafter.close

    def propose(self, num_wanted: Mapping[int, int]) -> dict[int, Proposal]:
        """Return the proposals, cut to the wanted numbers."""
        proposed = self._drafter.propose(num_wanted)
        if not self._takes_trees and any(proposal.parents for proposal in proposed.values()):
            raise BatchdecodeError("the drafts form a tree, but the model does not verify trees")
        kept = {}
        for slot, proposal in proposed.items():
            tokens, parents, number = proposal.tokens, proposal.parents, num_wanted[slot]
            if parents and len(parents) != len(tokens):
                raise ValueError(f"{len(tokens)} drafts, and parents of {len(parents)}")
            own = [*map(int, parents[:number])] or range(number)
            for draft, parent in enumerate(own, 1):
                if not 0 <= parent < draft:
                    raise ValueError(
                        f"draft {draft} follows draft {parent}, which is not before it"
                    )
            kept[slot] = proposal_of([*map(int, tokens[:number])], own)
        return kept


AUTO: Literal["auto"] = "auto"
DEFAULT_DRAFT_TOKENS = 4
DEFAULT_NGRAM, MAX_NGRAM = 4, 16
FORMS = f"ngram, ngram:N (N from 1 to {MAX_NGRAM}), simulated:RATE or a MODEL"
_FORMER = ("suffix", "lookup", "layers")  # removed sources, which are not module names
Acceptance = Literal["exact", "leviathan"]


class SpeculationSetting(FieldFacts, frozen=True):
    """Facts of a setting besides its type, default and help."""

    metavar: str
    allowed: str = ""


class SpeculationSettings(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Source, number, shape and acceptance of drafts; see docs/guide/speculation.md."""

    draft: Annotated[
        str,
        "source of draft tokens, which the model verifies in one step: `ngram[:N]`, or a model "
        "named as for `--model`",
        SpeculationSetting(metavar="DRAFT"),
    ]
    draft_tokens: Annotated[
        Annotated[int, Meta(ge=1, le=MAX_DRAFT_TOKENS)] | Literal["auto"] | None,
        "drafts per row and step, or `auto` (as many as pay off); by default 4, or the whole tree",
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
        "acceptance rule: `exact` changes no token; `leviathan` accepts more sampled drafts and "
        "keeps the distribution, but tokens then depend on the drafts",
        SpeculationSetting(metavar="RULE", allowed="exact or leviathan"),
    ] = "exact"


SPECULATION_SETTINGS: dict[str, SpeculationSetting] = fields_of(SpeculationSettings)


def parse_draft(text: str) -> int | str:
    """Return the longest n-gram of `text`, or the name of its model; `text` has one of FORMS."""
    kind, colon, rest = text.partition(":")
    if kind == "ngram":
        is_number = rest.isascii() and rest.isdigit() and len(rest) <= len(str(MAX_NGRAM))
        if colon and not (is_number and 1 <= int(rest) <= MAX_NGRAM):
            raise BatchdecodeError(
                f"--draft {text}: expected the length of the longest n-gram, 1 to {MAX_NGRAM}"
            )
        return int(rest) if colon else DEFAULT_NGRAM
    is_dotted = all(map(str.isidentifier, rest.split("."))) and kind not in _FORMER
    if kind and (kind == "simulated" or is_checkpoint(text) or is_hf(text) or is_dotted):
        return text
    from difflib import get_close_matches  # noqa: PLC0415 - for a mistake only

    near = get_close_matches(kind, ["ngram", "simulated", "smollm2"], n=1)
    hint = f"; did you mean {near[0]}?" if near else ""
    raise BatchdecodeError(f"--draft {text!r} is not a draft source{hint} (use {FORMS})")


class TreeShape(NamedTuple):
    """At most `num_branches` branches of drafts, each of at most `depth` tokens."""

    num_branches: int
    depth: int

    @property
    def size(self) -> int:
        return self.num_branches * self.depth


LINE = TreeShape(1, MAX_DRAFT_TOKENS)


def parse_tree(text: str) -> TreeShape:
    """Return the shape of `text`, WxD."""
    found = re.fullmatch(r"([1-9]\d?)x([1-9]\d?)", text, re.ASCII)
    shape = TreeShape(*map(int, found.groups())) if found else LINE
    if not found or shape.size > MAX_DRAFT_TOKENS:
        raise BatchdecodeError(
            f"--draft-tree {text}: expected WxD, such as 3x4: W branches of D drafts each, at "
            f"most {MAX_DRAFT_TOKENS} together"
        )
    return shape


# The gain of drafts that are all equally likely to be accepted (Leviathan et al. 2023, section 3).


def expected_tokens(acceptance: float, num_drafts: int) -> float:
    """Return the tokens per step on average: (1 - a^(k+1)) / (1 - a).

    acceptance: how likely a draft is accepted if all before it are, 0 to 1.
    """
    if acceptance == 1:
        return num_drafts + 1.0
    return float(1 - acceptance ** (num_drafts + 1)) / (1 - acceptance)


def expected_speedup(acceptance: float, num_drafts: int, draft_cost: float) -> float:
    """Return the speedup over a run without drafts if verifying is free (theorem 3.8)."""
    return expected_tokens(acceptance, num_drafts) / (1 + draft_cost * num_drafts)


def simple_return(acceptance: float, num_drafts: float, draft_cost: float) -> float:
    """Return the accepted drafts per cost, as if each draft were independent.

    num_drafts: per step, on average.
    """
    return num_drafts * acceptance / (1 + draft_cost)
