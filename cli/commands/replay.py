"""`batchdecode replay`: simulates the requests of a real run, and shows how far off that is."""

from dataclasses import dataclass

from batcher.speculation.settings import SPECULATION_SETTINGS

from .. import shared
from ..help import DECODING, INPUT, OUTPUT, argument, flag, option
from ..options import MAX_BATCH, TIME, SchedulingOptions, as_command, scheduling_group
from .compare import FLEET, prices_option

# It computes no token, a log has neither priorities nor deadlines, and its profile is no clock.
NOT_TAKEN = ("check", "preempt_for", "profile", "kv_memory", *SPECULATION_SETTINGS)

MAX_REPLICAS = 2**16  # both as batcher.planning.deployments has them, which is heavy
MIN_REPORT_INTERVAL, MAX_REPORT_INTERVAL = 1e-6, 1e6

EXAMPLES = (
    "batchdecode replay log.jsonl --profile rtx4090_llama3.1-8b --meta meta.json",
    (
        "batchdecode replay log.jsonl --profile rtx4090_llama3.1-8b --batch 256 --kv-blocks 2587 "
        "--max-batch-tokens 2048"
    ),
)


@dataclass(frozen=True, kw_only=True)
class ReplayOptions:
    """The options of `batchdecode replay`; docs/replay.md says what each one means."""

    input: str | None = argument(
        "Requests of a vLLM run with their times: a file or - for stdin.", "LOG"
    )
    profile: str | None = option(
        TIME,
        "How long a step took: a profile, FILE.yaml, constant:SECONDS or roofline:MODEL:GPU.  "
        "[required]",
        "NAME",
        is_common=True,
        offers="profile",
    )
    meta: str | None = shared.meta(INPUT)
    batch: int | None = option(
        DECODING,
        "Requests that were run at once at most.",
        "N",
        "-b",
        min=1,
        max=MAX_BATCH,
        is_common=True,
    )
    scheduling: SchedulingOptions = scheduling_group(without=NOT_TAKEN).field
    replicas: int | None = option(
        FLEET,
        "Engines that the requests were spread over.  [default: those that LOG names, else 1]",
        "N",
        min=1,
        max=MAX_REPLICAS,
        is_common=True,
    )
    router: str | None = option(
        FLEET,
        "Which replica gets a request, as compare has it.  "
        "[default: as LOG says, else round-robin]",
        "NAME",
        is_common=True,
        offers="router",
    )
    report_interval: float | None = option(
        FLEET,
        "How far apart replicas tell the router their queues.  [default: 0.1]",
        "SECONDS",
        min=MIN_REPORT_INTERVAL,
        max=MAX_REPORT_INTERVAL,
    )
    prices: str | None = prices_option()
    json: bool = flag(OUTPUT, "The same for programs.", is_common=True)


def replay(options: ReplayOptions) -> None:
    """Simulate the requests of a real run, and show how far off that is."""
    from ..simulation.replay import show_replay  # noqa: PLC0415 - numpy

    show_replay(options)


COMMAND = as_command(replay, ReplayOptions, examples=EXAMPLES)
