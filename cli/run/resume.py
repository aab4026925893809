"""Resuming a run: what it was, and what it has left behind.

Beside results.jsonl stands results.jsonl.run.json, written when a run begins and again when it has
finished.  It holds what must be the same for two runs to give the same results, and keeps
unfinished results from being overwritten.  In results.jsonl.run.sums each line of results has a
checksum: a line without one is not of a run.  With --keep-order, results.jsonl.rest has those whose
turn has not come.

Rules: a file is changed by cutting off its end, or replaced at once, so that a crash loses nothing.
Of each earlier result only its offset is held, found by its id.
"""

import os
import sys
import zlib
from array import array
from bisect import bisect_left
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from contextlib import ExitStack
from io import BytesIO
from pathlib import Path
from typing import Any, BinaryIO, Literal, NamedTuple, Self
from zlib import adler32, crc32

import msgspec
from msgspec.structs import replace

from batcher.errors import RUN_ERROR_CODES, BatchdecodeError
from batcher.events import RunEvent
from batcher.request import Request
from batcher.requests.lines import BadLine, ParsedLine, RequestParser
from batcher.requests.results import decode_result_line
from batcher.requests.validation import ModelCapabilities
from batcher.result import Result
from batcher.settings import DEFAULT_SCHEDULING, PREFIX_CACHE_WORDS, SchedulingSettings
from batcher.speculation.settings import SPECULATION_SETTINGS
from batcher.transformer.config import LOADING_SETTINGS, is_checkpoint, is_hf

from ..config import OF_ROWS
from ..options import WALL
from ..screen.terminal import counted, printable_lines
from .files import BESIDE_RESULTS, OutFile, OutputError, ResumeError, Sink
from .input import IdRegistry, OpenInput, RequestReader, Waiting
from .problems import say
from .run_options import RunOptions

REPAIR = "--resume=repair drops such lines, and decodes again what they were for"
AGAIN = (
    "what is there is decoded again, but not written: with a policy, limits, drafts or a profile "
    "nothing else tells what the batch did"
)
RECORD, SUMS, REST = BESIDE_RESULTS
_CHUNK = 2**20


class RunRecord(msgspec.Struct, frozen=True, kw_only=True):
    """What decides the results of a run, and whether it has come to its end.

    scheduling, step_time, speculation: as the first line of a trace has them, but with the policy.
    input_sha256: None if the run cannot be continued: its input cannot be read again, what it did
    depended on how fast it was, or there are token events among the results.
    workers: the most of any run that has gone on with it; None if it decodes in one engine.
    version: 2 since lines have other checksums.
    """

    version: Literal[2] = 2
    finished: bool = False
    model: str
    settings: dict[str, Any]
    batch: int
    workers: int | None = None
    scheduling: SchedulingSettings = DEFAULT_SCHEDULING
    step_time: dict[str, Any] = {}
    speculation: dict[str, Any] = {}
    keep_order: bool
    chat: bool = False
    defaults: dict[str, Any] = {}
    input_sha256: str | None


