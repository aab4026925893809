"""Resume a run from the results that an earlier run has left.

Two files lie next to results.jsonl.  The record results.jsonl.run.json is written when a run
begins and again when it has finished: everything that two runs must share to give equal results.
results.jsonl.run.sums holds a checksum of each line, so a line that no run has written is found.

With --keep-order a resumed run appends results as they come, and sorts the file at its end.

Rules: a file is cut at its end or replaced whole, so a crash loses nothing.  Only the offset of
each earlier result is held in memory, by its id.
"""

import os
import sys
import zlib
from array import array
from bisect import bisect_left
from collections.abc import Callable, Container, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from io import BytesIO, FileIO
from itertools import chain
from pathlib import Path
from shutil import copyfileobj
from typing import Any, BinaryIO, Literal, Self
from zlib import adler32, crc32

import msgspec
from msgspec.structs import replace

from batcher.errors import RUN_ERROR_CODES, BatchdecodeError
from batcher.events import RunEvent
from batcher.request import Request
from batcher.requests.lines import ParsedLine, RequestParser
from batcher.requests.results import decode_result_line
from batcher.requests.validation import ModelCapabilities
from batcher.result import Result
from batcher.settings import DEFAULT_SCHEDULING, PREFIX_CACHE_WORDS, SchedulingSettings
from batcher.speculation.settings import SPECULATION_SETTINGS
from batcher.transformer.config import LOADING_SETTINGS, is_checkpoint, is_hf

from ..config import OF_ROWS
from ..options import WALL
from ..screen.terminal import counted, printable_lines
from .files import BESIDE_RESULTS, OutFile, OutputError, ResumeError, Sink, write_lines
from .input import IdRegistry, OpenInput, Unpacked
from .problems import say
from .run_options import RunOptions

REPAIR = "use --resume=repair to drop such lines and decode their requests again"
AGAIN = (
    "existing results are decoded again, but not written: with a policy, limits, drafts or a "
    "profile only decoding reproduces what the batch did"
)
RECORD, SUMS = BESIDE_RESULTS
_CHUNK = 2**20


