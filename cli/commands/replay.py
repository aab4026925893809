"""`batchdecode replay`: simulate the requests of a real run, and show the error."""

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from msgspec import Struct

from batcher.errors import BatchdecodeError
from batcher.planning.deployments import AXES, Deployment, check_router, show_value
from batcher.planning.measure import cost_of, price_of, read_prices
from batcher.planning.replay import (
    NAMES,
    AsLogged,
    Comparison,
    Limit,
    RequestsOfRun,
    read_requests,
    read_run_meta,
)
from batcher.planning.replay import replay as replay_log
from batcher.planning.routers import DEFAULT_REPORT_INTERVAL, DEFAULT_ROUTER, Router, router_of
from batcher.planning.simulator import ReplicaSettings
from batcher.scheduling.scheduler import check_effects
from batcher.settings import DEFAULT_SCHEDULING, MAX_KV_BLOCKS, SchedulingSettings
from batcher.speculation.settings import SPECULATION_SETTINGS
from batcher.timing.profiles import setup_of, step_time_of
from batcher.trace.logs import LoggedRequest

from ..command import DECODING, INPUT, OUTPUT, TIME, argument, command, flag, option
from ..errors import reason_of
from ..options import MAX_BATCH, SchedulingOptions, meta_option, scheduling_group
from ..run.files import print_json, print_text
from ..run.input import open_input
from ..run.problems import say
from ..screen.terminal import aligned, counted, printable
from ..views.plan_tables import cost_text
from .plan import FLEET, REPORT_INTERVAL, prices_option

# No token is computed, a log has neither priorities nor deadlines, and --profile is of its own.
NOT_TAKEN = ("check", "preempt_for", "profile", "kv_memory", *SPECULATION_SETTINGS)
MAX_REPLICAS = 2**16  # as batcher.planning.deployments has it

EXAMPLES = (
    "batchdecode replay log.jsonl --profile rtx4090_llama3.1-8b --meta meta.json",
    (
        "batchdecode replay log.jsonl --profile rtx4090_llama3.1-8b --batch 256 \\\n"
        "    --kv-blocks 2587 --max-batch-tokens 2048"
    ),
)


@dataclass(frozen=True, kw_only=True)
class ReplayOptions:
    """The options of `batchdecode replay`; docs/guide/replay.md explains them."""

    input: str | None = argument(
        "Requests of a vLLM run with their times: a file or - for stdin.", "LOG"
    )
    profile: str | None = option(
        TIME,
        "Duration of a step: a profile, FILE.yaml, constant:SECONDS or roofline:MODEL:GPU.  "
        "[required]",
        "NAME",
        common=True,
        complete="profile",
    )
    meta: str | None = meta_option(INPUT)
    batch: int | None = option(
        DECODING,
        "Maximum number of requests that ran at once.",
        "N",
        "-b",
        min=1,
        max=MAX_BATCH,
        common=True,
    )
    scheduling: SchedulingOptions = scheduling_group(without=NOT_TAKEN).as_field()
    replicas: int | None = option(
        FLEET,
        "Number of engines that served the requests.  [default: as in LOG, else 1]",
        "N",
        min=1,
        max=MAX_REPLICAS,
        common=True,
    )
    router: str | None = option(
        FLEET,
        "Routing to the replicas, as for compare.  [default: as in LOG, else round-robin]",
        "NAME",
        common=True,
        complete="router",
    )
    report_interval: float | None = option(FLEET, REPORT_INTERVAL, "SECONDS", min=1e-6, max=1e6)
    prices: str | None = prices_option()
    json: bool = flag(OUTPUT, "Print the result as JSON.", common=True)


# The defaults of vLLM for a server on a GPU with less than 70 GiB.
GUESSED_BATCH, GUESSED_BUDGET = 256, 2048
META_SUFFIX, MAX_META = "meta.json", 2**24  # the end of its name, and its most bytes
_ORDER = ("batch", "max_batch_tokens", "kv_blocks", "block_size", "prefix_cache", "capacity")
_OF_BLOCKS = ("block_size", "prefix_cache", "capacity")  # without effect if blocks are unlimited
_HEADS = ("", "real", "simulated", "error")


