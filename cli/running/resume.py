"""Going on where an earlier run stopped: what it was, and what it has left behind.

Beside results.jsonl stands results.jsonl.run.json, written when a run begins and again when it has
finished.  It says what must be the same for two runs to give the same results, and keeps unfinished
results from being overwritten.
"""

from collections.abc import Collection, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Self

import msgspec
from msgspec.structs import replace

from batcher.events import RunEvent
from batcher.formats.requests import ParsedLine, RequestParser
from batcher.hf.settings import LOADING_SETTINGS, is_hf
from batcher.settings import DEFAULT_SCHEDULING, PREFIX_CACHE_WORDS, SchedulingSettings
from batcher.speculation.settings import SPECULATION_SETTINGS
from batcher.transformer.settings import is_checkpoint
from batcher.validation import ModelCapabilities

from ..commands.run import RunOptions
from ..config import OF_ROWS
from ..options import WALL
from ..screen.cells import counted
from .files import record_path, rest_path
from .intake import OpenInput
from .out_file import OutFile
from .output import ResumeError, Sink
from .results_file import ResultsFile
from .sums import SummedSink, sums_path

if TYPE_CHECKING:
    from .earlier_results import EarlierResults
    from .taking_over import Expected


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
        self._file, self._output, self._record = leftover.file, leftover.output, record

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
        there = f"{self._file.name} has {counted(self.earlier.num_results, 'result')}"
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
        results = self._file.open(append=self.earlier is not None)
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
            self._file.begin()

    def finish(self) -> None:
        """Write down that the run has come to its end.

        Raises:
            OutputError, WriteError: it cannot be written.
        """
        if self._output is not None and self._record is not None:
            _write_record(self._output, replace(self._record, finished=True))
            Path(rest_path(self._output)).unlink(missing_ok=True)
            self._file.finish()


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
    if earlier is None and not (has_results or options.force):
        _check_beside_nothing(output)
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
        record = _with_slots_of(record, earlier)
        taken_over = _take_over(file, output, record, options, requests)
    has_finished = earlier is not None and earlier.finished and taken_over is not None
    is_whole = has_finished and not (options.repair or options.retry_failed)
    return Resumption(leftover, record, taken_over, has_finished=is_whole)


def _with_slots_of(record: RunRecord, earlier: RunRecord | None) -> RunRecord:
    """Return `record` with as many workers as either run has: results may name slots of all."""
    if earlier is None or earlier.workers is None or record.workers is None:
        return record
    return replace(record, workers=max(record.workers, earlier.workers))


def _take_over(
    file: ResultsFile, output: str, record: RunRecord, options: RunOptions, requests: OpenInput
) -> "EarlierResults":
    """Return what the run before has left in `output`, without what is decoded again."""
    from .earlier_results import ResultLines, written_lines  # noqa: PLC0415 - most runs begin anew
    from .taking_over import Omission, take_over  # noqa: PLC0415 - as above

    name = file.name or output
    dropped = _with_unseen_samples(requests) if options.retry_failed else frozenset()
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


def _check_beside_nothing(output: str) -> None:
    """Make sure that no checksums are there which no record is beside: nobody knows whose.

    Raises:
        ResumeError: there are some.
    """
    path = Path(sums_path(output))
    if path.exists() and path.stat().st_size:
        raise ResumeError(
            f"{path} is there without the record of a run, and would be overwritten: remove it, "
            "give another --output, or use --force"
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


def _with_unseen_samples(requests: OpenInput) -> frozenset[str]:
    """Return the ids of the requests of whose samples some have no result, so may have failed."""
    found = (each.parsed.request for each in _expected(requests) if each.parsed is not None)
    return frozenset(
        request.id or "" for request in found if (request.best_of or request.n) > request.n
    )


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
        reasons += _model_differences(now.model, earlier.settings, now.settings)
    if earlier.batch != now.batch:
        reasons.append(f"--batch was {earlier.batch}, now it is {now.batch}")
    reasons += _scheduling_differences(earlier, now)
    if earlier.speculation != now.speculation:
        reasons += _speculation_differences(earlier.speculation, now.speculation)
    if earlier.keep_order != now.keep_order:
        reasons.append(f"it was begun {'with' if earlier.keep_order else 'without'} --keep-order")
    if earlier.chat != now.chat:
        reasons.append(f"it was begun {'with' if earlier.chat else 'without'} --chat")
    reasons += _differences(*(_as_options(record.defaults, OF_ROWS) for record in (earlier, now)))
    if reasons:
        raise ResumeError(
            f"cannot resume {name}: {'; '.join(reasons)}. "
            "Resume with what it was begun with, or start over with --force."
        )


_SHOWN = {None: "not set", True: "on", False: "off"}  # as an option has them


def _model_differences(model: str, earlier: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """Return which settings of a model are not the same; those of a checkpoint are options."""
    if not (is_checkpoint(model) or is_hf(model)):
        return _differences(earlier, now)
    return _differences(*(_as_options(settings, LOADING_SETTINGS) for settings in (earlier, now)))


def _as_options(settings: dict[str, Any], names: Collection[str]) -> dict[str, Any]:
    return {
        f"--{name.replace('_', '-')}" if name in names else name: _SHOWN[value]
        if value is None or isinstance(value, bool)
        else value
        for name, value in settings.items()
    }


def _differences(earlier: dict[str, Any], now: dict[str, Any]) -> list[str]:
    return [
        f"{name} was {earlier.get(name, 'not set')}, now it is {now.get(name, 'not set')}"
        for name in sorted(earlier.keys() | now.keys())
        if earlier.get(name, "not set") != now.get(name, "not set")
    ]


def _scheduling_differences(earlier: RunRecord, now: RunRecord) -> list[str]:
    then_values, now_values = (
        msgspec.structs.asdict(record.scheduling) for record in (earlier, now)
    )
    reasons = [
        f"--{name.replace('_', '-')} was {_setting(name, then_values[name])}, "
        f"now it is {_setting(name, value)}"
        for name, value in now_values.items()
        if value != then_values[name]
    ]
    if (earlier.workers is None) != (now.workers is None):
        reasons.append(f"it was begun {'with' if now.workers is None else 'without'} --workers")
    then_name, now_name = (
        record.step_time.get("name", "1 second a step") for record in (earlier, now)
    )
    if then_name != now_name:
        reasons.append(f"--profile was {then_name}, now it is {now_name}")
    else:
        differences = _differences(earlier.step_time, now.step_time)
        reasons += [f"--profile: {difference}" for difference in differences]
    return reasons


def _speculation_differences(then: dict[str, Any], now: dict[str, Any]) -> list[str]:
    return [
        f"--{name.replace('_', '-')} was {then.get(name, 'not set')}, "
        f"now it is {now.get(name, 'not set')}"
        for name in SPECULATION_SETTINGS
        if then.get(name) != now.get(name)
    ]


def _setting(name: str, value: Any) -> str:
    """Return a setting as its option is given."""
    if name == "prefix_cache":
        return PREFIX_CACHE_WORDS[value]
    return "not set" if value is None else str(value)


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
