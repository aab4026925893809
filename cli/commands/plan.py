"""`batchdecode compare` and `plan`: a workload under many settings, and the setting it needs."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from batcher.errors import BatchdecodeError
from batcher.settings import SETTINGS

from ..command import (
    DECODING,
    INPUT,
    OUTPUT,
    REQUIRED,
    SCHEDULING,
    SPECULATION,
    TIME,
    OptionGroup,
    command,
    flag,
    option,
)
from ..config import OF_REQUESTS
from ..options import (
    Color,
    ModelOptions,
    color_option,
    config_option,
    defaults_group,
    force_flag,
    grammar_timeout_option,
    help_of,
    input_argument,
    slos_option,
)

FLEET, SEARCH = "Fleet", "Search"
REPORT_INTERVAL = "Interval at which replicas report their queues to the router.  [default: 0.1]"
_DRAFTS = {
    "draft_tokens": ("Drafts per row and step, or none; needs --draft-acceptance.", "N"),
    "draft_acceptance": ("Probability that a draft is accepted if all before it are.", "SHARE"),
    "draft_cost": ("Cost of a draft, as a share of a step.  [default: 0]", "SHARE"),
}


def prices_option() -> Any:
    text = "YAML file with prices and power of GPUs, for dollars and energy per output token."
    return option(FLEET, text, "FILE")


def _axes(*, as_lists: bool) -> OptionGroup:
    """Return the options of a deployment, by name of batcher.planning.deployments.AXES.

    as_lists: whether help shows lists of values.
    """

    def kind(panel: str, text: str, value: str, *flags: str, **more: Any) -> Any:
        return str | None, option(panel, text, value + ",..." * as_lists, *flags, **more)

    kinds = {"batch": kind(DECODING, "Number of slots.  [default: 8]", "N", "-b", common=True)}
    for name, setting in SETTINGS.items():
        more = ", or none" if setting.takes_none else ""
        text = help_of(setting, more, default=setting.shown(setting.default))
        is_common = setting.is_common
        kinds[name] = kind(SCHEDULING, text, setting.metavar, common=is_common, complete=name)
    text = (
        "Duration of a step: a profile, FILE.yaml, constant:SECONDS or roofline:MODEL:GPU.  "
        "[default: constant:1]"
    )
    kinds["profile"] = kind(TIME, text, "NAME", common=True, complete="profile")
    text = "Number of replicas with these settings.  [default: 1]"
    kinds["replicas"] = kind(FLEET, text, "N", common=True)
    text = (
        "Routing of requests to replicas: round-robin, random, random-two, least-loaded, "
        "least-tokens, shortest-queue, prefix-affinity, session or module:function.  "
        "[default: round-robin]"
    )
    kinds["router"] = kind(FLEET, text, "NAME", common=True, complete="router")
    text = "YAML file with groups of replicas, each with its own settings."
    kinds["fleet"] = kind(FLEET, text, "FILE")
    kinds["report_interval"] = kind(FLEET, REPORT_INTERVAL, "SECONDS")
    kinds |= {name: kind(SPECULATION, *text) for name, text in _DRAFTS.items()}
    return OptionGroup(kinds, dict)


@dataclass(frozen=True, kw_only=True)
class SimulationOptions(ModelOptions):
    """Shared options; preset: names of those set by the environment or --config."""

    input: str | None = input_argument()
    prices: str | None = prices_option()
    plot: str | None = option(
        OUTPUT, "Plot throughput against latency: FILE.svg or FILE.png.", "FILE"
    )
    force: bool = force_flag()
    jobs: int | None = option(
        OUTPUT, "Number of processes.  [default: one per core]", "N", "-j", min=1, max=4096
    )
    defaults: dict[str, Any] = defaults_group().as_field()
    grammar_timeout: float = grammar_timeout_option()
    config: str | None = config_option(
        INPUT,
        "defaults for --batch, --model and rows, and settings of models",
        OF_REQUESTS - set(_DRAFTS),
    )
    color: Color = color_option()
    quiet: bool = flag(OUTPUT, "Print no progress and no notes.", "-q")
    preset: set[str] = field(default_factory=set)


@dataclass(frozen=True, kw_only=True)
class CompareOptions(SimulationOptions):
    """The options of `batchdecode compare`; axes: name -> values as a text with commas."""

    axes: Mapping[str, str] = _axes(as_lists=True).as_field()
    slo: list[str] | None = slos_option(OUTPUT)
    knee: float | None = option(
        OUTPUT,
        "Minimum gain from doubling the batch; a smaller gain marks the knee.  [default: 0.1]",
        "SHARE",
        min=0,
        max=1,
    )
    sort: str | None = option(
        OUTPUT,
        "Sort by this column, best first: throughput, requests, goodput, preemptions, "
        "hits, or ttft, tpot, e2e, queue with -p50 or -p99.",
        "COLUMN",
        common=True,
        complete="column",
    )
    json: bool = flag(OUTPUT, "Print a JSON line per combination.", common=True)
    csv: bool = flag(OUTPUT, "Print the table as CSV.")


@dataclass(frozen=True, kw_only=True)
class PlanOptions(SimulationOptions):
    """The options of `batchdecode plan`; axes: name -> value as a text."""

    slo: list[str] = slos_option(SEARCH, default=REQUIRED)
    goodput: float = option(
        SEARCH,
        "Share of the requests that must meet the SLO.",
        "SHARE",
        min=0,
        max=1,
        common=True,
        default=0.99,
    )
    search: Literal["batch", "kv-blocks", "max-batch-tokens", "replicas", "rate"] = option(
        SEARCH,
        "Find the smallest batch, kv-blocks, max-batch-tokens or replicas, or the largest rate.",
        "QUANTITY",
        common=True,
        default="batch",
    )
    axes: Mapping[str, str] = _axes(as_lists=False).as_field()
    json: bool = flag(OUTPUT, "Print the plan as JSON.", common=True)


def compare(options: CompareOptions) -> int:
    """Simulate every combination of settings and compare them in a table."""
    if options.json and options.csv:
        raise BatchdecodeError("--json cannot be used with --csv")
    from ..planning import compare_requests, until_stopped  # noqa: PLC0415 - heavy

    return until_stopped(lambda: compare_requests(options))


def plan(options: PlanOptions) -> int:
    """Find the smallest setting, or the largest rate, that meets an SLO."""
    from ..planning import plan_requests, until_stopped  # noqa: PLC0415 - heavy

    return until_stopped(lambda: plan_requests(options))


COMMANDS = {
    "compare": command(
        compare,
        CompareOptions,
        examples=(
            "batchdecode compare requests.jsonl --batch 8,16,32 --policy fcfs,sjf",
            (
                "batchdecode compare requests.jsonl --batch 16,32 --kv-blocks 1000,2587 \\\n"
                "    --profile rtx4090_llama3.1-8b --slo ttft=0.5,tpot=50ms --sort goodput"
            ),
        ),
    ),
    "plan": command(
        plan,
        PlanOptions,
        examples=(
            "batchdecode plan requests.jsonl --slo ttft=0.5,tpot=50ms --profile our.yaml",
            (
                "batchdecode plan requests.jsonl --slo ttft=1 --search rate --batch 32 \\\n"
                "    --kv-blocks 2587 --profile rtx4090_llama3.1-8b"
            ),
        ),
        notes=("Exit codes: 0 found; 1 no setting meets the SLO; 2 bad input or usage.",),
    ),
}
