"""The state of a run for its views: slots, counts, a coarse history, and the facts in words."""

import time
from array import array
from bisect import bisect_right
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from batcher.events import (
    ArriveEvent,
    DropEvent,
    FinishEvent,
    PreemptEvent,
    RejectEvent,
    RequestEvent,
    RestartEvent,
    Role,
    RunEvent,
)
from batcher.trace.run import (
    FAILURES,
    AdmissionRecord,
    RequestFold,
    RequestTimeline,
    StepDrafts,
    is_follower,
    label_of,
)
from batcher.trace.timeline import MAX_STEPS, Stretch, Timeline

from .summary import BLOCKED_CAUSES, RESTART_REASONS
from .terminal import UNFINISHED, Terminal, clock, counted, number, printable, whole_percent
from .view import GaugeReading, Gauges, RunPlan, View

MAX_ROWS = 16  # of the history; more slots share rows
NUM_CELLS = 512


class RunHistory:
    """How busy the slots were over the whole run, in NUM_CELLS cells; takes spans in any order.

    When the cells are full, every two become one.  A cell counts slot-steps, so nothing is rounded.
    rows: the slots of each row.
    """

    def __init__(self, batch_size: int) -> None:
        self._slots_per_row = -(-batch_size // MAX_ROWS)
        starts = range(0, batch_size, self._slots_per_row)
        self.rows = [range(first, min(first + starts.step, batch_size)) for first in starts]
        self.steps_per_cell = 1
        self._busy = np.zeros((len(self.rows), NUM_CELLS), np.int64)

    def held(self, slot: int, start: int, end: int) -> None:
        while end > self.steps_per_cell * NUM_CELLS:
            sums = self._busy[:, ::2] + self._busy[:, 1::2]
            self._busy = np.concatenate([sums, np.zeros_like(sums)], axis=1)
            self.steps_per_cell *= 2
        size, row = self.steps_per_cell, self._busy[slot // self._slots_per_row]
        first, last = start // size, (end - 1) // size
        row[first : last + 1] += size
        row[first] -= start - first * size
        row[last] -= (last + 1) * size - end

    def used(
        self, num_steps: int, num_cells: int, held: Sequence[tuple[int, int]]
    ) -> NDArray[np.float64]:
        """Return how many slots of each row were used on average, [rows, num_cells].

        held: the slots that are held now, and their first steps.
        """
        edges = np.linspace(0, num_steps, num_cells + 1)
        sums = np.zeros((len(self.rows), NUM_CELLS + 1))  # up to the boundaries of the cells
        np.cumsum(self._busy, axis=1, out=sums[:, 1:])
        boundaries = np.arange(NUM_CELLS + 1) * self.steps_per_cell
        boundaries = np.minimum(boundaries, num_steps)  # the last cell may be a partial one
        totals = np.array([np.interp(edges, boundaries, row) for row in sums])
        for slot, start in held:
            totals[slot // self._slots_per_row] += np.maximum(edges - start, 0)
        return np.diff(totals, axis=1) * num_cells / num_steps


class QueueDepths:
    """The length of the queue by step; in long runs the maximum of a few steps each."""

    def __init__(self, steps: Iterable[int] = (), lengths: Iterable[int] = ()) -> None:
        self._steps, self._lengths = array("q", steps), array("q", lengths)
        self._size = 1  # steps that share an entry

    def add(self, step: int, length: int) -> None:
        if self._steps and step // self._size == self._steps[-1] // self._size:
            self._lengths[-1] = max(self._lengths[-1], length)
            return
        self._steps.append(step)
        self._lengths.append(length)
        if len(self._steps) > 2 * NUM_CELLS:
            known = zip(self._steps, self._lengths, strict=True)
            self._steps, self._lengths = array("q"), array("q")
            self._size *= 2
            for each in known:
                self.add(*each)

    def at(self, step: int) -> int:
        return self._lengths[max(bisect_right(self._steps, step) - 1, 0)]

    def stretches(self, num_steps: int) -> list[Stretch]:
        steps = [0, *self._steps[1:], num_steps]
        return [Stretch(*each) for each in zip(steps, steps[1:], self._lengths, strict=False)]

    def highest(self, num_steps: int, num_cells: int) -> NDArray[np.int64]:
        """Return the maximum in each of the cells of a run of `num_steps`, [num_cells]."""
        if not self._steps:
            return np.zeros(num_cells, np.int64)
        edges = np.arange(num_cells + 1) * num_steps // num_cells
        steps, lengths = np.array(self._steps), np.append(self._lengths, 0)
        first = np.maximum(np.searchsorted(steps, edges[:-1], "right") - 1, 0)
        last = np.maximum(np.searchsorted(steps, edges[1:], "left"), first + 1)
        ends = np.stack([first, last], axis=1).ravel()
        found: NDArray[np.int64] = np.maximum.reduceat(lengths, ends)[::2]
        return found


MAX_LABEL = 200  # characters of an id that are kept; a column shows fewer
MAX_NOTES = 64
MAX_PAST = 1024  # stays of a slot that are kept
MAX_ENDS = 5_000  # finished sequences that are kept
MAX_UNSEEN = 500  # events that may wait for the next frame

PHASES: dict[Role, str] = {"sample": "decode", "beam": "beam", "negative": "partner"}
"""The phase of a row after its prefill, by role."""

Kind = Literal["preempted", "failed"]


class Stay(NamedTuple):
    """The steps [start, end) of a sequence in a slot; end is None while it holds the slot.

    kind: "" for a normal end.
    """

    request_id: str
    start: int
    end: int | None
    first_token: int | None
    kind: Kind | Literal[""] = ""


class Row(NamedTuple):
    """A slot after a step.  request: the sequence that used the slot in this step, or None."""

    request: RequestTimeline | None
    phase: str = "idle"
    num_tokens: int = 0
    drafts: StepDrafts | None = None

    @property
    def label(self) -> str:
        label = "" if self.request is None else self.request.label
        if len(label) > MAX_LABEL:
            return label[: MAX_LABEL // 2] + label[-MAX_LABEL // 2 :]
        return label

    @property
    def max_tokens(self) -> int:
        return 0 if self.request is None else self.request.max_tokens

    @property
    def share(self) -> float:
        return self.num_tokens / self.max_tokens if self.max_tokens else 0.0

    @property
    def progress(self) -> str:
        return f"{self.num_tokens}/{self.max_tokens}" if self.max_tokens else ""


class Note(NamedTuple):
    """A preemption or failure, for the header."""

    step: int
    kind: Kind
    label: str
    text: str


class RunState:
    """What the views of a run need in addition to its fold: counts, recent stays, its history.

    The owner of the events feeds `fold` before `catch_up`.  paces: the last step of each of several
    workers, set by the same owner.  num_done: requests that have ended.  num_failed: failed
    outputs.  num_preempted: without followers.  most_done: the largest share shown as done.
    ends: the newest sequences that have ended.  marks: the newest preemption or failure in a slot,
    with its step.
    """

    def __init__(self, batch_size: int, num_workers: int = 1) -> None:
        self.fold = RequestFold()
        self.fold.news = []
        self.keep_ends(MAX_ENDS)
        self.paces = [MAX_STEPS] * num_workers
        self.history = RunHistory(batch_size)
        self.num_slots = batch_size
        self._past: list[list[Stay]] = [[] for _ in range(batch_size)]  # recent stays, by slot
        self.marks: dict[int, tuple[Kind, int]] = {}
        self.num_done = self.num_failed = self.num_preempted = 0
        self.most_done = 0.0
        self.restarts: list[RestartEvent] = []
        self.notes: deque[Note] = deque(maxlen=MAX_NOTES)
        self._num_others = Counter[str]()  # samples of a request that end before its last
        self._preempted: list[RequestTimeline] = []  # some may be running again
        self._num_finished_tokens = self._num_finished_max = 0

    def keep_ends(self, most: int) -> None:
        """Keep at most `most` of the sequences that have ended."""
        self.ends: deque[RequestTimeline] = deque(maxlen=most)
        self._dropped: deque[tuple[str, int]] = deque(maxlen=most)
        self.fold.step_drafts = deque(maxlen=most)

    def forget(self, step: int) -> None:
        """Drop the stays that ended before `step`."""
        for past in self._past:
            while past and (past[0].end or 0) < step:
                del past[0]

    def keep_up(self) -> None:
        if len(self.fold.news or ()) >= MAX_UNSEEN:
            self.catch_up()

    def catch_up(self) -> None:
        news, self.fold.news = self.fold.news or [], []
        for event, found in news:
            match event:
                case ArriveEvent():  # a sample other than the first
                    self._num_others[event.id] += 1
                case FinishEvent() if found is not None:
                    self._end(found, event)
                case PreemptEvent() if found is not None:
                    self._preempt(found, event)
                case RejectEvent():
                    self.num_done += 1
                    self.num_failed += 1
                    self._note(event, "failed", event.id, f"failed: {event.reason}")
                case DropEvent():
                    self.num_failed -= event.reason == "error"
                    self._dropped.append((event.id, event.index))
                case RestartEvent():
                    self.restarts.append(event)
                    text = f"replaced: {RESTART_REASONS[event.reason]}"
                    self._note(event, "failed", f"w{event.worker or 0}", text)
                case _:
                    pass

    def _note(self, event: RequestEvent, kind: Kind, label: str, text: str) -> None:
        self.notes.append(Note(event.step, kind, label, text))

    def _leave(self, admission: AdmissionRecord, end: int, kind: Kind | Literal[""]) -> None:
        admit = admission.event
        if kind:
            self.marks[admit.slot] = kind, end - (kind == "failed")
        past = self._past[admit.slot]
        past.append(Stay(admit.id, admit.step, end, admission.first_token, kind))
        if len(past) > MAX_PAST:
            del past[0]
        self.history.held(admit.slot, admit.step, end)

    def _preempt(self, request: RequestTimeline, preempt: PreemptEvent) -> None:
        lost = next(one for one in request.admissions if one.preempt is preempt)
        self._leave(lost, preempt.step, "preempted")
        if request not in self._preempted:
            self._preempted.append(request)
        if not is_follower(request):
            self.num_preempted += 1
            other = label_of(preempt.for_id, preempt.for_index, "sample")
            text = "no block left" if other == request.label else f"for {other}"
            separator = ": " if other == request.label else " "
            self._note(preempt, "preempted", request.label, f"preempted{separator}{text}")

    def _end(self, request: RequestTimeline, end: FinishEvent) -> None:
        is_lost, others = end.reason == "lost", self._num_others
        self.ends.append(request)
        self._num_finished_tokens += request.tokens_after(end.step)
        if request.admission is not None:
            self._num_finished_max += 0 if is_lost else request.max_tokens
            has_failed = is_lost or end.reason in FAILURES
            self._leave(request.admission, end.step + 1, "failed" if has_failed else "")
        if end.reason in FAILURES:
            self.num_failed += end.reason == "error"
            text = "failed" if end.reason == "error" else end.reason
            self._note(end, "failed", request.label, text)
        if request.role != "sample" and is_follower(request):
            return
        if others.get(end.id):
            others[end.id] -= 1
            if not others[end.id]:
                del others[end.id]
        elif not is_lost and (request.arrive is not None or end.index == 0):
            self.num_done += 1  # the first sample of an aborted request counts for all

    def own_step(self, number: int, step: int) -> int:
        """Return the last step up to `step` of the worker that has the slot."""
        return min(step, self.paces[number * len(self.paces) // self.num_slots])

    def _newest(self, number: int) -> tuple[RequestTimeline, AdmissionRecord] | None:
        request = self.fold.slots.get(number)
        for admission in reversed(request.admissions) if request is not None else ():
            if request is not None and admission.event.slot == number:
                return request, admission
        return None

    def stays(self, number: int) -> list[Stay]:
        """Return the recent stays in a slot, the oldest first."""
        past, newest = self._past[number], self._newest(number)
        if newest is None:
            return past
        request, admission = newest
        if admission.preempt is not None or request.finish is not None:
            return past
        start = admission.event.step
        return [*past, Stay(request.id, start, None, admission.first_token)]

    def admitted(self, number: int) -> int:
        """Return the step of the newest admission to a slot, -1 if there was none."""
        found = self._newest(number)
        return -1 if found is None else found[1].event.step

    def is_busy(self, number: int, step: int) -> bool:
        """Return whether `step`, the last one made, used the slot; -1 is before the first."""
        found = self._newest(number)
        if found is None:
            return False
        request, admission = found
        own = max(self.own_step(number, step), 0)
        if admission.preempt is not None:
            return admission.preempt.step > own
        return request.finish is None or request.finish.step >= own

    def row(self, number: int, step: int, slot_step: int) -> Row:
        """Return a slot after `step`; slot_step: `step`, or the next one while the run waits."""
        found = self._newest(number) if self.is_busy(number, slot_step) else None
        if found is None:
            return Row(None)
        request, admission = found
        own, lost = self.own_step(number, step), admission.preempt
        latest = None if admission.drafts is None else admission.drafts.latest
        if lost is not None:
            phase = "preempted"
        elif request.finish is not None:
            phase = request.finish.reason
        elif admission.first_token is None or admission.first_token >= own:
            phase = "prefill"
        else:
            phase = PHASES[request.role]
        if latest is not None and latest.step != self.own_step(number, slot_step):
            latest = None
        num_tokens = request.tokens_after(own) if lost is None else lost.generated
        return Row(request, phase, num_tokens, latest)

    def name_of(self, number: int) -> str:
        if len(self.paces) == 1:
            return str(number)
        return f"w{number * len(self.paces) // self.num_slots} {number}"

    def timeline(self, run: RunEvent, num_steps: int) -> Timeline:
        sequences = [*self.ends, *self.fold.open]
        drafts, dropped = self.fold.step_drafts, set(self._dropped)
        return Timeline.from_sequences(run, num_steps, sequences, drafts, self.restarts, dropped)

    def num_tokens(self, step: int) -> int:
        running = sum(r.tokens_after(self.own_step(n, step)) for n, r in self._running())
        return self._num_finished_tokens + self._num_kept() + running

    def num_tokens_left(self, step: int, num_queued: int) -> float:
        """Estimate the tokens still to come after `step`, with `num_queued` outputs waiting.

        Requests are taken to use the same share of their max_tokens as those that have ended.
        Running ones count as if they used all of it, since short ones end first.  A row that
        outlives half of its share is expected to double: the last rows of a run have seconds left.
        """
        running = self._running()
        running_max = sum(request.max_tokens for _, request in running)
        known = self._num_finished_max + running_max
        used = (self._num_finished_tokens + running_max) / known if known else 1.0
        fold = self.fold
        usual = fold.num_wanted / fold.num_arrived if fold.num_arrived else 0.0
        left = 0.0
        for slot, request in running:
            done = request.tokens_after(self.own_step(slot, step))
            left += max(request.max_tokens * used - done, min(done, request.max_tokens - done))
        return left + max(num_queued * usual * used - self._num_kept(), 0.0)

    @property
    def num_running(self) -> int:
        """The slots that are held; a sequence that ended in the last step holds none."""
        return len(self._running())

    def open_spans(self) -> list[tuple[int, int]]:
        """Return the held slots and their first steps, which the history does not have yet."""
        return [(n, request.admissions[-1].event.step) for n, request in self._running()]

    def _running(self) -> list[tuple[int, RequestTimeline]]:
        return [
            (number, request)
            for number, request in list(self.fold.slots.items())
            if request.finish is None
            and request.admission is not None
            and request.admission.event.slot == number  # it may have moved to another slot
        ]

    def _num_kept(self) -> int:
        self._preempted = [r for r in self._preempted if r.admission is None and not r.finish]
        return sum(request.tokens_after(0) for request in self._preempted)


# -- the facts of the header, and of a plain line of progress -------------------------------------

GAP = "  "
MAX_WORKERS = 4  # whose steps are listed one by one


class Moment(NamedTuple):
    """The step that is shown, and its figures; None where unknown, as in a recorded run.

    rate, speed: recent tokens per step and per second.  seconds: since the start.  computing: how
    long the next step has taken so far, if it is slow.  is_waiting: the run waits for requests.
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
        return self.step + self.is_waiting


class Fact(NamedTuple):
    """One entry of a line; the lowest ranks are left out first."""

    rank: int
    style: str
    text: str


def progress(
    run: RunState, plan: RunPlan, gauges: GaugeReading, moment: Moment
) -> tuple[float, float | None] | None:
    """Return the share of the tokens that is done and the seconds left, both estimated, or None.

    In a live view the share never falls.  Only a finished run is at 1.
    """
    if plan.is_endless or plan.total is None or moment.step < 0:
        return None
    num_coming = gauges.num_queued + gauges.num_coming
    if run.num_done >= plan.total and not run.num_running and not num_coming:
        return 1.0, 0.0
    left = run.num_tokens_left(moment.step, num_coming)
    share = min(moment.num_tokens / max(moment.num_tokens + left, 1), UNFINISHED)
    if moment.seconds is not None:
        share = run.most_done = max(run.most_done, share)
    return share, max(left / moment.speed, 1.0) if moment.speed else None


def count_facts(
    run: RunState, plan: RunPlan, gauges: GaugeReading, moment: Moment, separator: str
) -> list[Fact]:
    own = [min(moment.step, pace) for pace in run.paces]
    if moment.computing is not None:
        found = [Fact(8, "blocked", long_step(moment.step + 1, moment.computing))]
    elif len(own) > MAX_WORKERS:
        found = [Fact(8, "figure", f"steps {min(own):,}-{max(own):,}")]
    else:
        steps = " ".join(f"{step:,}" for step in own)
        found = [Fact(8, "figure", f"step{'s' if len(own) > 1 else ''} {steps}")]
    of_total = "" if plan.total is None else f"/{plan.total:,}"
    found.append(Fact(9, "done", f"{run.num_done:,}{of_total} done"))
    if run.num_failed:
        found.append(Fact(7, "failed", f"{run.num_failed:,} failed"))
    found.append(Fact(4, "", f"{run.num_running:,} running"))
    coming = f"{separator}{gauges.num_coming:,} not arrived" if gauges.num_coming else ""
    return [*found, Fact(5, "", f"{gauges.num_queued:,} queued{coming}")]


def long_step(step: int, seconds: float) -> str:
    return f"step {step:,} has taken {clock(seconds)}"


def rate_facts(run: RunState, plan: RunPlan, gauges: GaugeReading, moment: Moment) -> list[Fact]:
    found = [Fact(8, "figure", f"{moment.rate:.1f} tok/step")]
    if moment.speed is not None:
        found.append(Fact(7, "figure", f"{short(moment.speed)} tok/s"))
    found.append(Fact(4, "", plan.policy))
    if plan.is_timed:
        found.append(Fact(5, "", f"engine {number(gauges.now)} s"))
    if run.fold.drafts.num_drafted:
        share = whole_percent(run.fold.drafts.num_accepted / run.fold.drafts.num_drafted)
        found.append(Fact(6, "drafts", f"drafts {share} accepted"))
    if run.num_preempted:
        found.append(Fact(6, "preempted", f"{run.num_preempted:,} preempted"))
    if run.restarts:
        found.append(Fact(6, "failed", counted(len(run.restarts), "restart")))
    return found


def block_facts(run: RunState, gauges: GaugeReading) -> list[Fact]:
    use, fold = gauges.block_use, run.fold
    if use is None:
        return []
    used = f"{use.used:,}" if use.free is not None else counted(use.used, "block")
    found = [Fact(4, "used", f"{used} used")]
    if use.cached is not None:
        found.append(Fact(3, "cached", f"{use.cached:,} cached"))
    if use.free is None:
        found.append(Fact(1, "label", "no limit"))
    else:
        total = use.used + (use.cached or 0) + use.free
        found.append(Fact(2, "free", f"{use.free:,} free"))
        found.append(Fact(1, "label", f"of {counted(total, 'block')}"))
    if fold.num_found:
        found.append(Fact(3, "figure", f"hits {fold.num_found * 100 // fold.num_asked}%"))
    return found


def next_up(run: RunState, gauges: GaugeReading) -> tuple[str, str]:
    """Return the label of the next request of the queue and why it waits, or empty strings."""
    first, num_slots = gauges.next_up, run.num_slots
    blocked, use = run.fold.blocked, gauges.block_use
    if blocked is not None:
        first, fits_now = label_of(blocked.id, blocked.index, "sample"), False
        if blocked.reason == "kv" and use is not None and use.free is not None:
            num_usable = use.free + (use.cached or 0)
            fits_now = len(run.paces) == 1 and blocked.blocks <= num_usable
        if not fits_now:
            needs = f", needs {counted(blocked.blocks, 'block')}" if blocked.blocks else ""
            return first, f"blocked by {BLOCKED_CAUSES[blocked.reason]}{needs}"
    if first is None:
        return "", ""
    if gauges.num_free:
        return first, "with the next step"
    taken = f"all {num_slots:,} slots are" if num_slots > 1 else "the slot is"
    return first, f"{taken} taken"


def plain_line(run: RunState, plan: RunPlan, gauges: GaugeReading, moment: Moment) -> str:
    """Return the facts of the header in one line of words, which a screen reader can read."""
    facts = count_facts(run, plan, gauges, moment, ", ") + rate_facts(run, plan, gauges, moment)
    texts = [fact.text for fact in facts if fact.text != plan.policy]
    parts = [text.replace(" tok/", " tokens per ").replace("/", " of ") for text in texts]
    found = progress(run, plan, gauges, moment)
    if found is not None and found[1] is not None:
        parts.append(f"{int(found[0] * 100)}%, {clock(found[1])} left")
    if blocks := block_facts(run, gauges):
        parts.append(f"KV {', '.join(fact.text for fact in blocks)}")
    if run.fold.blocked is not None:
        parts.append(f"next {': '.join(next_up(run, gauges))}")
    if moment.seconds is not None:
        parts.append(clock(moment.seconds))
    return ", ".join([plan.title, *parts])


def kept(facts: Sequence[Fact], width: int) -> list[Fact]:
    found = list(facts)
    while found and sum(len(fact.text) + len(GAP) for fact in found) - len(GAP) > width:
        found.remove(min(found))
    return found


def short(count: float) -> str:
    for size, unit in ((1e6, "M"), (1e3, "k")):
        if count >= size:
            return f"{number(count / size)}{unit}"
    return number(count)


PLAIN_INTERVAL = 5.0  # seconds between plain lines


class ProgressLines(View):
    """A plain line of progress every few seconds, for a log or a screen reader."""

    def __init__(
        self,
        plan: RunPlan,
        gauges: Gauges,
        terminal: Terminal,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(terminal)
        self._plan = plan._replace(title=printable(plan.title))
        self._gauges, self._clock = gauges, clock
        self._run = RunState(plan.batch_size, plan.num_workers)
        self.fold, self.paces = self._run.fold, self._run.paces
        self._started = clock()
        self._next_line = self._next_long_line = self._started + PLAIN_INTERVAL
        self._long_step, self._long_since = -1, self._started
        self._last = (-1, 0, self._started)  # step, tokens and time of the previous line

    def after_step(self, step: int) -> None:
        now = self._clock()
        if now < self._next_line:
            self._run.keep_up()
            return
        self._next_line = now + PLAIN_INTERVAL
        self._run.catch_up()
        num_tokens = self._run.num_tokens(step)
        last_step, last_tokens, last_time = self._last
        self._last = (step, num_tokens, now)
        num_new = num_tokens - last_tokens
        rate, speed = num_new / max(1, step - last_step), num_new / max(now - last_time, 1e-9)
        moment = Moment(step, num_tokens, rate, speed, now - self._started)
        line = plain_line(self._run, self._plan, self._gauges.read_gauges(), moment)
        self.write_message(f"{printable(line)}\n")

    def keep_up(self) -> None:
        self._run.keep_up()

    def still_computing(self, step: int) -> None:
        now = self._clock()
        if step != self._long_step:
            self._long_step, self._long_since = step, now
            self._next_long_line = now + PLAIN_INTERVAL
        if now >= self._next_long_line:
            self._next_long_line = now + PLAIN_INTERVAL
            taken, total = long_step(step, now - self._long_since), self._plan.total
            of_total = "" if total is None else f" of {total:,}"
            done = f"{self._run.num_done:,}{of_total} done"
            self.write_message(f"{self._plan.title}, {taken}, {done}\n")