class RunRecord(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that decides the results of a run, and whether it has finished.

    scheduling, step_time, speculation: as in the first line of a trace, policy included.
    input_sha256: None if the run cannot be resumed: its input was a pipe, its results depend on
    timing, or they are mixed with token events.
    workers: the most of any run that wrote these results; None for one engine.
    size: of the results of a finished run, in bytes.
    version: 2 since the checksums of lines changed.
    """

    version: Literal[2] = 2
    finished: bool = False
    size: int | None = None
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


class Resumption(AbstractContextManager["Resumption"]):
    """A run that may resume an earlier run, and may be resumed itself.

    file: the results, locked.  earlier: the results of the earlier run, or None.
    is_possible: this run can be resumed if it ends early.
    has_finished: the earlier run has finished, and its results are as it left them.

    Raises:
        ResumeError: there are results, and they cannot be resumed, or --resume is missing.
    """

    def __init__(self, options: RunOptions, requests: OpenInput, file: OutFile) -> None:
        self.file = file
        self.earlier: EarlierResults | None = None
        self.is_possible = self.has_finished = self._has_results = False
        self._record: RunRecord | None = None
        self._before: RunRecord | None = None  # of the earlier run
        self._requests = requests
        self._output: str | None = None  # the path of the results, if that is a regular file
        output = file.path
        if output is None or (Path(output).exists() and not Path(output).is_file()):
            if options.resume:
                raise ResumeError("--resume needs --output FILE, the results to continue")
            return
        if options.resume and not requests.is_file:
            raise ResumeError("--resume needs the requests in a file: a pipe cannot be read again")
        if options.resume and options.follow:
            raise ResumeError("--resume cannot be used with --follow: following depends on timing")
        if options.resume and options.scheduling.profile == WALL:
            raise ResumeError(
                "--resume cannot be used with --profile wall: such a run depends on timing"
            )
        self._output = output
        if not options.force:
            self._has_results = file.is_filled
            self._before = _read_record(output, file.name or output)
        if self._has_results and not options.resume:
            raise ResumeError(f"{file.name} {_why_not_replaced(self._before)}")
        sums = Path(output + SUMS)
        is_new = self._before is None and not (self._has_results or options.force)
        if is_new and sums.exists() and sums.stat().st_size:
            raise ResumeError(
                f"{sums} exists without the record of a run, and would be overwritten: remove "
                "it, use another --output, or use --force"
            )

    def prepare(self, options: RunOptions, requests: OpenInput, run: RunEvent) -> Self:
        """Read the earlier results, if there are any, and repair the end of their file.

        run: the first line of this run's trace.

        Raises:
            ResumeError: the results are from a different run.
            OutputError: the file cannot be repaired.
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
            was_written = _written_lines(output, name)
            if options.repair or options.retry_failed:
                _write_record(output, record)  # from here on, results may be missing
            size = Path(output).stat().st_size
            try:
                self.earlier = _take_over(output, self.file, options, requests, was_written)
            except ResumeError as error:
                raise ResumeError(f"cannot resume {name}: {error}") from error
            except OSError as error:
                raise OutputError(f"cannot continue {output}: {error.strerror}") from error
            is_kept = not (options.repair or options.retry_failed)
            self.has_finished = is_kept and before is not None and before.size == size
        self._record, self.is_possible = record, record.input_sha256 is not None
        return self

    def __exit__(self, *_: object) -> None:
        if self.earlier is not None:
            self.earlier.lines.close()

    def describe(self, num_requests: int | None, *, is_decoded_again: bool = False) -> str:
        """Return lines about the results that exist already; "" for a new run.

        is_decoded_again: these results are decoded again, only to learn what the batch did.
        """
        if self.earlier is None or num_requests is None:
            return ""
        num_results = counted(self.earlier.num_results, "result")
        in_all = counted(num_requests, "request")
        lines = f"resuming: {self.file.name} has {num_results}; {in_all} in all\n"
        if is_decoded_again and self.earlier.num_results:
            lines += f"{AGAIN}\n"
        return lines

    def open_results(self, output: str) -> Sink:
        """Return the sink for results, behind the earlier ones if there are any."""
        results = self.file.open(append=self.earlier is not None)
        if not self.is_possible:
            return results
        return SummedSink(results, output, append=self.earlier is not None)

    def begin(self) -> None:
        """Record that the run has begun.

        The file of results must be open by then, and so rid of those of another run.
        """
        if self._output is not None and self._record is not None:
            _write_record(self._output, self._record)

    def finish(self) -> None:
        """Sort the results of a resumed run with --keep-order, and record that it has finished."""
        if self._output is None or self._record is None:
            return
        if self.earlier is not None and self._record.keep_order:
            _, lines = _open(self._output)
            with lines, self.file.replace() as sink:
                found = EarlierResults(lines)
                for each in _read_results(lines, lambda _line: True, is_repairing=False):
                    found.add(*each)
                answers = (found.lines_of(*line) for line in _requests_of(self._requests))
                write_lines(chain.from_iterable(answers), sink)
        size = Path(self._output).stat().st_size
        _write_record(self._output, replace(self._record, finished=True, size=size))
        self.file.finish()


def conclude_finished(resumption: Resumption, options: RunOptions) -> int | None:
    """Return the exit status of a run that has nothing left to do, else None."""
    more = options.trace, options.summary_json, options.report, options.timeseries, options.otel
    if options.is_exposed or options.stats or any(output is not None for output in more):
        return None  # that needs decoding again
    earlier = resumption.earlier
    if earlier is None or not resumption.has_finished:
        return None
    if not options.quiet:
        name, whole = resumption.file.name, counted(earlier.num_results, "result")
        text = f"nothing to do: {name} is complete with {whole}"
        if earlier.num_failed:
            text += f"; {earlier.num_failed:,} failed (see --retry-failed)"
        say(printable_lines(f"{text}\n"))
    return 1 if earlier.num_failed else 0


def _why_not_replaced(earlier: RunRecord | None) -> str:
    if earlier is None:
        return (
            "contains something other than the results of a run: --force overwrites it "
            "(--resume needs the record of the run next to its results)"
        )
    if earlier.finished:
        return (
            "contains the complete results of a run: --force replaces them, "
            "--resume --retry-failed decodes failed requests again"
        )
    if earlier.input_sha256 is None:
        return "contains the results of a run that did not finish: --force replaces them"
    return (
        "contains the results of a run that did not finish: "
        "add --resume to continue it, or --force to start over"
    )


def _requests_of(requests: OpenInput) -> Iterator[tuple[int, Request | None]]:
    """Yield the number of each input line, and its request if some model can decode it."""
    anything = ModelCapabilities(  # of any model
        chat_template=lambda *_, **__: "a chat", encode_with_special=lambda _text: []
    )
    parser = RequestParser(anything)
    for number, line in requests.lines():
        parsed = parser.parse(line, number)
        yield number, parsed.request if isinstance(parsed, ParsedLine) else None


# -- the record


def _check_same_run(name: str, earlier: RunRecord | None, now: RunRecord) -> None:
    """Raise a ResumeError if the results of `earlier` are not those of `now`."""
    if earlier is None:
        raise ResumeError(
            f"cannot resume {name}: {name}{RECORD} is missing, "
            "and with it the model and the input of these results. To continue, restore it; "
            f"to keep {name}, rename it. --force overwrites {name}."
        )
    if earlier.input_sha256 is None:
        raise ResumeError(
            f"cannot resume {name}: that run read a pipe, or used --follow, --stream or "
            "--profile wall. "
            "--force starts over."
        )
    reasons = []
    if earlier.input_sha256 != now.input_sha256:
        reasons.append("the input is different or has changed")
    then, wanted = _options_of(earlier), _options_of(now)
    words = {"None": "not set", "True": "on", "False": "off"}
    for each in then.keys() | wanted.keys():
        option = each.partition(": ")[0]  # without equal options their settings do not matter
        if then.get(each) != wanted.get(each) and (
            each == option or then.get(option) == wanted.get(option)
        ):
            values = [words.get(str(value), value) for value in (then.get(each), wanted.get(each))]
            reasons.append(f"{each} was {values[0]}, now it is {values[1]}")
    if reasons:
        raise ResumeError(
            f"cannot resume {name}: {'; '.join(sorted(reasons))}. "
            "Resume with the options of that run, or start over with --force."
        )


def _options_of(record: RunRecord) -> dict[str, object]:
    """Return the value of each option, and as "--option: name" the settings that it implies."""
    are_options = is_checkpoint(record.model) or is_hf(record.model)
    scheduling = msgspec.structs.asdict(record.scheduling)
    scheduling["prefix_cache"] = PREFIX_CACHE_WORDS[scheduling["prefix_cache"]]
    values: dict[str, object] = {
        "--model": record.model,
        "--batch": record.batch,
        "--workers": record.workers is not None,
        "--keep-order": record.keep_order,
        "--chat": record.chat,
    }
    step_time = {"name": "1 second a step", **record.step_time}
    values["--profile"] = step_time.pop("name")
    groups: list[tuple[str, Mapping[str, Any], Container[str]]] = [
        ("--model: ", record.settings, LOADING_SETTINGS if are_options else ()),
        ("--profile: ", step_time, ()),
        ("", scheduling, scheduling),
        ("", record.speculation, SPECULATION_SETTINGS),
        ("", record.defaults, OF_ROWS),
    ]
    for prefix, settings, options in groups:
        for name, value in settings.items():
            option = f"--{name.replace('_', '-')}"
            values[option if name in options else f"{prefix}{name}"] = value
    return values


def _read_record(output: str, name: str) -> RunRecord | None:
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
        f"cannot read {name}{RECORD}, the record of a run: {reason}. To continue, restore it; "
        f"to keep {name}, rename it. --force starts over."
    )


