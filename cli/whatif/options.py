"""What `batchdecode compare` and `batchdecode plan` were asked for."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from batcher.metrics.slo import Slo
from batcher.settings import GRAMMAR_TIMEOUT
from batcher.whatif.ladder import Searched

from ..screen.terminal import ColorChoice


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestOptions:
    """Where the requests come from, and the model that reads them."""

    input: str | None = None
    model: str = "simulated"
    seed: int | None = None
    model_settings: dict[str, Any] = field(default_factory=dict)
    llm_settings: dict[str, Any] = field(default_factory=dict)
    grammar_timeout: float = GRAMMAR_TIMEOUT  # seconds of processor time
    color: ColorChoice = "auto"


@dataclass(frozen=True, slots=True, kw_only=True)
class CompareOptions:
    """The options of `batchdecode compare`; docs/what-if.md says what each one means.

    axes: name of an axis -> its values as a text with commas.  form: table, json or csv.
    """

    axes: Mapping[str, str]
    slo: Slo | None = None
    knee: float | None = None
    sort: str | None = None
    form: str = "table"
    jobs: int | None = None
    quiet: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanOptions:
    """The options of `batchdecode plan`; docs/what-if.md says what each one means.

    axes: name of an axis -> its value as a text.  search: what is to be found.
    """

    axes: Mapping[str, str]
    slo: Slo
    goodput: float = 0.99
    search: Searched = "batch"
    as_json: bool = False
    quiet: bool = False
