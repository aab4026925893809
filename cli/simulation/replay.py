"""`batchdecode replay`: a log of a real run, simulated, and how far off that is."""

from contextlib import nullcontext
from typing import Any

from batcher.errors import BatchdecodeError
from batcher.planning.deployments import Deployment, check_router
from batcher.planning.fleet import ReplicaSettings
from batcher.planning.prices import Cost, cost_of, price_of, read_prices
from batcher.planning.replay import AsLogged, Comparison, Replay, replay
from batcher.planning.request_log import LoggedRequest, read_requests
from batcher.planning.routers import DEFAULT_REPORT_INTERVAL, DEFAULT_ROUTER, Router, router_of
from batcher.timing.profiles import step_time_of

from ..commands.replay import ReplayOptions
from ..printing import print_json, print_text
from ..run.intake import numbered, open_input
from ..run.problems import say
from ..screen.terminal import aligned, counted, printable
from ..views.plan_tables import cost_text
from .run_limits import RunLimits, limits_of_run, limits_table, read_meta_file, warn_of_guesses

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
    outcome = replay(log, engine, num_replicas, router, interval)
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
