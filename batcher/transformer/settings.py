"""How a person names a checkpoint, and says how it is to be computed.

Rule: all there is to know of a setting stands beside it; options, their help and checks follow.
"""

from pathlib import Path
from typing import Annotated, Literal

from msgspec import Meta, Struct

from batcher.events import Layout
from batcher.fields import FieldFacts, fields_of

SMOLLM2 = "smollm2"  # for the demo: the file in a package
MAX_CONTEXT = 2**24  # tokens: more than any model has
MAX_RANKS = 64
WeightKind = Literal["fp32", "int8", "int8-channel"]
SessionOverflow = Literal["error", "drop-oldest"]


class TransformerSetting(FieldFacts, frozen=True):
    """What is to be known of a setting beside its type, its default and what it does.

    metavar: what stands for its value; None of one that has none.
    """

    metavar: str | None = None


class TransformerSettings(Struct, frozen=True, forbid_unknown_fields=True):
    """How a checkpoint is computed; docs/models.md says more of what each one costs."""

    weights: Annotated[
        WeightKind,
        "how weights are multiplied: `fp32`, or as integers with a scale for each matrix (`int8`) "
        "or output (`int8-channel`)",
        TransformerSetting(metavar="KIND"),
    ] = "fp32"
    fast_math: Annotated[
        bool,
        "leave products of floats to BLAS: faster in small batches, but the last bits depend on "
        "the batch",
        TransformerSetting(),
    ] = False
    low_memory: Annotated[
        bool,
        "keep weights packed, as `int8` or `int8-channel`, and unpack them for each product: a "
        "quarter of the memory, the same results, and slower",
        TransformerSetting(),
    ] = False
    max_context: Annotated[
        Annotated[int, Meta(ge=1, le=MAX_CONTEXT)] | None,
        "tokens that a row of a checkpoint may have, prompt and output; at most and by default as "
        "many as the checkpoint says",
        TransformerSetting(metavar="N"),
    ] = None
    session_overflow: Annotated[
        SessionOverflow,
        "what becomes of a conversation that would be longer: an `error`, or it loses its oldest "
        "turns, `drop-oldest`",
        TransformerSetting(metavar="KIND"),
    ] = "error"
    layout: Annotated[
        Layout,
        "whether the rows of a step are computed as long as they are (`ragged`), or all as long as "
        "the longest (`padded`), with padding that is thrown away",
        TransformerSetting(metavar="LAYOUT"),
    ] = "ragged"
    tensor_parallel: Annotated[
        Annotated[int, Meta(ge=1, le=MAX_RANKS)],
        "processes that a checkpoint is computed by, each of which holds its columns of the "
        "weights; 1 is this one",
        TransformerSetting(metavar="N"),
    ] = 1


TRANSFORMER_SETTINGS: dict[str, TransformerSetting] = fields_of(TransformerSettings)


def is_checkpoint(spec: str) -> bool:
    """Return whether a person means a checkpoint: a short name, a .gguf file or a folder."""
    return spec == SMOLLM2 or spec.endswith(".gguf") or Path(spec).is_dir()
