"""A run by workers, from the files it reads to the files it writes and what is said about it."""

import time
from contextlib import AbstractContextManager
from dataclasses import replace

from batcher.errors import BatchdecodeError
from batcher.events import RestartEvent
from batcher.garbage import look_seldom

from ...errors import WriteError
from ...screen.cells import counted, printable_lines
from ..answers import InputOrder
from ..ending import refuse_rest, settle_files, tell_ending
from ..files import locked_files
from ..intake import InputError, OpenInput, open_input
from ..observing import opened_exposition, opened_spans
from ..output import OutputError, ResumeError
from ..problems import ProblemReport, say
from ..recorder import ResultWriter, stdout_beside
from ..resume import (
    ResultsFile,
    Resumption,
    conclude_finished,
    find_leftover,
    parser_for_any_model,
    prepare,
    results_file,
)
from ..run_options import RunOptions
from ..signals import Interrupted, StopSignals
from .driver import Driver, FailedWorkerError
from .lines import FileLines, InputLines, PipeLines
from .messages import Answered
from .transport import Transport
from .watching import WorkersRecord

BAD_INPUT = 2  # an exit status
_MAX_KINDS = 5  # of what workers say


def run_by_workers(
    options: RunOptions,
    num_workers: int,
    stop: StopSignals,
    command: str,
    workers: AbstractContextManager[Transport] | None = None,
) -> int:
    """Carry out `batchdecode run --workers N`; return its exit status.

    command: what continues this run if it ends early.
    workers: leads to as many, which are started when it is asked; None for what the options say.

    Raises:
        BatchdecodeError: the input, an option or a file is not right.
        BrokenPipeError: whoever reads the output has gone.
        Interrupted: a signal came before the first line was decoded.
    """
    with (
        open_input(options.input, stop.waiting) as requests,
        locked_files(options, requests.status) as files,
    ):
        spans = opened_spans(options, num_workers)
        with (
            results_file(options, stop.waiting) as file,
            opened_exposition(options, files.get("--metrics-file")) as exposition,
        ):
            options = replace(options, output=file.path)
            leftover = find_leftover(options, requests, file)
            with workers or _workers_of(options, num_workers, stop) as transport:
                driver = Driver(transport, num_workers, options.batch)
                try:
                    start = driver.start()
                    with prepare(options, requests, leftover, start) as resumption:
                        if resumption.has_finished:
                            parser = parser_for_any_model()
                            status = conclude_finished(
                                resumption, requests, parser, options, stop.waiting
                            )
                            if status is not None:
                                return status
                        report = ProblemReport(requests.name, options.color)
                        lines = _open_lines(
                            options, requests, report, resumption, driver, transport
                        )
                        title = requests.name.rpartition("/")[2]
                        try:
                            record = WorkersRecord(
                                options, start, num_workers, lines, title, files, exposition, spans
                            )
                            run = _WorkersRun(
                                options, driver, lines, report, file, resumption, record
                            )
                            return run.carry_out(stop, command)
                        except Interrupted:  # before the first line, or after the last one
                            now = f"stopped by {stop.name}", f"continue with: {command}"
                            tell_ending(options, None, file, resumption, *now)
                            return stop.exit_status
                except FailedWorkerError as error:
                    say(printable_lines(error.traceback))
                    raise