class UsedLimit(Struct, frozen=True):
    """A setting, its value, its source, and whether it is a guess."""

    name: str
    value: Any
    origin: str
    is_guessed: bool = False

    @property
    def shown(self) -> str:
        return show_value(AXES[self.name], self.value)


def replay(options: ReplayOptions) -> None:
    """Simulate the requests of a real run, and show the error."""
    if options.profile is None:
        raise BatchdecodeError(
            "--profile is required: the step times of the real run; `batchdecode profiles` lists "
            "known ones"
        )
    step_time = step_time_of(options.profile)
    meta_name, meta = _read_meta(options)
    with open_input(options.input, nullcontext) as source:
        run = read_requests(source.lines(), source.name)
        say(source.take_notes())
    log = run.requests
    num_replicas, router = _fleet_of(options, log)
    prices = None if options.prices is None else read_prices(options.prices)
    if prices is not None:
        price_of(options.profile, prices)
    used, settings = _limits(options, meta_name, meta, run)
    guessed = [f"{AXES[each.name].option} {each.shown}" for each in used if each.is_guessed]
    if guessed:
        say(
            f"warning: the limits of the run are unknown: {', '.join(guessed)} are guesses and may "
            "cause the errors; set the options, or --meta FILE\n"
        )
    [batch] = (each.value for each in used if each.name == "batch")
    engine = ReplicaSettings(num_slots=batch, scheduling=settings, step_time=step_time)
    interval = options.report_interval or DEFAULT_REPORT_INTERVAL
    outcome = replay_log(log, engine, num_replicas, router, interval)
    result, totals = outcome.result, outcome.result.totals
    num_tokens = sum(request.output_toks for request in log)
    cost = None
    if prices is not None:
        cost = cost_of([(options.profile, result)], prices, result.makespan, num_tokens)
    if options.json:
        print_json(
            {
                "requests": len(log),
                "output_tokens": num_tokens,
                "steps": totals.num_steps,
                "preemptions": totals.num_preemptions,
                "recomputed_tokens": totals.recomputed_tokens,
                "binding": totals.binding_shares,
                "numbers": outcome.comparisons,
                "limits": used,
                "cost": cost,
            }
        )
        return
    title = (
        f"{printable(source.name)}: {counted(len(log), 'request')}, {num_tokens:,} output tokens"
    )
    if len(result.replicas) > 1:
        title += f", on {counted(len(result.replicas), 'replica')}"
    limits = [(AXES[each.name].option, each.shown, printable(each.origin)) for each in used]
    names, values = (max(len(row[column]) for row in limits) for column in (0, 1))
    steps = (
        f"simulated in {counted(totals.num_steps, 'step')}, with "
        f"{counted(totals.num_preemptions, 'preemption')} and {totals.recomputed_tokens:,} tokens "
        "computed again"
    )
    shares = [f"{limit} {share * 100:.0f} %" for limit, share in totals.binding_shares.items()]
    lines = [title, ""]
    lines += [f"{name:<{names}}  {value:>{values}}  {origin}" for name, value, origin in limits]
    rows = [_HEADS, *(_row(comparison) for comparison in outcome.comparisons)]
    lines += ["", *aligned(rows, range(1, len(_HEADS))), "", steps, f"binding: {', '.join(shares)}"]
    if cost is not None:
        lines.append(f"cost: {', '.join(cost_text(cost))}")
    print_text("".join(f"{line.rstrip()}\n" for line in lines))


COMMANDS = {"replay": command(replay, ReplayOptions, examples=EXAMPLES)}


