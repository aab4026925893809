"""`batchdecode replay`: a log of a real run, simulated, and how far off that is."""

from contextlib import nullcontext
from typing import Any

from batcher.errors import BatchdecodeError
from batcher.simulation.replaying import Comparison, Replay, replay
from batcher.simulation.request_log import LoggedRequest
from batcher.simulation.traced_requests import read_requests
from batcher.timing.loading import step_time_of

from ..commands.replay import ReplayOptions
from ..printing import print_json, print_text
from ..running.intake import numbered, open_input
from ..running.problems import say
from ..screen.cells import aligned, counted, printable
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
    limits = limits_of_run(options.batch, options.scheduling, options.profile, meta, run)
    warn_of_guesses(limits)
    outcome = replay(log, limits.batch, limits.settings, step_time)
    if options.json:
        print_json(_record(outcome, log, limits))
    else:
        print_text(_table(outcome, log, limits, source.name))


def _record(outcome: Replay, log: list[LoggedRequest], limits: RunLimits) -> dict[str, Any]:
    result, totals = outcome.result, outcome.result.totals
    return {
        "requests": len(log),
        "output_tokens": sum(request.output_toks for request in log),
        "steps": totals.num_steps,
        "preemptions": totals.num_preemptions,
        "recomputed_tokens": totals.recomputed_tokens,
        "binding": result.binding_shares,
        "numbers": outcome.comparisons,
        "limits": limits.used,
    }


def _table(outcome: Replay, log: list[LoggedRequest], limits: RunLimits, name: str) -> str:
    """Return the limits and the numbers of both runs as people read them."""
    result, totals = outcome.result, outcome.result.totals
    num_tokens = sum(request.output_toks for request in log)
    rows = [_HEADS, *(_row(comparison) for comparison in outcome.comparisons)]
    title = f"{printable(name)}: {counted(len(log), 'request')}, {num_tokens:,} output tokens"
    steps = (
        f"simulated in {counted(totals.num_steps, 'step')}, with "
        f"{counted(totals.num_preemptions, 'preemption')} and {totals.recomputed_tokens:,} tokens "
        "computed again"
    )
    shares = [f"{limit} {share * 100:.0f} %" for limit, share in result.binding_shares.items()]
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
    return "".join(f"{line.rstrip()}\n" for line in lines)


def _row(comparison: Comparison) -> tuple[str, str, str, str]:
    error = "" if comparison.error is None else f"{comparison.error:+.1%}".replace("%", " %")
    shown = (_shown(comparison.name, value) for value in (comparison.real, comparison.simulated))
    return comparison.name, *shown, error  # type: ignore[return-value]  # there are two of them


def _shown(name: str, seconds: float) -> str:
    if name.startswith("tpot"):
        return f"{seconds * _MILLISECONDS:.2f} ms"
    return f"{seconds:.3f} s"
