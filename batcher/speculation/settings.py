"""What a person says of speculation; all there is to know of a setting stands beside it."""

from typing import Annotated, Literal

from msgspec import Meta, Struct

from batcher.fields import FieldFacts, fields_of
from batcher.request import MAX_DRAFT_TOKENS

AUTO: Literal["auto"] = "auto"
DEFAULT_DRAFT_TOKENS = 4
Acceptance = Literal["exact", "leviathan"]


class SpeculationSetting(FieldFacts, frozen=True):
    """What is to be known of a setting beside its type, its default and what it does.

    metavar: what stands for its value.  allowed: what that may be, where not all texts are.
    """

    metavar: str
    allowed: str = ""


class SpeculationSettings(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Where drafts come from, how many, and which are accepted; docs/speculation.md says more."""

    draft: Annotated[
        str,
        "what proposes tokens that are verified in one step: `ngram[:N]`, `lookup:FILE`, `suffix`, "
        "`layers:K`, or a model as `--model` takes it",
        SpeculationSetting(metavar="WHAT"),
    ]
    draft_tokens: Annotated[
        Annotated[int, Meta(ge=1, le=MAX_DRAFT_TOKENS)] | Literal["auto"] | None,
        "drafts of a row in a step, or `auto`: as many as pay; by default 4, or all of the tree",
        SpeculationSetting(
            metavar="N", allowed=f"an integer from 1 to {MAX_DRAFT_TOKENS}, or auto"
        ),
    ] = None
    draft_tree: Annotated[
        str | None,
        "drafts are a tree of at most W branches, each of at most D tokens, instead of a line",
        SpeculationSetting(metavar="WxD"),
    ] = None
    acceptance: Annotated[
        Acceptance,
        "which drafts are accepted: `exact` changes no token; `leviathan` takes more of what a "
        "model draws and keeps the distribution, but which tokens come depends on drafts",
        SpeculationSetting(metavar="RULE", allowed="exact or leviathan"),
    ] = "exact"


SPECULATION_SETTINGS: dict[str, SpeculationSetting] = fields_of(SpeculationSettings)
