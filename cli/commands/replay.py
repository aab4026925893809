"""`batchdecode replay`: simulates the requests of a real run, and shows the error."""

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from msgspec import Struct

from batcher.errors import BatchdecodeError
from batcher.planning.deployments import AXES, Deployment, check_router, show_value
from batcher.planning.fleet import ReplicaSettings
from batcher.planning.prices import Cost, cost_of, price_of, read_prices
from batcher.planning.replay import AsLogged, Comparison, Replay
from batcher.planning.replay import replay as replay_log
from batcher.planning.request_log import (
    NAMES,
    Limit,
    LoggedRequest,
    RequestsOfRun,
    read_requests,
    read_run_meta,
)
from batcher.planning.routers import DEFAULT_REPORT_INTERVAL, DEFAULT_ROUTER, Router, router_of
from batcher.scheduling.scheduler import check_effects
from batcher.settings import DEFAULT_SCHEDULING, MAX_KV_BLOCKS, SchedulingSettings
from batcher.speculation.settings import SPECULATION_SETTINGS
from batcher.timing.profiles import kv_room_of, step_time_of

from ..command import DECODING, INPUT, OUTPUT, TIME, argument, command, flag, option
from ..errors import reason_of
from ..options import MAX_BATCH, SchedulingOptions, meta_option, scheduling_group
from ..run.files import print_json, print_text
from ..run.input import numbered, open_input
from ..run.problems import say
from ..screen.terminal import aligned, counted, printable
from ..views.plan_tables import cost_text
from .plan import FLEET, REPORT_INTERVAL, Prices

# It computes no token, a log has neither priorities nor deadlines, and its profile is no clock.
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
    """The options of `batchdecode replay`; docs/replay.md explains them."""

    input: Annotated[
        str | None,
        argument("Requests of a vLLM run with their times: a file or - for stdin.", "LOG"),
    ] = None
    profile: Annotated[
        str | None,
        option(
            TIME,
            "Duration of a step: a profile, FILE.yaml, constant:SECONDS or roofline:MODEL:GPU.  "
            "[required]",
            "NAME",
            common=True,
            complete="profile",
        ),
    ] = None
    meta: Annotated[str | None, meta_option(INPUT)] = None
    batch: Annotated[
        int | None,
        option(
            DECODING,
            "Maximum number of requests that ran at once.",
            "N",
            "-b",
            min=1,
            max=MAX_BATCH,
            common=True,
        ),
    ] = None
    scheduling: Annotated[SchedulingOptions, scheduling_group(without=NOT_TAKEN)]
    replicas: Annotated[
        int | None,
        option(
            FLEET,
            "Engines that served the requests.  [default: those in LOG, else 1]",
            "N",
            min=1,
            max=MAX_REPLICAS,
            common=True,
        ),
    ] = None
    router: Annotated[
        str | None,
        option(
            FLEET,
            "Routing to the replicas, as for compare.  [default: as in LOG, else round-robin]",
            "NAME",
            common=True,
            complete="router",
        ),
    ] = None
    report_interval: Annotated[
        float | None,
        option(FLEET, REPORT_INTERVAL, "SECONDS", min=1e-6, max=1e6),
    ] = None
    prices: Prices = None
    json: Annotated[bool, flag(OUTPUT, "Print the result as JSON.", common=True)] = False


def replay(options: ReplayOptions) -> None:
    """Simulate the requests of a real run, and show the error."""
    show_replay(options)


COMMANDS = {"replay": command(replay, ReplayOptions, examples=EXAMPLES)}

# -- the limits of the run: an option goes before the file beside the log, that before a guess -----

SUFFIX = "meta.json"
MAX_SIZE = 2**24  # bytes


class MetaFile(NamedTuple):
    """The name of the file, and what it says; nothing if there is none."""

    name: str
    limits: Mapping[str, Limit]


def read_meta_file(given: str | None, log: str | None) -> MetaFile:
    """Return what the `given` file says of the run of a log, or if None the one beside the log.

    Raises:
        BatchdecodeError: it cannot be read, or is not what it should be.
    """
    path = Path(given) if given is not None else _beside(log)
    if path is None:
        return MetaFile("", {})
    meta = read_run_meta(_content(path), str(path))
    if given is not None and not meta.limits:
        raise BatchdecodeError(f"{path} says nothing of limits; it would, under {', '.join(NAMES)}")
    for field in meta.not_simulated:
        say(f"{printable(f'{path}: {field} is not simulated')}\n")
    return MetaFile(path.name, meta.limits)


def _beside(log: str | None) -> Path | None:
    """Return the file beside `log` whose name, without its end, the log's begins with.

    Of several it is the one with the longest name, None if there is none.
    """
    if log is None or log == "-":
        return None
    path = Path(log)
    found = [
        other
        for other in path.parent.glob(f"*{SUFFIX}")
        if path.name.startswith(other.name.removesuffix(SUFFIX).rstrip("_.-"))
    ]
    return max(found, key=lambda other: len(other.name), default=None)