class Resumption:
    """A run that may continue one before it, and be continued by one after it.

    file: that of the results, which is held.
    earlier: the results of the run before; None if there is nothing to resume.
    is_possible: this run can be resumed if it ends early.
    has_finished: the run before was complete, and none of its results were dropped since.

    Raises:
        ResumeError: there are results, and they are not to be resumed, or cannot be.
    """

    def __init__(self, options: RunOptions, requests: OpenInput, file: OutFile) -> None:
        self.file = file
        self.earlier: EarlierResults | None = None
        self.is_possible = self.has_finished = self._has_results = False
        self._record: RunRecord | None = None
        self._before: RunRecord | None = None  # of the run before
        self._output: str | None = None  # the path of the results, if that is a plain file
        output = file.path
        if output is None or (Path(output).exists() and not Path(output).is_file()):
            if options.resume:
                raise ResumeError("--resume continues a file of results: it needs --output FILE")
            return
        if options.resume and not requests.is_file:
            raise ResumeError("--resume needs the requests in a file: a pipe cannot be read again")
        if options.resume and options.follow:
            raise ResumeError(
                "--resume and --follow exclude each other: following depends on timing"
            )
        if options.resume and options.scheduling.profile == WALL:
            raise ResumeError(
                "--resume and --profile wall exclude each other: what a run does then depends on "
                "how fast it is"
            )
        self._output, is_filled = output, file.is_filled or Path(output + REST).exists()
        self._has_results = is_filled and not options.force
        before = None if options.force else _read_record(output, file.name or output)
        self._before = before
        if self._has_results and not options.resume:
            raise ResumeError(f"{file.name} {_why_not_replaced(before)}")
        sums = Path(output + SUMS)
        is_new = before is None and not (self._has_results or options.force)
        if is_new and sums.exists() and sums.stat().st_size:
            raise ResumeError(
                f"{sums} is there without the record of a run, and would be overwritten: remove "
                "it, give another --output, or use --force"
            )

    def prepare(self, options: RunOptions, requests: OpenInput, run: RunEvent) -> Self:
        """Take over what there is to resume.

        run: the first line of this run's trace.

        Raises:
            ResumeError: it is not of such a run.
            OutputError: the end of the results cannot be repaired.
        """
        output = self._output
        if output is None:
            return self
        name, before = self.file.name or output, self._before
        is_timed = options.follow or options.scheduling.profile == WALL
        is_repeatable = requests.is_file and not (is_timed or options.stream)
        record = RunRecord(
            model=run.model,
            settings=msgspec.json.decode(msgspec.json.encode(run.settings)),  # as it will be read
            batch=run.batch,
            workers=options.workers,
            scheduling=options.scheduling.settings(),
            step_time=run.step_time,
            speculation=run.speculation,
            keep_order=options.keep_order,
            chat=options.chat,
            defaults=run.defaults,
            input_sha256=requests.digest() if is_repeatable else None,
        )
        if self._has_results:
            _check_same_run(name, before, record)
            if before is not None and before.workers is not None and record.workers is not None:
                # results may name slots of all
                record = replace(record, workers=max(record.workers, before.workers))
            retried: frozenset[str] | None = None
            if options.retry_failed:  # samples without a result may have failed
                found = (parsed.request for _, parsed in _expected(requests) if parsed is not None)
                retried = frozenset(r.id or "" for r in found if (r.best_of or r.n) > r.n)
            num_slots = record.batch * (record.workers or 1)
            was_written = written_lines(output, name)
            if options.repair or options.retry_failed:
                _write_record(output, record)  # from here on, results may be missing
            elif before is not None:
                self.has_finished = before.finished
            self.earlier = take_over(
                output,
                ResultLines(num_slots, was_written, is_repairing=options.repair),
                file=self.file,
                name=name,
                expected=_expected(requests) if options.keep_order else None,
                retried=retried,
            )
        self._record, self.is_possible = record, record.input_sha256 is not None
        return self

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.earlier is not None:
            self.earlier.close()

    def describe(self, num_requests: int | None, *, is_decoded_again: bool = False) -> str:
        """Return lines of what is there already, of so many requests; nothing of a new run.

        is_decoded_again: whether that costs as much as it did, since only so it is known what the
        batch did.
        """
        if self.earlier is None or num_requests is None:
            return ""
        there = f"{self.file.name} has {counted(self.earlier.num_results, 'result')}"
        left = f"{num_requests - self.earlier.num_answered:,} of {counted(num_requests, 'request')}"
        lines = f"going on: {there}, {left} have none yet\n"
        if is_decoded_again and self.earlier.num_results:
            lines += f"{AGAIN}\n"
        return lines

    def open_results(self, output: str) -> Sink:
        """Return what results are written to, behind those that were there; others are gone."""
        results = self.file.open(append=self.earlier is not None)
        if not self.is_possible:
            return results
        return SummedSink(results, output, append=self.earlier is not None)

    def begin(self) -> None:
        """Write down that the run has begun.

        The file of results must be open by then, and so rid of those of another run.
        """
        if self._output is not None and self._record is not None:
            if self.earlier is None:
                Path(self._output + REST).unlink(missing_ok=True)
            _write_record(self._output, self._record)

    def finish(self) -> None:
        """Write down that the run has come to its end."""
        if self._output is not None and self._record is not None:
            _write_record(self._output, replace(self._record, finished=True))
            Path(self._output + REST).unlink(missing_ok=True)
            self.file.finish()


