"""`batchdecode compare`: one workload under all combinations of settings, in one table."""

from dataclasses import dataclass, field
from functools import partial
from typing import Any

from batcher.errors import BatchdecodeError
from batcher.settings import SETTINGS, Setting

from .. import shared
from ..config import OF_REQUESTS
from ..help import DECODING, INPUT, OUTPUT, OptionGroup, flag, option
from ..options import SCHEDULING, SPECULATION, TIME, as_command, help_of

EXAMPLES = (
    "batchdecode compare requests.jsonl --batch 8,16,32 --policy fcfs,sjf",
    (
        "batchdecode compare requests.jsonl --batch 16,32 --kv-blocks 1000,2587 "
        "--profile rtx4090_llama3.1-8b --slo ttft=0.5,tpot=50ms --sort goodput"
    ),
)
_PROFILES = "A profile, FILE.yaml, constant:SECONDS or roofline:MODEL:GPU.  [default: constant:1]"
_DRAFTS = {
    "draft_tokens": ("Drafts of a row in a step, or none; it needs --draft-acceptance.", "N"),
    "draft_acceptance": ("How likely a draft is accepted if those before it are.", "SHARE"),
    "draft_cost": ("What a draft costs, as a share of a step.  [default: 0]", "SHARE"),
}
FLEET = "A fleet"
_SLOTS = "Slots of the batch.  [default: 8]"

quiet_option = partial(flag, OUTPUT, "No progress and no notes: only problems.", "-q")
prices_option = partial(
    option, FLEET, "What GPUs cost and draw: tells dollars and energy of output tokens.", "FILE"
)
jobs_option = partial(
    option, OUTPUT, "Processes.  [default: one for each core]", "N", "-j", min=1, max=4096
)
run_config_option = partial(
    shared.config,
    INPUT,
    "defaults for --batch, --model and those of rows, and the settings of models",
    OF_REQUESTS - set(_DRAFTS),
)


def axes_group(*, as_lists: bool) -> OptionGroup:
    """Return the options that say what a deployment is: those that were given, name -> text.

    They have the names of batcher.planning.deployments.AXES, which reads them.  as_lists: whether
    help shows lists of values.
    """

    def kind(panel: str, text: str, value: str, *flags: str, **facts: Any) -> tuple[Any, Any]:
        return str | None, option(panel, text, value + ",..." * as_lists, *flags, **facts)

    return OptionGroup(
        {
            "batch": kind(DECODING, _SLOTS, "N", "-b", is_common=True),
            **{
                name: kind(
                    SCHEDULING,
                    _text_of(setting),
                    setting.metavar,
                    is_common=setting.is_common,
                    offers=name,
                )
                for name, setting in SETTINGS.items()
            },
            "profile": kind(TIME, _PROFILES, "NAME", is_common=True, offers="profile"),
            "replicas": kind(
                FLEET, "Replicas, each with all of this.  [default: 1]", "N", is_common=True
            ),
            "router": kind(
                FLEET,
                "Which replica gets a request: round-robin, random, random-two, least-loaded, "
                "least-tokens, shortest-queue, prefix-affinity, session or module:function.  "
                "[default: round-robin]",
                "NAME",
                is_common=True,
                offers="router",
            ),
            "fleet": kind(
                FLEET, "A YAML file with groups of replicas, each with its own settings.", "FILE"
            ),
            "report_interval": kind(
                FLEET,
                "How far apart replicas tell the router their queues.  [default: 0.1]",
                "SECONDS",
            ),
            **{name: kind(SPECULATION, *text) for name, text in _DRAFTS.items()},
        },
        read=dict,
    )


def _text_of(setting: Setting) -> str:
    more = ", or none" if setting.takes_none else ""
    return help_of(setting, more, default=setting.shown(setting.default))


@dataclass(frozen=True, kw_only=True)
class CompareOptions(shared.ModelOptions):
    """The options of `batchdecode compare`; docs/compare.md says what each one means.

    axes: name of an axis -> its values as a text with commas.
    """

    input: str | None = shared.requests()
    axes: dict[str, str] = axes_group(as_lists=True).field
    slo: list[str] | None = shared.slos(OUTPUT)
    prices: str | None = prices_option()
    knee: float | None = option(
        OUTPUT,
        "What a doubled batch has to add not to be past the knee.  [default: 0.1]",
        "SHARE",
        min=0,
        max=1,
    )
    sort: str | None = option(
        OUTPUT,
        "Best first: throughput, requests, goodput, preemptions, hits, or ttft, tpot, "
        "e2e, queue with -p50 or -p99.",
        "COLUMN",
        is_common=True,
        offers="column",
    )
    json: bool = flag(OUTPUT, "A line of JSON for each cell.", is_common=True)
    csv: bool = flag(OUTPUT, "The table as CSV.")
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


def compare(options: CompareOptions) -> int:
    """Serve requests under all combinations of settings, by lengths alone; print one table."""
    if options.json and options.csv:
        raise BatchdecodeError("--json and --csv exclude each other: the table is one or the other")
    from ..planning import compare_requests, until_stopped  # noqa: PLC0415 - heavy

    return until_stopped(lambda: compare_requests(options))


COMMAND = as_command(compare, CompareOptions, examples=EXAMPLES)
