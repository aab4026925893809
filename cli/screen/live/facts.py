"""How far a run is, in words and figures: for the header of the live view and for plain lines."""

from collections.abc import Sequence
from typing import NamedTuple

from batcher.trace.run import label_of

from ..cells import UNFINISHED, counted, number, whole_percent
from ..timed_lines import BLOCKED_CAUSES
from ..view import GaugeReading, RunPlan
from .state import RunState

GAP = "  "
MAX_WORKERS = 4
"""So many have their step in the header, each."""


class Moment(NamedTuple):
    """When a run is looked at.

    rate, speed: tokens per step and per second of late.  seconds: since the start.  None where
    nobody knows: of a run that is over there may be no more than the steps.
    computing: the seconds that the step after it has taken so far, if that is long; else None.
    is_waiting: whether the run has waited for something to do since `step` was shown.
    """

    step: int
    num_tokens: int
    rate: float
    speed: float | None
    seconds: float | None
    computing: float | None = None
    is_waiting: bool = False

    @property
    def slot_step(self) -> int:
        """The step whose slots are shown; while the run waits that is the one to come."""
        return self.step + self.is_waiting


class Fact(NamedTuple):
    """One entry of a line.  Where there is no room for all, the lowest rank goes first."""

    rank: int
    style: str
    text: str


class RunProgress(NamedTuple):
    """How much of a run is done, of 1, and how many seconds are probably left, if anybody knows."""

    share: float
    eta: float | None


def progress(
    run: RunState, plan: RunPlan, gauges: GaugeReading, moment: Moment
) -> RunProgress | None:
    """Return how far the run is by tokens, those to come estimated; None if nobody can know.

    While a run goes on, the share never falls, however wrong the estimate was.  Only a run that is
    over is at 1, with nothing left.
    """
    if plan.is_endless or plan.total is None or moment.step < 0:
        return None
    num_coming = gauges.num_queued + gauges.num_coming
    if run.num_done >= plan.total and not run.num_running and not num_coming:
        return RunProgress(1.0, 0.0)
    left = run.num_tokens_left(moment.step, num_coming)
    share = min(moment.num_tokens / max(moment.num_tokens + left, 1), UNFINISHED)
    if moment.seconds is not None:  # a player goes back
        share = run.most_done = max(run.most_done, share)
    return RunProgress(share, max(left / moment.speed, 1.0) if moment.speed else None)


def counts(
    run: RunState, plan: RunPlan, gauges: GaugeReading, moment: Moment, separator: str
) -> list[Fact]:
    """Return what has become of the requests: done, failed, running, queued and not arrived."""
    of_total = "" if plan.total is None else f"/{plan.total:,}"
    found = [
        Fact(8, "figure", _steps(run, moment.step))
        if moment.computing is None
        else Fact(8, "blocked", long_step(moment.step + 1, moment.computing)),
        Fact(9, "done", f"{run.num_done:,}{of_total} done"),
    ]
    if run.num_failed:
        found.append(Fact(7, "failed", f"{run.num_failed:,} failed"))
    found.append(Fact(4, "", f"{run.num_running:,} running"))
    coming = f"{separator}{gauges.num_coming:,} not arrived" if gauges.num_coming else ""
    return [*found, Fact(5, "", f"{gauges.num_queued:,} queued{coming}")]


def _steps(run: RunState, step: int) -> str:
    """Return the last step that was made; of several workers, that of each, or the range."""
    if len(run.paces) == 1:
        return f"step {step:,}"
    own = [min(step, pace.step) for pace in run.paces]
    if len(own) > MAX_WORKERS:
        return f"steps {min(own):,}-{max(own):,}"
    return f"steps {' '.join(f'{one:,}' for one in own)}"


def long_step(step: int, seconds: float) -> str:
    """Return how long `step` has taken so far."""
    return f"step {step:,} has taken {clock(seconds)}"


def rates(run: RunState, plan: RunPlan, gauges: GaugeReading, moment: Moment) -> list[Fact]:
    """Return how fast it goes, and what the schedule costs."""
    found = [Fact(8, "figure", f"{moment.rate:.1f} tok/step")]
    if moment.speed is not None:
        found.append(Fact(7, "figure", f"{short(moment.speed)} tok/s"))
    found.append(Fact(4, "", plan.policy))
    if plan.is_timed:
        found.append(Fact(5, "", f"engine {number(gauges.now)} s"))
    if run.fold.num_drafted:
        share = whole_percent(run.fold.num_accepted / run.fold.num_drafted)
        found.append(Fact(6, "drafts", f"drafts {share} accepted"))
    if run.num_preempted:
        found.append(Fact(6, "preempted", f"{run.num_preempted:,} preempted"))
    if run.restarts:
        found.append(Fact(6, "failed", counted(len(run.restarts), "restart")))
    return found


def next_up(run: RunState, gauges: GaugeReading) -> str:
    """Return who is next in the queue, and why it waits; "" if nobody is known to wait."""
    blocked = run.fold.blocked
    if blocked is not None:
        needs = f", needs {counted(blocked.blocks, 'block')}" if blocked.blocks else ""
        name = label_of(blocked.id, blocked.index, "sample")
        return f"{name}: blocked by {BLOCKED_CAUSES[blocked.reason]}{needs}"
    first = gauges.next_up
    if first is None:
        return ""
    if gauges.num_free:
        return f"{first}: with the next step"
    num_slots = len(run.slots)
    taken = f"all {num_slots:,} slots are" if num_slots > 1 else "the slot is"
    return f"{first}: {taken} taken"


def plain_line(run: RunState, plan: RunPlan, gauges: GaugeReading, moment: Moment) -> str:
    """Return how things stand in one line, to be read aloud: words, no picture."""
    facts = counts(run, plan, gauges, moment, ", ")
    parts = [plan.title, *(fact.text.replace("/", " of ") for fact in facts)]
    parts.append(f"{moment.rate:.1f} tokens per step")
    if moment.speed is not None:
        parts.append(f"{short(moment.speed)} per second")
    found = progress(run, plan, gauges, moment)
    if found is not None and found.eta is not None:
        parts.append(f"{int(found.share * 100)}%, {clock(found.eta)} left")
    if run.fold.num_drafted:
        drafted = counted(run.fold.num_drafted, "draft")
        parts.append(f"{run.fold.num_accepted:,} of {drafted} accepted")
    if run.num_preempted:
        parts.append(counted(run.num_preempted, "preemption"))
    use = gauges.block_use
    if use is not None:
        cached = "" if use.cached is None else f"{use.cached:,} cached, "
        rest = "no limit" if use.free is None else f"{use.free:,} free"
        parts.append(f"KV blocks: {use.used:,} used, {cached}{rest}")
    if run.fold.blocked is not None:
        parts.append(f"next {next_up(run, gauges)}")
    return ", ".join(parts if moment.seconds is None else [*parts, clock(moment.seconds)])


def kept(facts: Sequence[Fact], width: int) -> list[Fact]:
    """Return those of `facts` that fit into `width` with gaps between, in their order."""
    found = list(facts)
    while found and sum(len(fact.text) + len(GAP) for fact in found) - len(GAP) > width:
        found.remove(min(found))
    return found


def clock(seconds: float) -> str:
    """Return `seconds` as 0:03, 12:34 or 1:02:03."""
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def short(count: float) -> str:
    """Return a count in a few characters: 87, 940, 12.3k, 4.56M."""
    for size, unit in ((1e6, "M"), (1e3, "k")):
        if count >= size:
            return f"{number(count / size)}{unit}"
    return number(count)