def conclude_finished(
    resumption: Resumption,
    requests: OpenInput,
    parser: RequestParser,
    options: RunOptions,
    waiting: Waiting,
) -> int | None:
    """Say that nothing is to be done, if that is so; return the exit status, None if it is not.

    Each request of the input is looked at, and each of its results, but no model is asked.
    waiting: entered while all results are looked at.

    Raises:
        Interrupted: a signal came.
        InputError: the input cannot be read.
        OutputError, WriteError: the record of the run cannot be written.
    """
    more = options.trace, options.summary_json, options.report, options.timeseries, options.otel
    if options.is_exposed or options.stats or any(output is not None for output in more):
        return None  # decoding again alone tells that
    earlier = resumption.earlier
    if earlier is None or not resumption.has_finished:
        return None
    with waiting():
        num_failed, reader = 0, RequestReader(requests.lines(), parser)
        for number, _, line in reader:
            if isinstance(line, BadLine):
                if not earlier.has_rejected(line.id, number):
                    return None
                num_failed += 1
                continue
            results = earlier.results_of(line.request)
            if len(results) < line.request.n:
                return None
            num_failed += any(result.error is not None for result in results.values())
    resumption.begin()
    resumption.file.settle()
    resumption.finish()
    if not options.quiet:
        name, whole = resumption.file.name, counted(reader.num_read, "request")
        told = f"nothing to do: {name} has all results of {whole}"
        if num_failed:
            told += f"; {num_failed:,} failed (see --retry-failed)"
        say(printable_lines(f"{told}\n"))
    return 1 if num_failed else 0


def _why_not_replaced(earlier: RunRecord | None) -> str:
    if earlier is None:
        return (
            "holds something that is not known to be results: --force overwrites it "
            "(--resume continues what a run has left, by its record beside the results)"
        )
    if earlier.finished:
        return (
            "holds the complete results of a run: --force replaces them, "
            "--resume --retry-failed decodes again what has failed"
        )
    if earlier.input_sha256 is None:
        return "holds the results of a run that did not finish: --force replaces them"
    return (
        "holds the results of a run that did not finish: "
        "add --resume to continue it, or --force to start over"
    )


def parser_for_any_model() -> RequestParser:
    """Return what reads all that some model can decode, chats included."""
    return RequestParser(
        ModelCapabilities(
            chat_template=lambda *_, **__: "a chat", encode_with_special=lambda _text: []
        )
    )


def _expected(requests: OpenInput) -> "Iterator[InputLine]":
    parser = parser_for_any_model()
    for number, line in requests.lines():
        parsed = parser.parse(line, number)
        yield number, parsed if isinstance(parsed, ParsedLine) else None


def _check_same_run(name: str, earlier: RunRecord | None, now: RunRecord) -> None:
    """Make sure that the results of `earlier` are those that `now` would give."""
    if earlier is None:
        raise ResumeError(
            f"cannot resume {name}: {name}{RECORD} is missing, "
            "so nothing says which model and input the results are of. To go on, put it back; "
            f"to keep {name}, give it another name. --force overwrites it."
        )
    if earlier.input_sha256 is None:
        raise ResumeError(
            f"cannot resume {name}: that run read a pipe, or used --follow, --stream or "
            "--profile wall. "
            "--force starts over."
        )
    reasons = []
    if earlier.input_sha256 != now.input_sha256:
        reasons.append("the input is another one, or has changed")
    if earlier.model != now.model:
        reasons.append(f"the model was {earlier.model}, now it is {now.model}")
    else:
        are_options = is_checkpoint(now.model) or is_hf(now.model)
        names = LOADING_SETTINGS if are_options else frozenset[str]()
        reasons += _changes(earlier.settings, now.settings, names)
    scheduling = []
    for record in (earlier, now):
        values = {"batch": record.batch, **msgspec.structs.asdict(record.scheduling)}
        values["prefix_cache"] = PREFIX_CACHE_WORDS[values["prefix_cache"]]
        scheduling.append(values)
    reasons += _changes(scheduling[0], scheduling[1], scheduling[0])
    profiles = [record.step_time.get("name", "1 second a step") for record in (earlier, now)]
    if profiles[0] != profiles[1]:
        reasons.append(f"--profile was {profiles[0]}, now it is {profiles[1]}")
    else:
        reasons += [f"--profile: {each}" for each in _changes(earlier.step_time, now.step_time)]
    reasons += _changes(earlier.speculation, now.speculation, SPECULATION_SETTINGS)
    flags = {
        "--workers": (earlier.workers is not None, now.workers is not None),
        "--keep-order": (earlier.keep_order, now.keep_order),
        "--chat": (earlier.chat, now.chat),
    }
    for option, (was_given, is_given) in flags.items():
        if was_given != is_given:
            reasons.append(f"it was begun {'with' if was_given else 'without'} {option}")
    reasons += _changes(earlier.defaults, now.defaults, OF_ROWS)
    if reasons:
        raise ResumeError(
            f"cannot resume {name}: {'; '.join(reasons)}. "
            "Resume with what it was begun with, or start over with --force."
        )