class _WorkersRun:
    """A run whose workers are ready.

    Raises:
        BatchdecodeError: the file of results cannot be opened.
    """

    def __init__(
        self,
        options: RunOptions,
        driver: Driver,
        lines: InputLines,
        report: ProblemReport,
        file: ResultsFile,
        resumption: Resumption,
        record: WorkersRecord,
    ) -> None:
        look_seldom()
        self._started = time.monotonic()
        self._options, self._driver, self._lines = options, driver, lines
        self._report, self._file, self._resumption = report, file, resumption
        if not options.quiet:
            say(printable_lines(resumption.describe(lines.total)))
        earlier = resumption.earlier
        first = earlier.num_complete if earlier else 0
        self._order = InputOrder(first) if options.keep_order else None
        self._record, output = record, options.output
        sink = stdout_beside(record.view) if output is None else resumption.open_results(output)
        self._results = ResultWriter(sink)
        self._num_failed, self._first_failure, self._is_complete = 0, "", False
        self._is_over = False  # and what was done is more than what was written
        self._said: set[str] = set()

    def carry_out(self, stop: StopSignals, command: str) -> int:
        """Run to the end, and say how that went; return the exit status."""
        status, remark = self._carry_out(stop)
        say(self._report.closing())
        elapsed = time.monotonic() - self._started
        if not self._is_over:
            self._record.conclude(self._file.name, is_complete=self._is_complete, elapsed=elapsed)
        num_restarts = self._driver.num_restarts
        if num_restarts and not self._options.quiet:
            say(f"  {counted(num_restarts, 'worker')} replaced, which had died\n")
        if self._first_failure:
            say(printable_lines(f"first failure: {self._first_failure}\n"))
        refuse_rest(self._report, self._lines)
        what_now = f"continue with: {command}"
        if not remark and self._has_given_up:
            remark = f"stopped after {counted(self._num_failed, 'failed request')}"
            what_now = "to go on, add --resume and raise --max-errors"
        if remark:
            results, file, resumption = self._results, self._file, self._resumption
            tell_ending(self._options, results, file, resumption, remark, what_now)
        return status or (1 if self._num_failed else 0)

    def _carry_out(self, stop: StopSignals) -> tuple[int, str]:
        """Run to the end; return the exit status, and why it came early if it did."""
        lines, resumption = self._lines, self._resumption
        try:
            try:
                resumption.begin()
                self._decode(stop)
            finally:
                stop.before_wait = None
                try:
                    self._write_rest()
                finally:
                    self._record.close()
            settle_files(self._record.files, self._file)
            if not (self._has_given_up or lines.has_refused or lines.broken):
                self._is_complete = True
                resumption.finish()
        except KeyboardInterrupt as error:
            self._is_over = not isinstance(error, Interrupted)  # at once
            return stop.exit_status, f"stopped by {stop.name}"
        except (OutputError, ResumeError):  # there is no run yet, or none to go on with
            raise
        except FailedWorkerError as error:
            self._is_over = True
            say(printable_lines(error.traceback))
            return BAD_INPUT if error.is_input else 1, f"error: {error}"
        except (WriteError, BatchdecodeError) as error:
            self._is_over = True
            return BAD_INPUT if isinstance(error, InputError) else 1, f"error: {error}"
        return 0, ""

    @property
    def _has_given_up(self) -> bool:
        return self._num_failed >= (self._options.max_errors or float("inf"))

    def _decode(self, stop: StopSignals) -> None:
        """Have all lines decoded, and write what they are answered with.

        Raises:
            Interrupted: a signal came.
            KeyboardInterrupt, FailedWorkerError, BatchdecodeError, InputError: see Driver.
            WriteError, BrokenPipeError: the output takes no more.
        """
        earlier, order = self._resumption.earlier, self._order
        if earlier is not None and order is not None:
            for index, answer in earlier.kept():
                self._results.write(order.put(index, answer))
        stop.before_wait, stop.before_pause = self._show_all, self._record.view.step_aside
        has_given_up = False
        for number, told in self._driver.decode(self._lines):
            if isinstance(told, RestartEvent):
                self._record.restart(number, told)
                continue
            self._record.take(number, told)
            self._write(told)
            if self._has_given_up and not has_given_up:
                has_given_up = True
                self._driver.give_up(self._lines)
            if stop.received is not None:
                raise Interrupted
        for number, told in self._driver.finish() if self._record.has_events else ():
            self._record.take(number, told)

    def _show_all(self) -> float:
        """Show what there is before the run waits; return when to do so again, see View."""
        self._results.flush()
        self._record.flush()
        return self._record.view.refresh()

    def _write(self, answered: Answered) -> None:
        """Write what is answered, and say what is to be said."""
        results, lines, order = self._results, self._lines, self._order
        if order is None and self._resumption.earlier is None:
            results.write([answered.answers])
        else:
            for index, answer in answered.by_line():
                lacking = lines.lacking(index, answer)
                results.write([lacking] if order is None else order.put(index, lacking))
        self._num_failed += answered.num_failed
        self._first_failure = self._first_failure or answered.first_failure
        said = answered.said
        if said and said not in self._said and len(self._said) < _MAX_KINDS:
            self._said.add(said)
            self._report.tell(said)
        if self._report.news:
            self._record.view.write_message(self._report.take())

    def _write_rest(self) -> None:
        """Write what is kept back for its turn, and end the file."""
        try:
            for answer in () if self._order is None else self._order.rest():
                self._results.write([answer])
        finally:
            if self._order is not None:
                self._order.close()
            self._results.close()


def _workers_of(
    options: RunOptions, num_workers: int, stop: StopSignals
) -> AbstractContextManager[Transport]:
    """Return what leads to the workers that the options ask for.

    Raises:
        BatchdecodeError: what is needed for that is not there.
    """
    if options.on is None:
        from .processes import Processes  # noqa: PLC0415 - with it comes multiprocessing

        return Processes(options, num_workers, stop.waiting)
    from .actors import Actors  # noqa: PLC0415 - with it comes Ray

    return Actors(options, num_workers, options.on.partition(":")[2], stop.waiting)


def _open_lines(
    options: RunOptions,
    requests: OpenInput,
    report: ProblemReport,
    resumption: Resumption,
    driver: Driver,
    transport: Transport,
) -> InputLines:
    """Return the lines of the input; those of a file are checked.

    Raises:
        InvalidInput: a file has bad lines, and they are not to be skipped.
    """
    keep_going = options.keep_going or options.max_errors is not None
    if not requests.is_file:
        return PipeLines(requests, report, transport.wake, keep_going=keep_going)
    lines = FileLines(requests, report, resumption.earlier, keep_going=keep_going)
    try:
        driver.check(lines)
        lines.begin()
    finally:
        say(requests.take_notes() + report.closing())
    return lines
