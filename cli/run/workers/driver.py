"""Who decodes which lines: given out as workers get on with them, and again when one dies.

Rule: each line is with one worker or none, and what a worker has not answered when it dies is given
out again, so that nothing is lost, and nothing written twice.
"""

import time
from collections import Counter, deque
from collections.abc import Iterator
from operator import itemgetter

from msgspec.structs import replace

from batcher.errors import BatchdecodeError
from batcher.events import RestartEvent, RunEvent

from .lines import InputLines, LineBatch
from .messages import (
    Answered,
    Check,
    Checked,
    Decode,
    Drop,
    Dropped,
    Failed,
    Finish,
    Finished,
    Line,
    Lines,
    Ready,
    Remark,
    Report,
    Row,
    StoppedByModel,
)
from .transport import Died, Transport

DEATHS_TOGETHER = 2
"""After so many a line is suspected of them, and decoded by itself."""
DEATHS_ALONE = 3
"""After so many by itself, a line has failed."""
MAX_FAILED_STARTS = 3  # with no worker ready in between
MAX_FUTILE_DEATHS = 30  # of workers with lines, with none decoded in between
MAX_BATCHES = 2  # that a worker has to check
AHEAD_SECONDS = 0.2  # for which a worker has lines beside those in its slots
MAX_AHEAD_LINES, MAX_AHEAD_BYTES = 4096, 4 * 2**20
_NEWEST = 0.3  # how much of a rate is what was measured last
_text_of = itemgetter(Line.__struct_fields__.index("text"))


class FailedWorkerError(BatchdecodeError):
    """What happened to a worker would happen to every other one."""

    def __init__(self, failed: Failed) -> None:
        super().__init__(failed.message)
        self.traceback, self.is_input = failed.traceback, failed.is_input