def _changes(
    earlier: Mapping[str, Any], now: Mapping[str, Any], options: Container[str] = ()
) -> list[str]:
    words = {None: "not set", True: "on", False: "off"}
    reasons = []
    for name in sorted(earlier.keys() | now.keys()):
        then, value = (
            words[found] if found is None or isinstance(found, bool) else found
            for found in (earlier.get(name), now.get(name))
        )
        if then != value:
            shown = f"--{name.replace('_', '-')}" if name in options else name
            reasons.append(f"{shown} was {then}, now it is {value}")
    return reasons


def _read_record(output: str, name: str) -> RunRecord | None:
    """Return the record beside `output`, which messages call `name`; None if there is none."""
    try:
        return msgspec.json.decode(Path(output + RECORD).read_bytes(), type=RunRecord)
    except FileNotFoundError:
        return None
    except OSError as error:
        reason = error.strerror
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        where = str(error).partition(" - at `$.")[2].rstrip("`")
        what = f"its `{where}` is not" if where else "it is damaged, or not"
        reason = f"{what} what this version of batchdecode writes"
    raise ResumeError(
        f"cannot read {name}{RECORD}, the record of a run: {reason}. To go on, put it back as "
        f"it was; to keep {name}, give it another name. --force starts over."
    )


def _write_record(output: str, record: RunRecord) -> None:
    file = OutFile(output + RECORD, is_named=False)
    with file.replace(is_synced=False) as sink:
        sink.write(msgspec.json.format(msgspec.json.encode(record)) + b"\n")


# -- what stands beside results

SUM_BYTES = 8  # of a checksum: a CRC-32, then an Adler-32


class SummedSink:
    """Passes results on to another sink, and the checksum of each line to a file before that.

    So a line without a checksum was changed, or put there by others.
    append: whether the results before these are kept.
    """

    def __init__(self, results: Sink, output: str, *, append: bool) -> None:
        self._results, self.is_file = results, results.is_file
        if not append:
            Path(output + SUMS).unlink(missing_ok=True)  # not what it may be a link to
        self._file = OutFile(output + SUMS, is_named=False)
        self._sums = self._file.open(append=append)

    def write(self, lines: bytes) -> None:
        self._sums.write(sums_of(BytesIO(lines).readlines()))
        self._results.write(lines)

    def close(self) -> None:
        try:
            self._sums.close()
            self._results.close()
            self._file.settle()
        finally:
            self._file.close()


def sums_of(lines: list[bytes]) -> bytes:
    """Return the checksums of lines of results, one after the other.

    Both find damage, neither a forger, who could write the checksums as well; together they take a
    fifth of the time of a short blake2b.
    """
    sums = array("I", bytes(SUM_BYTES * len(lines)))
    sums[::2] = array("I", map(crc32, lines))
    sums[1::2] = array("I", map(adler32, lines))
    return sums.tobytes()


