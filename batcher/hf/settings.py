"""How a person names a model of transformers, and says how it is computed.

Rule: all there is to know of a setting stands beside it; options, their help and checks follow.
"""

from typing import Annotated, Literal

from msgspec import Meta, Struct

from batcher.fields import fields_of
from batcher.transformer.config import (
    MAX_CONTEXT,
    TRANSFORMER_SETTINGS,
    SessionOverflow,
    TransformerSetting,
)

PREFIX = "hf:"
Dtype = Literal["auto", "float32", "bfloat16", "float16"]


class HFSettings(Struct, frozen=True, forbid_unknown_fields=True):
    """How a model of transformers is computed; docs/huggingface.md says more of each."""

    device: Annotated[
        str,
        "device of a model of `hf:`: `cpu`, `cuda` or `cuda:N`",
        TransformerSetting(metavar="DEVICE"),
    ] = "cpu"
    dtype: Annotated[
        Dtype,
        "data type of a model of `hf:`; `auto` is that of its weights",
        TransformerSetting(metavar="DTYPE"),
    ] = "auto"
    exact: Annotated[
        bool,
        "compute a model of `hf:` in tiles of tokens, so that no bit depends on the batch",
        TransformerSetting(),
    ] = False
    trust_remote_code: Annotated[
        bool,
        "run the Python code of a model of `hf:`; otherwise a model with code is refused",
        TransformerSetting(),
    ] = False
    max_context: Annotated[
        Annotated[int, Meta(ge=1, le=MAX_CONTEXT)] | None,
        "as of a checkpoint",
        TRANSFORMER_SETTINGS["max_context"],
    ] = None
    session_overflow: Annotated[
        SessionOverflow,
        "as of a checkpoint",
        TRANSFORMER_SETTINGS["session_overflow"],
    ] = "error"


HF_SETTINGS: dict[str, TransformerSetting] = fields_of(HFSettings)
LOADING_SETTINGS = {**HF_SETTINGS, **TRANSFORMER_SETTINGS}
"""Those of all models that are loaded from files: where a name is in both, it means the same."""


def is_hf(spec: str) -> bool:
    return spec.startswith(PREFIX)