def _write_record(output: str, record: RunRecord) -> None:
    file = OutFile(output + RECORD, is_named=False)
    with file.replace(is_synced=False) as sink:
        sink.write(msgspec.json.format(msgspec.json.encode(record)) + b"\n")


# -- checksums

SUM_BYTES = 8  # of a checksum: a CRC-32, then an Adler-32


class SummedSink:
    """Writes results to another sink, and before that the checksum of each line to a file."""

    def __init__(self, results: Sink, output: str, *, append: bool) -> None:
        self._results, self.is_file = results, results.is_file
        if not append:
            Path(output + SUMS).unlink(missing_ok=True)  # if it is a link, its target stays
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

    Both find damage; neither stops a forger, as checksums can be forged, too.  Together they take a
    fifth of the time of a short blake2b.
    """
    sums = array("I", bytes(SUM_BYTES * len(lines)))
    sums[::2] = array("I", map(crc32, lines))
    sums[1::2] = array("I", map(adler32, lines))
    return sums.tobytes()


def _written_lines(output: str, name: str) -> Callable[[bytes], bool]:
    """Return a test for lines that runs have written to `output`, which messages call `name`."""
    try:
        data = Path(output + SUMS).read_bytes()
    except FileNotFoundError:
        raise ResumeError(
            f"cannot resume {name}: {name}{SUMS} is missing, and with it the checksums of the "
            f"lines that the run has written. To continue, restore it; to keep {name}, rename it. "
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


Found = tuple[int, bytes, list[Result]]
"""The number of a line in its file, the line, and its results, all of one request."""


def _read_results(
    file: BinaryIO, was_written: Callable[[bytes], bool], *, is_repairing: bool
) -> Iterator[Found]:
    """Yield the lines of `file` up to a torn one.

    is_repairing: skip lines that no run has written and second copies, instead of refusing them.
    """
    file.seek(0)
    seen = set[tuple[str, int]]()
    for number, line in enumerate(file, start=1):
        if not line.endswith(b"\n"):
            return
        try:
            if line.isspace():
                raise ResumeError("it is blank")
            results = decode_result_line(line)
            if not was_written(line):
                raise ResumeError(
                    f"the result of {results[0].id!r} is not what the run has written: "
                    "it was changed, or added by another program"
                )
        except (BatchdecodeError, RecursionError) as error:
            if is_repairing:
                continue
            raise ResumeError(f"line {number}: {error}; {REPAIR}") from error
        if is_repairing:
            names = {(result.id, _place_of(result)) for result in results}
            if names & seen:
                continue
            seen |= names
        yield number, line, results


def _place_of(result: Result) -> int:
    """Return the number of `result` among those with its id: its index, or minus its bad line.

    An id given twice is that of a request and of the bad lines that repeat it.
    """
    line = result.error.line if result.error is not None else None
    return result.index if line is None else -line


class EarlierResults:
    """The ids that an earlier run has finished, each with the offset of its result in `lines`.

    is_copy: added lines are also written to `lines`.
    end: the offset behind the last added line.
    num_results, num_failed: added results, and those of failed requests.
    """

    def __init__(self, lines: BinaryIO, *, is_copy: bool = False) -> None:
        self.end = self.num_results = self.num_failed = 0
        self.lines, self._is_copy = lines, is_copy
        self._offsets = IdRegistry()

    def add(self, number: int, line: bytes, results: list[Result]) -> None:
        """Add the next line, or raise a ResumeError if one of its results was added before."""
        offsets = self._offsets
        for result in results:
            place = _place_of(result)
            name = f"{place} {result.id}" if place >= 0 else f"{place}"
            if offsets.add(name, self.end) is not None:
                raise ResumeError(
                    f"line {number}: it is one of two results with index {result.index} "
                    f"of request {result.id!r}; {REPAIR}"
                )
            self.num_failed += result.error is not None
        self.num_results += len(results)
        if self._is_copy:
            self.lines.write(line)
        self.end += len(line)

    def lines_of(self, number: int, request: Request | None) -> list[bytes]:
        """Return the lines that answer the input line `number`, in their order."""
        place = self._offsets.find(f"{-number}")
        if place is not None or request is None:
            places = [] if place is None else [place]
        else:
            indexes = range(max(request.n, request.best_of or 0))
            found = (self._offsets.find(f"{index} {request.id}") for index in indexes)
            places = [each for each in dict.fromkeys(found) if each is not None]
            if request.best_of is not None:
                places.sort()  # the best comes first
        return [self._line_at(each) for each in places]

    def _line_at(self, offset: int) -> bytes:
        self.lines.seek(offset)
        return self.lines.readline()

    def results_of(self, request: Request) -> dict[int, Result]:
        request_id: str = request.id  # type: ignore[assignment]  # its parser has set it
        return self.find(request_id, max(request.n, request.best_of or 0))

    def find(self, request_id: str, num_outputs: int) -> dict[int, Result]:
        found = {}
        for index in range(num_outputs):
            start = self._offsets.find(f"{index} {request_id}")
            if start is not None:
                results = decode_result_line(self._line_at(start))
                found[index] = next(each for each in results if _place_of(each) == index)
        return found

    def has_rejected(self, line_number: int) -> bool:
        return self._offsets.find(f"{-line_number}") is not None


def _take_over(
    output: str,
    file: OutFile,
    options: RunOptions,
    requests: OpenInput,
    was_written: Callable[[bytes], bool],
) -> EarlierResults:
    """Return the results in `output`, and repair it, so that new results can be appended."""
    read = partial(_read_results, was_written=was_written, is_repairing=options.repair)
    is_copied = options.repair or options.retry_failed
    with ExitStack() as on_failure:
        is_whole, lines = _open(output)
        on_failure.callback(lines.close)
        retried = set[str]()
        if options.retry_failed:
            for _, _, results in read(lines):
                errors = (result.error for result in results)
                if any(error and error.code in RUN_ERROR_CODES for error in errors):
                    retried.add(results[0].id)
            for _, request in _requests_of(requests):  # samples without a result may have failed
                if request is not None and (request.best_of or request.n) > request.n:
                    retried.add(request.id or "")
        kept = lines
        if is_copied:
            kept = on_failure.enter_context(_temporary(output))
        earlier = EarlierResults(kept, is_copy=is_copied)
        for number, line, results in read(lines):
            if results[0].id not in retried:  # of a request all results or none
                earlier.add(number, line, results)
        kept.flush()
        is_whole &= earlier.end == lines.seek(0, os.SEEK_END)
        kept.truncate(earlier.end)
        if is_copied or (output.endswith(".gz") and not is_whole):
            kept.seek(0)
            with file.replace() as sink:
                copyfileobj(kept, sink, _CHUNK)
        on_failure.pop_all()
        if is_copied:
            lines.close()
    return earlier


def _temporary(output: str) -> BinaryIO:
    import tempfile  # noqa: PLC0415 - only where results are repaired

    return tempfile.TemporaryFile(dir=Path(output).resolve().parent)


def _open(output: str) -> tuple[bool, BinaryIO]:
    """Return whether `output` can be read to its end, and its lines, unpacked up to any damage."""
    if not output.endswith(".gz"):
        return True, Path(output).open("r+b")
    lines, is_whole = _temporary(output), True
    with FileIO(output) as packed:
        try:
            copyfileobj(Unpacked(packed, is_gzip=True), lines, _CHUNK)
        except (EOFError, zlib.error):
            is_whole = not packed.tell()  # an empty file is whole, too
    lines.flush()
    return is_whole, lines