def written_lines(output: str, name: str) -> Callable[[bytes], bool]:
    """Return a function that returns whether runs have written a line to `output`.

    name: as messages call that.

    Raises:
        ResumeError: there are no checksums of its lines.
    """
    try:
        data = Path(output + SUMS).read_bytes()
    except FileNotFoundError:
        raise ResumeError(
            f"cannot resume {name}: {name}{SUMS} is missing, so nothing says which lines the "
            f"run has written. To go on, put it back; to keep {name}, give it another name. "
            "--force starts over."
        ) from None
    data = data[: len(data) - len(data) % SUM_BYTES]
    sums = array("q", sorted(array("q", data)))

    def was_written(line: bytes) -> bool:
        wanted = int.from_bytes(sums_of([line]), sys.byteorder, signed=True)
        place = bisect_left(sums, wanted)
        return place < len(sums) and sums[place] == wanted

    return was_written


# -- the results of an earlier run


class ResultLine(NamedTuple):
    """A line with its number in its file, and the results in it, which are of one request."""

    number: int
    line: bytes
    results: list[Result]


class ResultLines:
    """Reads lines of results up to the first that is torn.

    num_slots: of the batch.  was_written: returns whether a run has written a line.
    is_repairing: lines that no run has written, or that are there twice, are left out, not refused.
    """

    def __init__(
        self, num_slots: int, was_written: Callable[[bytes], bool], *, is_repairing: bool = False
    ) -> None:
        self._num_slots, self._was_written = num_slots, was_written
        self.is_repairing = is_repairing

    def read(self, file: BinaryIO) -> Iterator[ResultLine]:
        """Yield each line, from the first one on.

        Raises:
            ResumeError: one is no result of the run.
        """
        file.seek(0)
        seen = set[tuple[str, int]]()
        for number, line in enumerate(file, start=1):
            if not line.endswith(b"\n"):
                return
            try:
                results = self._results_in(line)
            except (BatchdecodeError, RecursionError) as error:
                if self.is_repairing:
                    continue
                raise ResumeError(f"line {number}: {error}; {REPAIR}") from error
            if self.is_repairing:
                names = {(result.id, number_of(result)) for result in results}
                if names & seen:
                    continue
                seen |= names
            yield ResultLine(number, line, results)

    def _results_in(self, line: bytes) -> list[Result]:
        if line.isspace():
            raise ResumeError("it is blank")
        results = decode_result_line(line)
        for result in results:
            slot, admitted, finished = result.slot, result.steps.admitted, result.steps.finished
            if slot is None and admitted is None:
                continue
            if slot is None or admitted is None or finished is None:
                raise ResumeError("some of slot, admitted and finished are null")
            if not 0 <= slot < self._num_slots:
                raise ResumeError(f"slot {slot}, but there are {self._num_slots}")
            if not 0 <= admitted <= finished:
                raise ResumeError(f"it cannot have held a slot from step {admitted} to {finished}")
        if not self._was_written(line):
            raise ResumeError(
                f"the result of {results[0].id!r} is not what the run has written: "
                "it was changed, or put there"
            )
        return results


