"""`batchdecode plan`: the smallest setting, or the largest rate, that keeps a promise."""

from typing import Annotated, Any, Literal

import typer
from msgspec import Struct

from batcher.settings import GRAMMAR_TIMEOUT

from ..help import OUTPUT, option
from ..options import (
    ColorOption,
    GrammarTimeoutOption,
    InputArgument,
    ModelOption,
    SeedOption,
    as_command,
    refuse_nan,
)
from .compare import QuietOption, RunConfigOption, axes_group

SEARCH = "Search"
EXAMPLES = """\b
Examples:
  batchdecode plan requests.jsonl --slo ttft=0.5,tpot=50ms --profile our.yaml
  batchdecode plan requests.jsonl --slo ttft=1 --search rate --batch 32 \\
    --kv-blocks 2587 --profile rtx4090_llama3.1-8b

\b
Exit codes: 0 found; 1 no setting meets the SLO; 2 bad input or usage.
"""


class PlanOptions(Struct, frozen=True, kw_only=True):
    """The options of `batchdecode plan`; docs/what-if.md says what each one means.

    axes: name of an axis -> its value as a text.  search: what is to be found.
    """

    input: InputArgument = None
    slo: Annotated[
        str, option(SEARCH, "What is promised: ttft=0.5,tpot=50ms,e2e=10,queue=1.", "LIMITS")
    ]
    goodput: Annotated[
        float,
        option(
            SEARCH,
            "Share of the requests that must meet the SLO.",
            "SHARE",
            min=0,
            max=1,
            callback=refuse_nan,
        ),
    ] = 0.99
    search: Annotated[
        Literal["batch", "kv-blocks", "max-batch-tokens", "rate"],
        option(
            SEARCH,
            "The smallest batch, kv-blocks or max-batch-tokens, or the largest rate.",
            "WHAT",
        ),
    ] = "batch"
    axes: Annotated[dict[str, str], axes_group(as_lists=False)]
    json: Annotated[bool, option(OUTPUT, "Print it as JSON.")] = False
    model: ModelOption = "simulated"
    seed: SeedOption = None
    grammar_timeout: GrammarTimeoutOption = GRAMMAR_TIMEOUT
    config: RunConfigOption = None
    color: ColorOption = "auto"
    quiet: QuietOption = False
    model_settings: dict[str, Any] = {}
    llm_settings: dict[str, Any] = {}
    from_file: set[str] = set()


def plan(options: PlanOptions) -> None:
    """Find the smallest setting, or the largest rate, that meets an SLO; say what binds."""
    from ..whatif.plan import plan_requests  # noqa: PLC0415 - heavy
    from ..whatif.reading import until_stopped  # noqa: PLC0415 - as above

    raise typer.Exit(until_stopped(lambda: plan_requests(options)))


COMMAND = as_command(plan, PlanOptions, epilog=EXAMPLES)