class _Member:
    """A worker as the driver knows it.

    held: what makes a `Line` of each that it has not answered, by index.  remarks: see Lines.
    batches: what it has to check, in order.
    is_alone: it has one line that is suspected, and is given no other one.
    num_steps, now: how many steps were made in its place, and when the next one starts.
    """

    def __init__(self, num_steps: int = 0, now: float = 0.0) -> None:
        self.num_steps, self.now = num_steps, now
        self.is_ready = self.is_alone = False
        self.held: dict[int, Row] = {}
        self.remarks: dict[int, Remark] = {}
        self.batches: deque[LineBatch] = deque()
        self._num_bytes, self._rate, self._last = 0, 0.0, time.monotonic()

    def give(self, lines: Lines) -> None:
        """Take note that the worker is given lines."""
        self.held.update(zip(lines.indexes, lines.rows(), strict=True))
        self.remarks |= lines.remarks
        self._num_bytes += sum(map(len, lines.texts))

    def note_answered(self, indexes: list[int]) -> None:
        """Take note that lines were answered."""
        self.release(indexes)
        now = time.monotonic()
        rate = len(indexes) / max(now - self._last, 1e-3)
        self._rate += _NEWEST * (rate - self._rate)
        self._last = now
        self.is_alone = self.is_alone and bool(self.held)

    def release(self, indexes: list[int]) -> None:
        """Take note that the worker has lines no more."""
        self._num_bytes -= sum(map(len, map(_text_of, map(self.held.pop, indexes))))
        if self.remarks:
            for index in indexes:
                self.remarks.pop(index, None)

    def num_wanted(self, num_slots: int) -> int:
        """Return how many lines more keep it busy until it is asked again; 0 for a few."""
        if self._num_bytes > MAX_AHEAD_BYTES:
            return max(0, num_slots - len(self.held))
        ahead = min(max(num_slots // 2, int(self._rate * AHEAD_SECONDS)), MAX_AHEAD_LINES)
        wanted = num_slots + ahead - len(self.held)
        return wanted if wanted > ahead // 2 else 0


class Driver:
    """Has workers check and decode the lines of an input; iterates over what is answered.

    num_slots: of each worker.  run: how the trace of one would begin, once one is ready.
    num_restarts: how many workers were started in place of others.

    Raises, in all but its constructor:
        FailedWorkerError: a worker has told that it cannot go on.
        BatchdecodeError: workers die before they have done anything, or whatever they do.
        KeyboardInterrupt: a model has raised one.
        InputError: the input is damaged or gone.
    """

    def __init__(self, transport: Transport, num_workers: int, num_slots: int) -> None:
        self.run: RunEvent | None = None
        self.num_restarts = 0
        self._transport, self._num_slots = transport, num_slots
        self.num_workers = num_workers
        self._members = [_Member() for _ in range(num_workers)]
        self._num_failed_starts = self._num_futile_deaths = 0
        self._unchecked: deque[LineBatch] = deque()  # with workers that died
        self._again, self._suspects = Lines(), Lines()
        self._deaths: dict[int, int] = {}  # of lines, by index, as long as they have no answer
        self._failed_checks: Counter[int] = Counter()  # by batch

    def start(self) -> RunEvent:
        """Start the workers; return how a trace of one begins when one is ready."""
        for number in range(len(self._members)):
            self._transport.start(number)
        while self.run is None:
            for number, report in self._transport.receive():
                self._take(number, report)
        return self.run

    def check(self, lines: InputLines) -> None:
        """Have all lines checked."""
        while not lines.is_checked:
            self._give_batches(lines)
            if not lines.is_checked:
                for number, report in self._transport.receive():
                    self._take(number, report, lines)

    def decode(self, lines: InputLines) -> Iterator[tuple[int, Answered | RestartEvent]]:
        """Have all lines decoded; yield what is answered, each line once, and who is replaced."""
        while True:
            self._give_batches(lines)
            self._give_lines(lines)
            if lines.has_ended and not self._has_work:
                return
            for number, report in self._transport.receive():
                restart = self._take(number, report, lines)
                if restart is not None:
                    yield number, restart
                elif isinstance(report, Answered):
                    yield number, report

    def give_up(self, lines: InputLines) -> None:
        """Give out no more, and have workers begin no more."""
        lines.close()
        self._again, self._suspects = Lines(), Lines()
        for number, member in enumerate(self._members):
            if member.held:
                self._transport.send(number, Drop())

    def finish(self) -> Iterator[tuple[int, Answered]]:
        """Let the runs of workers that have nothing to do come to their end; yield what they tell.

        One that dies now has no end.
        """
        left = {number for number, member in enumerate(self._members) if member.is_ready}
        for number in left:
            self._transport.send(number, Finish())
        while left:
            for number, report in self._transport.receive():
                if isinstance(report, Finished | Died):
                    left.discard(number)
                elif isinstance(report, Answered):
                    yield number, report

    @property
    def num_held(self) -> int:
        """How many lines are with workers."""
        return sum(len(member.held) for member in self._members)

    @property
    def _has_work(self) -> bool:
        return bool(self._again or self._suspects or any(m.held for m in self._members))

    def _take(
        self, number: int, report: Report | Died, lines: InputLines | None = None
    ) -> RestartEvent | None:
        """Take in what has come of a worker; return how it was replaced if it has died."""
        member = self._members[number]
        match report:
            case Answered():
                self._take_answers(member, report)
            case Checked() if lines is not None:
                lines.take(member.batches.popleft(), report)
            case Ready():
                member.is_ready, self.run = True, report.run
                self._num_failed_starts = 0
            case Dropped(indexes):
                member.release(indexes)
            case Failed():
                raise FailedWorkerError(report)
            case StoppedByModel():
                raise KeyboardInterrupt
            case Died():
                return self._replace(number, report)
            case _:
                pass
        return None

    def _take_answers(self, member: _Member, report: Answered) -> None:
        """Take note of the lines that a worker has answered, and how far it is."""
        indexes = report.indexes
        member.num_steps, member.now = report.num_steps, report.now
        if self._num_futile_deaths:
            lost = {index for index, remark in member.remarks.items() if remark.deaths}
            if not lost.issuperset(indexes):
                self._num_futile_deaths = 0
        member.note_answered(indexes)
        if self._deaths:
            for index in indexes:
                self._deaths.pop(index, None)

    # -- giving out ---------------------------------------------------------------------------

    def _give_batches(self, lines: InputLines) -> None:
        """Give lines to be checked to workers that have few."""
        for number, member in enumerate(self._members):
            while member.is_ready and len(member.batches) < MAX_BATCHES:
                batch = self._unchecked.popleft() if self._unchecked else lines.next_batch()
                if batch is None:
                    return
                member.batches.append(batch)
                numbers, texts = batch.lines
                self._transport.send(number, Check(list(numbers), texts))

    def _give_lines(self, lines: InputLines) -> None:
        """Give lines to be decoded to workers that have few: to several of them in turn.

        So few that are left are spread, and those that arrive together.
        """
        wanting: list[tuple[int, int]] = []
        for number, member in enumerate(self._members):
            if not member.is_ready or member.is_alone:
                continue
            if self._suspects and not member.held:
                member.is_alone = True
                self._give(number, self._suspects.take(1))
            elif wanted := member.num_wanted(self._num_slots):
                wanting.append((number, wanted))
        given = {number: Lines() for number, _ in wanting}
        while wanting:
            left = []
            share = max(1, self._num_slots // 4) if len(wanting) > 1 else wanting[0][1]
            for number, wanted in wanting:
                portion = self._again.take(min(wanted, share))  # of a worker that died
                portion.extend(lines.next_lines(min(wanted, share) - len(portion)))
                given[number].extend(portion)
                if len(portion) == share < wanted:
                    left.append((number, wanted - share))
            wanting = left
        for number, portion in given.items():
            if portion:
                self._give(number, portion)

    def _give(self, number: int, lines: Lines) -> None:
        self._members[number].give(lines)
        self._transport.send(number, Decode(lines))

    # -- deaths -------------------------------------------------------------------------------

    def _replace(self, number: int, died: Died) -> RestartEvent:
        """Start a worker in place of one that has died, and give out again what that had.

        It goes on where the one before it was when it told something last: so the steps in its
        place are one line, for the trace, the numbers and the results alike.

        A line that was with so many that died is decoded by itself: so one that is the cause is
        found, and its neighbours are not taken for it.  What dies with its machine tells nothing of
        lines.
        """
        member, how, num_faults = self._members[number], died.how, int(not died.is_machine)
        self._members[number] = _Member(member.num_steps, member.now)
        if not member.is_ready:
            self._num_failed_starts += num_faults
            if self._num_failed_starts == MAX_FAILED_STARTS:
                raise BatchdecodeError(
                    f"{MAX_FAILED_STARTS} workers in a row died while they started; the last {how}"
                )
        if member.held:
            self._num_futile_deaths += num_faults
            if self._num_futile_deaths == MAX_FUTILE_DEATHS:
                raise BatchdecodeError(
                    f"{MAX_FUTILE_DEATHS} workers in a row died, and none has answered anything; "
                    f"the last {how}"
                )
        self._unchecked.extend(member.batches)
        if member.batches and num_faults:
            self._note_failed_check(member.batches[0], how)
        for index, row in member.held.items():
            line, remark = Line(*row), member.remarks.get(index)
            num_deaths = self._deaths[index] = self._deaths.get(index, 0) + num_faults
            if num_deaths < DEATHS_TOGETHER:
                self._again.append(line, remark)
            elif num_deaths < DEATHS_TOGETHER + DEATHS_ALONE or not member.is_alone:
                self._suspects.append(line, remark)
            else:
                why = f"{DEATHS_ALONE} workers died that decoded nothing else; the last {how}"
                self._again.append(line, replace(remark or Remark(), deaths=why))
        self.num_restarts += 1
        restart = RestartEvent(
            worker=number,
            step=member.num_steps,
            time=member.now,
            reason=died.reason,
            code=died.code,
        )
        self._transport.start(number, replace(restart, worker=None))
        return restart

    def _note_failed_check(self, batch: LineBatch, how: str) -> None:
        """Take note that a worker has died that was to check this batch.

        Raises:
            BatchdecodeError: it was not the first one.
        """
        self._failed_checks[batch.number] += 1
        if self._failed_checks[batch.number] == DEATHS_TOGETHER + DEATHS_ALONE:
            numbers = batch.lines.numbers
            first, last = numbers[0], numbers[-1]
            raise BatchdecodeError(
                f"each worker died that was to read lines {first} to {last}; the last {how}"
            )
