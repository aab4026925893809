"""`batchdecode plan`: the smallest setting, or the largest rate, that keeps a promise."""

from dataclasses import dataclass, field
from typing import Any, Literal

from .. import shared
from ..help import OUTPUT, REQUIRED, flag, option
from ..options import as_command
from .compare import axes_group, jobs_option, prices_option, quiet_option, run_config_option

SEARCH = "Search"
EXAMPLES = (
    "batchdecode plan requests.jsonl --slo ttft=0.5,tpot=50ms --profile our.yaml",
    (
        "batchdecode plan requests.jsonl --slo ttft=1 --search rate --batch 32 --kv-blocks 2587 "
        "--profile rtx4090_llama3.1-8b"
    ),
)
NOTES = ("Exit codes: 0 found; 1 no setting meets the SLO; 2 bad input or usage.",)


@dataclass(frozen=True, kw_only=True)
class PlanOptions(shared.ModelOptions):
    """The options of `batchdecode plan`; docs/plan.md says what each one means.

    axes: name of an axis -> its value as a text.  search: what is to be found.
    """

    input: str | None = shared.requests()
    slo: list[str] = shared.slos(SEARCH, default=REQUIRED)
    goodput: float = option(
        SEARCH,
        "Share of the requests that must meet the SLO.",
        "SHARE",
        default=0.99,
        min=0,
        max=1,
        is_common=True,
    )
    search: Literal["batch", "kv-blocks", "max-batch-tokens", "replicas", "rate"] = option(
        SEARCH,
        "The smallest batch, kv-blocks, max-batch-tokens or replicas, or the largest rate.",
        "WHAT",
        default="batch",
        is_common=True,
    )
    axes: dict[str, str] = axes_group(as_lists=False).field
    prices: str | None = prices_option()
    json: bool = flag(OUTPUT, "Print it as JSON.", is_common=True)
    plot: str | None = shared.plot()
    force: bool = shared.force()
    jobs: int | None = jobs_option()
    model: str = shared.model()
    chat: bool = shared.chat()
    checkpoint: dict[str, Any] = shared.checkpoint_group().field
    defaults: dict[str, Any] = shared.defaults_group().field
    grammar_timeout: float = shared.grammar_timeout()
    config: str | None = run_config_option()
    color: shared.Color = shared.color()
    quiet: bool = quiet_option()
    preset: set[str] = field(default_factory=set)


def plan(options: PlanOptions) -> int:
    """Find the smallest setting, or the largest rate, that meets an SLO; say what binds."""
    from ..planning import plan_requests, until_stopped  # noqa: PLC0415 - heavy

    return until_stopped(lambda: plan_requests(options))


COMMAND = as_command(plan, PlanOptions, examples=EXAMPLES, notes=NOTES)
