"""Going on where an earlier run stopped: what it was, and what it has left behind.

Beside results.jsonl stands results.jsonl.run.json, written when a run begins and again when it has
finished.  It says what must be the same for two runs to give the same results, and keeps unfinished
results from being overwritten.
"""

from collections.abc import Container, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Self, TypeAlias

import msgspec
from msgspec.structs import replace

from batcher.events import RunEvent
from batcher.hf.settings import LOADING_SETTINGS, is_hf
from batcher.requests.lines import BadLine, ParsedLine, RequestParser
from batcher.requests.values import ModelCapabilities
from batcher.settings import DEFAULT_SCHEDULING, PREFIX_CACHE_WORDS, SchedulingSettings
from batcher.speculation.settings import SPECULATION_SETTINGS
from batcher.transformer.config import is_checkpoint

from ..config import OF_ROWS
from ..options import WALL
from ..screen.terminal import counted, printable_lines
from .files import record_path, rest_path
from .intake import OpenInput, Waiting
from .out_file import OutFile
from .output import ResumeError, Sink
from .problems import say
from .reading import RequestReader
from .run_options import RunOptions
from .sums import SummedSink, sums_path
from .urls import is_url

if TYPE_CHECKING:
    from .earlier_results import EarlierResults
    from .stored_results import StoredResults
    from .taking_over import Expected

ResultsFile: TypeAlias = "OutFile | StoredResults"

AGAIN = (
    "what is there is decoded again, but not written: with a policy, limits, drafts or a profile "
    "nothing else tells what the batch did"
)