def _content(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            content = file.read(MAX_SIZE + 1)
    except (OSError, ValueError) as error:
        raise BatchdecodeError(f"cannot read {path}: {reason_of(error)}") from None
    if len(content) > MAX_SIZE:
        raise BatchdecodeError(
            f"{path} is larger than {MAX_SIZE >> 20} MiB: no file about a run is"
        )
    return content


# Those of vLLM for a server on a GPU with less than 70 GiB.
GUESSED_BATCH, GUESSED_BUDGET = 256, 2048
DEFAULT = "default, of vLLM as well"
_ORDER = ("batch", "max_batch_tokens", "kv_blocks", "block_size", "prefix_cache", "capacity")
_OF_BLOCKS = ("block_size", "prefix_cache", "capacity")  # of no effect without any


class UsedLimit(Struct, frozen=True):
    """A setting, its value, who says so, and whether that is nobody."""

    name: str
    value: Any
    origin: str
    is_guessed: bool = False

    @property
    def shown(self) -> str:
        """The value as its option takes it."""
        return show_value(AXES[self.name], self.value)


class RunLimits(Struct, frozen=True):
    """How a run was limited; used: each setting that is given, or matters."""

    batch: int
    settings: SchedulingSettings
    used: list[UsedLimit]

    @property
    def guessed(self) -> list[UsedLimit]:
        """Those that nobody has said."""
        return [limit for limit in self.used if limit.is_guessed]


def limits_of_run(
    batch: int | None,
    scheduling: SchedulingOptions,
    profile: str,
    meta: MetaFile,
    log: RequestsOfRun,
) -> RunLimits:
    """Return the limits of the run of a log; batch, scheduling: what options say.

    Raises:
        BatchdecodeError: an option has no effect.
    """
    given = scheduling.values | ({} if batch is None else {"batch": batch})
    used = {
        name: UsedLimit(name, limit.value, f"{limit.place} in {meta.name}")
        for name, limit in meta.limits.items()
    }
    if log.batch is not None and not log.is_of_client:
        used["batch"] = UsedLimit("batch", log.batch, "the slots of the traced run")
    used |= {name: UsedLimit(name, value, AXES[name].option) for name, value in given.items()}
    if log.batch is not None:
        why = "guessed: as many as the client had in flight"
        used.setdefault("batch", UsedLimit("batch", log.batch, why, is_guessed=True))
    _guess(used, profile)
    known = SchedulingSettings.__struct_fields__
    settings = SchedulingSettings(
        **{name: limit.value for name, limit in used.items() if name in known}
    )
    check_effects(given, [settings])
    names = [*_ORDER, *(name for name in used if name not in _ORDER)]
    if not settings.is_paged:
        names = [name for name in names if name not in _OF_BLOCKS]
    return RunLimits(used["batch"].value, settings, [used[name] for name in names])


def warn_of_guesses(limits: RunLimits) -> None:
    """Say which limits are guesses, as nothing that is compared is worth more than they are."""
    if limits.guessed:
        names = ", ".join(f"{AXES[each.name].option} {each.shown}" for each in limits.guessed)
        say(
            f"warning: nobody says how the run was limited by {names}: these are guesses, and the "
            "errors may be theirs; give the options, or --meta FILE\n"
        )


def limits_table(limits: RunLimits) -> list[str]:
    """Return a line for each limit: its option, its value, and who says so."""
    rows = [(AXES[each.name].option, each.shown, printable(each.origin)) for each in limits.used]
    names, values = (max(len(row[column]) for row in rows) for column in (0, 1))
    return [f"{name:<{names}}  {value:>{values}}  {origin}" for name, value, origin in rows]


def _guess(used: dict[str, UsedLimit], profile: str) -> None:
    """Add to what is `used` what nobody has said, but has to be something."""

    def guess(name: str, value: Any, why: str) -> None:
        used.setdefault(name, UsedLimit(name, value, f"guessed: {why}", is_guessed=True))

    def keep_default(name: str) -> None:
        value = getattr(DEFAULT_SCHEDULING, name)
        used.setdefault(name, UsedLimit(name, value, DEFAULT))

    guess("batch", GUESSED_BATCH, "the default of vLLM")
    guess("max_batch_tokens", max(GUESSED_BUDGET, used["batch"].value), "the default of vLLM")
    keep_default("block_size")
    room = kv_room_of(profile)
    if room is None or not room.num_tokens:
        guess("kv_blocks", None, "no limit is known")
    else:
        num_blocks = max(room.num_blocks(used["block_size"].value), 1)
        known = "an engine" if room.is_reported else "by its data sheet, the GPU"
        had = f"{known} of {profile} had room for {room.num_tokens:,} tokens, less the null block"
        guess("kv_blocks", min(num_blocks, MAX_KV_BLOCKS), had)
    keep_default("prefix_cache")
    keep_default("capacity")


_HEADS = ("", "real", "simulated", "error")
_MILLISECONDS = 1000


def show_replay(options: ReplayOptions) -> None:
    """Carry out `batchdecode replay`.

    Raises:
        BatchdecodeError: the log cannot be used, or an option cannot be.
        WriteError: stdout takes no more.
    """
    if options.profile is None:
        raise BatchdecodeError(
            "--profile is needed: how long a step of the real run took; "
            "batchdecode profiles lists what is known"
        )
    step_time = step_time_of(options.profile)
    meta = read_meta_file(options.meta, options.input)
    with open_input(options.input, nullcontext) as source:
        run = read_requests(numbered(source.lines()), source.name)
        say(source.take_notes())
    log = run.requests
    num_replicas, router = _fleet_of(options, log)
    prices = None if options.prices is None else read_prices(options.prices)
    if prices is not None:
        price_of(options.profile, prices)
    limits = limits_of_run(options.batch, options.scheduling, options.profile, meta, run)
    warn_of_guesses(limits)
    engine = ReplicaSettings(
        num_slots=limits.batch, scheduling=limits.settings, step_time=step_time
    )
    interval = options.report_interval or DEFAULT_REPORT_INTERVAL
    outcome = replay_log(log, engine, num_replicas, router, interval)
    cost = None
    if prices is not None:
        result, num_tokens = outcome.result, _num_tokens(log)
        cost = cost_of([(options.profile, result)], prices, result.makespan, num_tokens)
    if options.json:
        print_json(_record(outcome, log, limits, cost))
    else:
        print_text(_table(outcome, log, limits, source.name, cost))


def _fleet_of(options: ReplayOptions, log: list[LoggedRequest]) -> tuple[int, Router | None]:
    """Return how many replicas there are, and what routes requests to them; None: the log does.

    Raises:
        BatchdecodeError: there is no such router, or an option has no effect.
    """
    num_logged = AsLogged(log).num_replicas
    if log[0].replica is not None and options.router is None:
        for name in ("replicas", "report_interval"):
            if getattr(options, name) is not None:
                raise BatchdecodeError(
                    f"--{name.replace('_', '-')} has no effect: the log says which of "
                    f"{counted(num_logged, 'replica')} had a request; give a --router to route anew"
                )
        return num_logged, None
    num_replicas, name = options.replicas or num_logged, options.router or DEFAULT_ROUTER
    given = [each for each in ("router", "report_interval") if getattr(options, each) is not None]
    check_router(given, [Deployment(replicas=num_replicas, router=name)])
    return num_replicas, router_of(name)


def _num_tokens(log: list[LoggedRequest]) -> int:
    return sum(request.output_toks for request in log)


def _record(
    outcome: Replay, log: list[LoggedRequest], limits: RunLimits, cost: Cost | None
) -> dict[str, Any]:
    totals = outcome.result.totals
    return {
        "requests": len(log),
        "output_tokens": _num_tokens(log),
        "steps": totals.num_steps,
        "preemptions": totals.num_preemptions,
        "recomputed_tokens": totals.recomputed_tokens,
        "binding": totals.binding_shares,
        "numbers": outcome.comparisons,
        "limits": limits.used,
        "cost": cost,
    }


def _table(
    outcome: Replay, log: list[LoggedRequest], limits: RunLimits, name: str, cost: Cost | None
) -> str:
    """Return the limits and the numbers of both runs as people read them."""
    result, totals = outcome.result, outcome.result.totals
    rows = [_HEADS, *(_row(comparison) for comparison in outcome.comparisons)]
    title = f"{printable(name)}: {counted(len(log), 'request')}, {_num_tokens(log):,} output tokens"
    steps = (
        f"simulated in {counted(totals.num_steps, 'step')}, with "
        f"{counted(totals.num_preemptions, 'preemption')} and {totals.recomputed_tokens:,} tokens "
        "computed again"
    )
    shares = [f"{limit} {share * 100:.0f} %" for limit, share in totals.binding_shares.items()]
    lines = [
        title,
        "",
        *limits_table(limits),
        "",
        *aligned(rows, range(1, len(_HEADS))),
        "",
        steps,
        f"binding: {', '.join(shares)}",
    ]
    if len(result.replicas) > 1:
        lines[0] += f", on {counted(len(result.replicas), 'replica')}"
    if cost is not None:
        lines.append(f"cost: {', '.join(cost_text(cost))}")
    return "".join(f"{line.rstrip()}\n" for line in lines)


def _row(comparison: Comparison) -> tuple[str, str, str, str]:
    error = "" if comparison.error is None else f"{comparison.error:+.1%}".replace("%", " %")
    shown = (_shown(comparison.name, value) for value in (comparison.real, comparison.simulated))
    return comparison.name, *shown, error  # type: ignore[return-value]  # there are two of them


def _shown(name: str, seconds: float) -> str:
    if name.startswith("tpot"):
        return f"{seconds * _MILLISECONDS:.2f} ms"
    return f"{seconds:.3f} s"