class EarlierResults:
    """The results of an earlier run, in the file `lines`, and where in it each is.

    is_copy: lines that are added are written there, too.
    end: the offset behind the last line that was added.  num_complete: if they are in the order of
    the input, how many of its lines have all their results, from the first one on.
    num_results, num_answered: how many there are, and of how many lines of the input.
    """

    def __init__(self, lines: BinaryIO, *, is_copy: bool = False) -> None:
        self.end = self.num_complete = self.num_results = self.num_answered = 0
        self.lines, self._is_copy = lines, is_copy
        self._places = IdRegistry()  # where the line of a result is
        self._kept: list[tuple[int, int, int]] = []

    def close(self) -> None:
        self.lines.close()

    def add(self, found: ResultLine) -> None:
        """Take in the next line.

        Raises:
            ResumeError: one of its results is there already.
        """
        for result in found.results:
            number, places = number_of(result), self._places
            if places.add(f"{number} {result.id}", self.end) is not None:
                raise ResumeError(
                    f"line {found.number}: it is one of two results {result.index} "
                    f"of request {result.id!r}; {REPAIR}"
                )
            # A line of the input is answered once, though later samples may come before the first.
            if number > 0:
                is_first = places.add(f"+ {result.id}", 0) is None
                is_first &= places.find(f"0 {result.id}") is None
            else:
                is_first = number < 0 or places.find(f"+ {result.id}") is None
            self.num_answered += is_first
        self.num_results += len(found.results)
        if self._is_copy:
            self.lines.write(found.line)
        self.end += len(found.line)

    def keep(self, input_index: int, start: int) -> None:
        """Keep what is from `start` to `end`, the answer to a line of the input, for its turn.

        It follows a gap, so its turn comes when that is closed.
        """
        self._kept.append((input_index, start, self.end))

    def kept(self) -> Iterator[tuple[int, bytes]]:
        for input_index, start, end in self._kept:
            self.lines.seek(start)
            yield input_index, self.lines.read(end - start)

    def results_of(self, request: Request) -> dict[int, Result]:
        request_id: str = request.id  # type: ignore[assignment]  # its parser has set it
        return self.find(request_id, max(request.n, request.best_of or 0))

    def find(self, request_id: str, num_outputs: int) -> dict[int, Result]:
        found = ((index, self._get(request_id, index)) for index in range(num_outputs))
        return {index: result for index, result in found if result is not None}

    def check_replay(self, request: Request, replayed: Mapping[int, Result], /) -> None:
        """Make sure that `replayed`, results of `request`, can be.

        Raises:
            ResumeError: one took more steps than it can have taken.
        """
        for result in replayed.values():
            admitted, finished = result.steps.admitted, result.steps.finished
            num_steps = 0 if admitted is None or finished is None else finished - admitted + 1
            if num_steps > request.output_limit:
                raise ResumeError(
                    f"cannot resume: result {result.index} of request {result.id!r} took "
                    f"{num_steps} steps, but max_tokens is {request.output_limit}"
                )

    def has_rejected(self, request_id: str, line_number: int, /) -> bool:
        return self._places.find(f"{-line_number} {request_id}") is not None

    def _get(self, request_id: str, number: int) -> Result | None:
        start = self._places.find(f"{number} {request_id}")
        if start is None:
            return None
        self.lines.seek(start)
        results = decode_result_line(self.lines.readline())
        return next(result for result in results if number_of(result) == number)


def number_of(result: Result) -> int:
    """Return the number of `result` among those with its id: its index or, below 0, its bad line.

    An id given twice is that of a request and of the bad lines that have it, too.
    """
    line = result.error.line if result.error is not None else None
    return result.index if line is None else -line


# -- taking over a file of results

InputLine = tuple[int, ParsedLine | None]
"""The number of a line of the input, and the request that it holds, None if it holds none."""


def take_over(
    output: str,
    reader: ResultLines,
    *,
    file: OutFile | None = None,
    name: str | None = None,
    expected: Iterable[InputLine] | None = None,
    retried: frozenset[str] | None = None,
) -> EarlierResults:
    """Return the results in the file `output` and repair its end, so that it can be appended to.

    file: has it locked.  name: as messages call it, if not so.
    expected: the lines of the input, if the results are in their order.
    retried: if results that have failed are left out, the requests of which any results are.

    Raises:
        ResumeError: the file holds something else.
        OutputError: it cannot be repaired.
    """
    file = file or OutFile(output)
    is_chosen = reader.is_repairing or (retried is not None and expected is None)
    try:
        with ExitStack() as on_failure, ExitStack() as at_end:
            is_whole, lines = _open(output)
            if is_chosen or expected is not None:
                at_end.callback(lines.close)
                earlier = EarlierResults(_temporary(output), is_copy=True)
            else:
                earlier = EarlierResults(lines)
            on_failure.callback(earlier.close)
            if expected is not None:
                end = _add_in_order(output, lines, earlier, reader, retried, expected)
            else:
                failed = set[str]()
                if retried is not None:
                    answers = ([found] for found in reader.read(lines))
                    failed = {a[0].results[0].id for a in answers if _is_retried(a, retried)}
                for found in reader.read(lines):  # of a request all results or none
                    if found.results[0].id not in failed:
                        earlier.add(found)
                end = earlier.end
            earlier.lines.flush()
            if end < earlier.end:
                _put(earlier.lines, OutFile(output + REST, is_named=False))
            is_whole &= end == lines.seek(0, os.SEEK_END)
            if is_chosen or (output.endswith(".gz") and not is_whole):
                _put(earlier.lines, file, end)
            else:
                lines.truncate(end)
            on_failure.pop_all()
    except ResumeError as error:
        raise ResumeError(f"cannot resume {name or output}: {error}") from error
    except OSError as error:
        raise OutputError(f"cannot continue {output}: {error.strerror}") from error
    return earlier