class RunRecord(msgspec.Struct, frozen=True, kw_only=True):
    """What decides the results of a run, and whether it has come to its end.

    scheduling, step_time, speculation: as the first line of a trace has them, but with the policy.
    input_sha256: None if the run cannot be continued: its input cannot be read again, what it did
    depended on how fast it was, or there are token events among the results.
    workers: the most of any run that has gone on with it; None if it decodes in one engine.
    version: 2 since sums.py has other checksums.
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
    """How a run stands to one before it, and to one after it.

    file: that of the results.
    earlier: what the one before has left; None if there is nothing to resume.
    is_possible: this run can be resumed if it ends early.
    has_finished: the one before came to its end, and nothing of it was dropped since.
    """

    def __init__(
        self,
        leftover: "Leftover",
        record: RunRecord | None = None,
        earlier: "EarlierResults | None" = None,
        *,
        has_finished: bool = False,
    ) -> None:
        self.has_finished = has_finished
        self.earlier = earlier
        self.is_possible = record is not None and record.input_sha256 is not None
        self.file, self._output, self._record = leftover.file, leftover.output, record

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
        """Return what results are written to, behind those that were there; others are gone.

        Raises:
            OutputError: it cannot be opened.
        """
        results = self.file.open(append=self.earlier is not None)
        if not self.is_possible:
            return results
        return SummedSink(results, output, append=self.earlier is not None)

    def begin(self) -> None:
        """Write down that the run has begun.

        The file of results must be open by then, and so rid of those of another run.

        Raises:
            OutputError, WriteError: it cannot be written.
        """
        if self._output is not None and self._record is not None:
            if self.earlier is None:
                Path(rest_path(self._output)).unlink(missing_ok=True)
            _write_record(self._output, self._record)
            self.file.begin()

    def finish(self) -> None:
        """Write down that the run has come to its end.

        Raises:
            OutputError, WriteError: it cannot be written.
        """
        if self._output is not None and self._record is not None:
            _write_record(self._output, replace(self._record, finished=True))
            Path(rest_path(self._output)).unlink(missing_ok=True)
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
    if resumption.earlier is None or not resumption.has_finished:
        return None
    with waiting():
        found = _count_answered(resumption.earlier, requests, parser)
    if found is None:
        return None
    num_requests, num_failed = found
    resumption.begin()
    resumption.file.settle()
    resumption.finish()
    if not options.quiet:
        name, whole = resumption.file.name, counted(num_requests, "request")
        told = f"nothing to do: {name} has all results of {whole}"
        if num_failed:
            told += f"; {num_failed:,} failed (see --retry-failed)"
        say(printable_lines(f"{told}\n"))
    return 1 if num_failed else 0


def _count_answered(
    earlier: "EarlierResults", requests: OpenInput, parser: RequestParser
) -> tuple[int, int] | None:
    """Return how many requests there are, and how many failed; None if one lacks a result."""
    num_failed = 0
    reader = RequestReader(requests.lines(), parser)
    while (line := reader.read()) is not None:
        if isinstance(line, BadLine):
            if not earlier.has_rejected(line.id, reader.lines.number):
                return None
            num_failed += 1
            continue
        results = earlier.results_of(line.request)
        if len(results) < line.request.n:
            return None
        num_failed += any(result.error is not None for result in results.values())
    return reader.num_read, num_failed


def results_file(options: RunOptions, waiting: Waiting) -> ResultsFile:
    """Return the file of results that `options` name, which is held while it is entered.

    waiting: entered while a store is waited for.

    Raises:
        OutputError: it cannot be written.
    """
    if options.output is None or not is_url(options.output):
        return OutFile(options.output)
    from .stored_results import StoredResults  # noqa: PLC0415 - few results go elsewhere

    return StoredResults(
        options.output, waiting, is_continued=options.resume, is_forced=options.force
    )


class Leftover(NamedTuple):
    """What is there where the results of a run go.

    file: the file of results.  output: its path, None unless that is a plain file.
    record: of the run that the results are of.
    """

    file: ResultsFile
    output: str | None = None
    record: RunRecord | None = None
    has_results: bool = False


def find_leftover(options: RunOptions, requests: OpenInput, file: ResultsFile) -> Leftover:
    """Find what there is to resume, and see to it that no results are lost.

    file: that of the results, which is held.

    Raises:
        ResumeError: there are results, and they are not to be resumed, or cannot be.
    """
    output = file.path
    path = None if output is None else Path(output)
    if output is None or path is None or (path.exists() and not path.is_file()):
        if options.resume:
            raise ResumeError("--resume continues a file of results: it needs --output FILE")
        return Leftover(file)
    if options.resume:
        _check_repeatable(options, requests)
    is_filled = file.is_filled or Path(rest_path(output)).exists()
    has_results = is_filled and not options.force
    earlier = None if options.force else _read_record(output, file.name or output)
    if has_results and not options.resume:
        raise ResumeError(f"{file.name} {_why_not_replaced(earlier)}")
    sums = Path(sums_path(output))
    is_new = earlier is None and not (has_results or options.force)
    if is_new and sums.exists() and sums.stat().st_size:
        raise ResumeError(
            f"{sums} is there without the record of a run, and would be overwritten: remove it, "
            "give another --output, or use --force"
        )
    return Leftover(file, output, earlier, has_results)


def prepare(
    options: RunOptions, requests: OpenInput, leftover: Leftover, run: RunEvent
) -> Resumption:
    """Take over what there is to resume.

    run: the first line of this run's trace.

    Raises:
        ResumeError: it is not of such a run.
        OutputError: the end of the results cannot be repaired.
    """
    file, output, earlier, has_results = leftover
    if output is None:
        return Resumption(leftover)
    name = file.name or output
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
    taken_over = None
    if has_results:
        _check_same_run(name, earlier, record)
        if earlier is not None and earlier.workers is not None and record.workers is not None:
            # results may name slots of all
            record = replace(record, workers=max(record.workers, earlier.workers))
        taken_over = _take_over(file, output, record, options, requests)
    has_finished = earlier is not None and earlier.finished and taken_over is not None
    is_whole = has_finished and not (options.repair or options.retry_failed)
    return Resumption(leftover, record, taken_over, has_finished=is_whole)


def _take_over(
    file: ResultsFile, output: str, record: RunRecord, options: RunOptions, requests: OpenInput
) -> "EarlierResults":
    """Return what the run before has left in `output`, without what is decoded again."""
    from .earlier_results import ResultLines, written_lines  # noqa: PLC0415 - most runs begin anew
    from .taking_over import Omission, take_over  # noqa: PLC0415 - as above

    name = file.name or output
    dropped: frozenset[str] = frozenset()
    if options.retry_failed:  # samples without a result may have failed
        found = (each.parsed.request for each in _expected(requests) if each.parsed is not None)
        dropped = frozenset(r.id or "" for r in found if (r.best_of or r.n) > r.n)
    omission = Omission(options.repair, options.retry_failed, dropped)
    if options.repair or options.retry_failed:
        _write_record(output, record)  # from here on, results may be missing
    return take_over(
        output,
        ResultLines(
            record.batch * (record.workers or 1),
            written_lines(output, name),
            is_repairing=options.repair,
        ),
        file=file if isinstance(file, OutFile) else None,
        name=name,
        expected=_expected(requests) if options.keep_order else None,
        omission=omission,
    )


def _why_not_replaced(earlier: RunRecord | None) -> str:
    """Return what a file holds that `earlier` is the record of, and how to go on."""
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


def _expected(requests: OpenInput) -> "Iterator[Expected]":
    """Yield what the lines of the input are by themselves, each with its number."""
    from .taking_over import Expected  # noqa: PLC0415 - see _take_over

    lines, parser = requests.lines(), parser_for_any_model()
    while (line := lines.read()) is not None:
        parsed = parser.parse(line, lines.number)
        yield Expected(lines.number, parsed if isinstance(parsed, ParsedLine) else None)


def _check_repeatable(options: RunOptions, requests: OpenInput) -> None:
    """Make sure that a run with these options does the same each time.

    Raises:
        ResumeError: it does not.
    """
    if not requests.is_file:
        raise ResumeError("--resume needs the requests in a file: a pipe cannot be read again")
    if options.follow:
        raise ResumeError("--resume and --follow exclude each other: following depends on timing")
    if options.scheduling.profile == WALL:
        raise ResumeError(
            "--resume and --profile wall exclude each other: what a run does then depends on "
            "how fast it is"
        )


def _check_same_run(name: str, earlier: RunRecord | None, now: RunRecord) -> None:
    """Make sure that the results of `earlier` are those that `now` would give.

    Raises:
        ResumeError: they are not; the message says why.
    """
    if earlier is None:
        raise ResumeError(
            f"cannot resume {name}: {record_path(name)} is missing, "
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
    reasons += _changes(_scheduling(earlier), _scheduling(now), _scheduling(now))
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


def _scheduling(record: RunRecord) -> dict[str, Any]:
    settings = {"batch": record.batch, **msgspec.structs.asdict(record.scheduling)}
    return settings | {"prefix_cache": PREFIX_CACHE_WORDS[settings["prefix_cache"]]}


def _changes(
    earlier: Mapping[str, Any], now: Mapping[str, Any], options: Container[str] = ()
) -> list[str]:
    """Return which values are not the same; the names that are options are shown as such."""
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
    """Return the record beside `output`, which messages call `name`; None if there is none.

    Raises:
        ResumeError: it cannot be read.
    """
    try:
        return msgspec.json.decode(Path(record_path(output)).read_bytes(), type=RunRecord)
    except FileNotFoundError:
        return None
    except OSError as error:
        reason = error.strerror
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        where = str(error).partition(" - at `$.")[2].rstrip("`")
        what = f"its `{where}` is not" if where else "it is damaged, or not"
        reason = f"{what} what this version of batchdecode writes"
    raise ResumeError(
        f"cannot read {record_path(name)}, the record of a run: {reason}. To go on, put it back as "
        f"it was; to keep {name}, give it another name. --force starts over."
    )


def _write_record(output: str, record: RunRecord) -> None:
    """Put `record` beside `output`, at once and whole.

    Raises:
        OutputError, WriteError: it cannot be written.
    """
    file = OutFile(record_path(output), is_named=False)
    with file.replace(is_synced=False) as sink:
        sink.write(msgspec.json.format(msgspec.json.encode(record)) + b"\n")