def _read_meta(options: ReplayOptions) -> tuple[str, Mapping[str, Limit]]:
    """Return the name of the file of limits and its limits, or ("", {}).

    Without --meta it is X_meta.json in the folder of the log whose X is the longest prefix of the
    log's name.
    """
    path = None if options.meta is None else Path(options.meta)
    if path is None:
        log = Path(options.input or "-")
        found = [
            other
            for other in log.parent.glob(f"*{META_SUFFIX}")
            if log.name.startswith(other.name.removesuffix(META_SUFFIX).rstrip("_.-"))
        ]
        path = max(found, key=lambda other: len(other.name), default=None)
        if path is None or log.name == "-":
            return "", {}
    try:
        with path.open("rb") as file:
            content = file.read(MAX_META + 1)
    except (OSError, ValueError) as error:
        raise BatchdecodeError(f"cannot read {path}: {reason_of(error)}") from None
    if len(content) > MAX_META:
        raise BatchdecodeError(f"{path} is larger than {MAX_META >> 20} MiB")
    meta = read_run_meta(content, str(path))
    if options.meta is not None and not meta.limits:
        raise BatchdecodeError(f"{path} has no limits; expected any of {', '.join(NAMES)}")
    for field in meta.not_simulated:
        say(f"{printable(f'{path}: {field} is not simulated')}\n")
    return path.name, meta.limits


def _limits(
    options: ReplayOptions, meta_name: str, meta: Mapping[str, Limit], run: RequestsOfRun
) -> tuple[list[UsedLimit], SchedulingSettings]:
    """Return the limits of the simulation: options, else those of the file, else guesses."""
    batch, profile = options.batch, options.profile or ""
    given = options.scheduling.values | ({} if batch is None else {"batch": batch})
    used = {
        name: UsedLimit(name, limit.value, f"{limit.place} in {meta_name}")
        for name, limit in meta.items()
    }
    if run.batch is not None and not run.is_of_client:
        used["batch"] = UsedLimit("batch", run.batch, "the slots of the traced run")
    used |= {name: UsedLimit(name, value, AXES[name].option) for name, value in given.items()}

    def guess(name: str, value: Any, why: str) -> None:
        used.setdefault(name, UsedLimit(name, value, f"guessed: {why}", is_guessed=True))

    if run.batch is not None:
        guess("batch", run.batch, "the requests that the client had in flight")
    guess("batch", GUESSED_BATCH, "the default of vLLM")
    guess("max_batch_tokens", max(GUESSED_BUDGET, used["batch"].value), "the default of vLLM")
    for name in _OF_BLOCKS:
        value = getattr(DEFAULT_SCHEDULING, name)
        used.setdefault(name, UsedLimit(name, value, "default, of vLLM as well"))
    room = setup_of(profile).kv_room
    if room is None or not room.num_tokens:
        guess("kv_blocks", None, "unknown")
    else:
        num_blocks = max(room.num_blocks(used["block_size"].value), 1)
        known = "an engine" if room.is_reported else "by its data sheet, the GPU"
        had = f"{known} of {profile} had room for {room.num_tokens:,} tokens, less the null block"
        guess("kv_blocks", min(num_blocks, MAX_KV_BLOCKS), had)
    fields = SchedulingSettings.__struct_fields__
    settings = SchedulingSettings(**{name: used[name].value for name in used if name in fields})
    check_effects(given, [settings])
    names = [*_ORDER, *(name for name in used if name not in _ORDER)]
    if not settings.is_paged:
        names = [name for name in names if name not in _OF_BLOCKS]
    return [used[name] for name in names], settings


def _fleet_of(options: ReplayOptions, log: list[LoggedRequest]) -> tuple[int, Router | None]:
    """Return the number of replicas and their router, None for the replicas of the log."""
    num_logged = AsLogged(log).num_replicas
    if log[0].replica is not None and options.router is None:
        for name in ("replicas", "report_interval"):
            if getattr(options, name) is not None:
                raise BatchdecodeError(
                    f"--{name.replace('_', '-')} has no effect: the log names the replica of each "
                    f"request ({num_logged} in all); set --router to route them again"
                )
        return num_logged, None
    num_replicas, name = options.replicas or num_logged, options.router or DEFAULT_ROUTER
    given = [each for each in ("router", "report_interval") if getattr(options, each) is not None]
    check_router(given, [Deployment(replicas=num_replicas, router=name)])
    return num_replicas, router_of(name)


def _row(comparison: Comparison) -> tuple[str, ...]:
    error = "" if comparison.error is None else f"{comparison.error:+.1%}".replace("%", " %")
    values = comparison.real, comparison.simulated
    if comparison.name.startswith("tpot"):
        return comparison.name, *(f"{value * 1000:.2f} ms" for value in values), error
    return comparison.name, *(f"{value:.3f} s" for value in values), error