def _is_retried(answer: list[ResultLine], retried: frozenset[str] | None) -> bool:
    if retried is None:
        return False
    errors = (result.error for found in answer for result in found.results)
    has_failed = any(error is not None and error.code in RUN_ERROR_CODES for error in errors)
    return has_failed or any(found.results[0].id in retried for found in answer)


def _add_in_order(
    output: str,
    lines: BinaryIO,
    earlier: EarlierResults,
    reader: ResultLines,
    retried: frozenset[str] | None,
    expected: Iterable[InputLine],
) -> int:
    """Add the answers to `expected`; return where the first gap in the lines of `output` is.

    Those behind it are kept for their turn; some may be in a file of their own.
    """
    end, path = 0, Path(output + REST)
    with ExitStack() as opened:
        files = [lines, opened.enter_context(path.open("rb"))] if path.exists() else [lines]
        readers = [reader.read(file) for file in files]
        heads = [next(found, None) for found in readers]
        for place, (number, parsed) in enumerate(expected):
            answers = []  # in each file; nothing if it is not whole, or to be tried again
            for which, found_lines in enumerate(readers):
                answer: list[ResultLine] = []
                while (head := heads[which]) is not None:
                    first = head.results[0]
                    of_line = number_of(first)
                    is_own = parsed is not None and first.id == parsed.request.id
                    if not (-of_line == number if of_line < 0 else is_own):
                        break
                    answer.append(head)
                    heads[which] = next(found_lines, None)
                is_rejected = parsed is None or (answer and number_of(answer[0].results[0]) < 0)
                num_wanted = 1 if is_rejected or parsed is None else parsed.request.n
                is_complete = sum(len(found.results) for found in answer) >= num_wanted
                is_kept = is_complete and not _is_retried(answer, retried)
                answers.append(answer if is_kept else [])
            start = earlier.end
            for found in next(filter(None, answers), ()):
                earlier.add(found)
            if answers[0] and earlier.num_complete == place:
                earlier.num_complete, end = place + 1, earlier.end
            elif any(answers):
                earlier.keep(place, start)
    return end


def _temporary(output: str) -> BinaryIO:
    import tempfile  # noqa: PLC0415 - only where results are mended

    return tempfile.TemporaryFile(dir=Path(output).resolve().parent)


def _open(output: str) -> tuple[bool, BinaryIO]:
    """Return whether `output` can be read to its end, and its lines, unpacked up to any damage."""
    if not output.endswith(".gz"):
        return True, Path(output).open("r+b")
    lines, is_whole = _temporary(output), True
    decompressor = zlib.decompressobj(wbits=31)
    with Path(output).open("rb") as packed:
        while is_whole and (chunk := packed.read(_CHUNK)):
            while chunk:
                if decompressor.eof:  # a run that was resumed has left more than one stream
                    decompressor = zlib.decompressobj(wbits=31)
                try:
                    lines.write(decompressor.decompress(chunk))
                except zlib.error:
                    is_whole = False
                    break
                chunk = decompressor.unused_data
        # an empty file is whole, too
        is_whole &= decompressor.eof or not packed.tell()
    lines.flush()
    return is_whole, lines


def _put(lines: BinaryIO, file: OutFile, end: int | None = None) -> None:
    """Replace `file` by `lines`, up to the offset `end`."""
    left = lines.seek(0, os.SEEK_END) if end is None else end
    lines.seek(0)
    with file.replace() as sink:
        while left and (chunk := lines.read(min(_CHUNK, left))):
            sink.write(chunk)
            left -= len(chunk)
