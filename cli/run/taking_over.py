"""Takes over a file of results that an earlier run has left: what is kept of it, and where.

Rule: a file is changed by cutting off its end, or replaced at once, so that a crash loses nothing.
"""

import os
import zlib
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import BinaryIO, NamedTuple

from batcher.requests.lines import ParsedLine

from .earlier_results import EarlierResults, ResultLine, ResultLines, number_of
from .files import rest_path
from .out_file import OutFile
from .output import OutputError, ResumeError

_CHUNK_BYTES = 2**20


class Expected(NamedTuple):
    """A line of the input: its number, and the request it holds, None if it holds none."""

    number: int
    parsed: ParsedLine | None


class Omission(NamedTuple):
    """What of a file is left out: lines that are there twice, and what is decoded again.

    drops_failed: what has failed.  dropped_ids: the requests of which any results go.
    """

    drops_repeated: bool = False
    drops_failed: bool = False
    dropped_ids: frozenset[str] = frozenset()

    def drops(self, answer: list[ResultLine]) -> bool:
        """Return whether the lines that answer a request are left out."""
        return self.drops_failed and any(
            found.has_failed or found.id in self.dropped_ids for found in answer
        )


def take_over(
    output: str,
    reader: ResultLines,
    *,
    file: OutFile | None = None,
    name: str | None = None,
    expected: Iterable[Expected] | None = None,
    omission: Omission = Omission(),  # noqa: B008 - it never changes
) -> EarlierResults:
    """Return the results in the file `output` and repair its end, so that it can be appended to.

    file: has it locked.  name: as messages call it, if not so.
    expected: the lines of the input, if the results are in their order.

    Raises:
        ResumeError: the file holds something else.
        OutputError: it cannot be repaired.
    """
    file = file or OutFile(output)
    try:
        with ExitStack() as on_failure:
            is_whole, lines = _open(output)
            on_failure.callback(lines.close)
            if omission.drops_repeated or (omission.drops_failed and expected is None):
                lines = _chosen(file, lines, reader, omission if expected is None else Omission())
                on_failure.callback(lines.close)
                is_whole = not output.endswith(".gz")
            earlier = EarlierResults(lines)
            if expected is None:
                for found in reader.read(lines):
                    earlier.add(found)
                end = earlier.end
            else:
                end = _take_in_order(
                    output,
                    earlier,
                    lines,
                    _Answers(reader, omission),
                    expected,
                )
            earlier.finish()
            is_whole &= end == lines.seek(0, os.SEEK_END)
            lines.truncate(end)
            if output.endswith(".gz") and not is_whole:
                _put(lines, file)
            if earlier.lines is not lines:
                lines.close()
            on_failure.pop_all()
    except ResumeError as error:
        raise ResumeError(f"cannot resume {name or output}: {error}") from error
    except OSError as error:
        raise OutputError(f"cannot continue {output}: {error.strerror}") from error
    return earlier


def _chosen(file: OutFile, lines: BinaryIO, reader: ResultLines, omission: Omission) -> BinaryIO:
    """Return a file of those of `lines` that are kept; it replaces `file`, unless that is packed.

    No result is kept twice, and of a request all or none.
    """
    output = file.path or ""
    dropped = {found.id for found in reader.read(lines) if omission.drops([found])}
    seen: set[tuple[str, int]] = set()
    chosen = _temporary(output)
    for found in reader.read(lines):
        names = {(result.id, number_of(result)) for result in found.results}
        if found.id not in dropped and not names & seen:
            chosen.write(found.line)
            seen |= names
    lines.close()
    if output.endswith(".gz"):
        return chosen
    with chosen:
        _put(chosen, file)
    return Path(output).open("r+b")


class _Answers:
    """Finds what answers one line of the input after the other, in files that have their order."""

    def __init__(self, reader: ResultLines, omission: Omission) -> None:
        self._reader, self._omission = reader, omission
        self._files: list[Iterator[ResultLine]] = []
        self._heads: list[ResultLine | None] = []

    def open(self, lines: BinaryIO) -> None:
        """Look into this file, too."""
        self._files.append(self._reader.read(lines))
        self._heads.append(next(self._files[-1], None))

    def take(self, wanted: Expected) -> list[list[ResultLine]]:
        """Return the answer to `wanted` in each file, nothing if it is not whole, or dropped."""
        return [self._take(number, wanted) for number in range(len(self._files))]

    def _take(self, number: int, wanted: Expected) -> list[ResultLine]:
        answer = []
        while (head := self._heads[number]) is not None and _belongs(head, wanted):
            answer.append(head)
            self._heads[number] = next(self._files[number], None)
        is_kept = _is_complete(answer, wanted) and not self._omission.drops(answer)
        return answer if is_kept else []


def _take_in_order(
    output: str,
    earlier: EarlierResults,
    lines: BinaryIO,
    answers: _Answers,
    expected: Iterable[Expected],
) -> int:
    """Find what answers `expected`; return where the first gap is in `lines`, those of `output`.

    What was there of those behind it goes into a file of its own, with all that is before.
    """
    path = Path(rest_path(output))
    end, rest = 0, None
    with ExitStack() as sources:
        answers.open(lines)
        if path.exists():
            answers.open(sources.enter_context(path.open("rb")))
        for place, wanted in enumerate(expected):
            groups = answers.take(wanted)
            if groups[0] and earlier.num_complete == place:
                for found in groups[0]:
                    earlier.add(found)
                earlier.num_complete, end = place + 1, earlier.end
            elif any(groups):
                if rest is None:
                    rest = _copy_of(lines, end, output)
                start = earlier.end
                for found in next(filter(None, groups)):
                    rest.write(found.line)
                    earlier.add(found)
                earlier.keep(place, start)
    if rest is not None:
        _put(rest, OutFile(str(path), is_named=False))
        earlier.lines = rest  # which has all that is known at the same places
    return end


def _belongs(found: ResultLine, wanted: Expected) -> bool:
    """Return whether a line is part of the answer to `wanted`."""
    number = number_of(found.results[0])
    if number < 0:
        return -number == wanted.number
    return wanted.parsed is not None and found.id == wanted.parsed.request.id


def _is_complete(answer: list[ResultLine], wanted: Expected) -> bool:
    """Return whether nothing is missing from the answer to `wanted`."""
    results = [result for found in answer for result in found.results]
    if wanted.parsed is None or (results and number_of(results[0]) < 0):
        return bool(results)
    return len(results) >= wanted.parsed.request.n


def _copy_of(lines: BinaryIO, size: int, output: str) -> BinaryIO:
    """Return a new file with the first bytes of `lines`, whose position stays."""
    copy = _temporary(output)
    offset = 0
    while chunk := os.pread(lines.fileno(), min(_CHUNK_BYTES, size - offset), offset):
        copy.write(chunk)
        offset += len(chunk)
    return copy


def _temporary(output: str) -> BinaryIO:
    """Return a file without a name on the disk of `output`."""
    import tempfile  # noqa: PLC0415 - only where results are mended

    return tempfile.TemporaryFile(dir=Path(output).resolve().parent)


def _open(output: str) -> tuple[bool, BinaryIO]:
    """Return whether `output` can be read to its end, and what can be read of it, unpacked."""
    if not output.endswith(".gz"):
        return True, Path(output).open("r+b")
    lines = _temporary(output)
    with Path(output).open("rb") as packed:
        is_whole = unpack(packed, lines)
    lines.flush()
    return is_whole, lines


def unpack(packed: BinaryIO, lines: BinaryIO) -> bool:
    """Write to `lines` what `packed` holds before any damage; return whether there is none."""
    decompressor = zlib.decompressobj(wbits=31)
    is_whole = True
    while chunk := packed.read(_CHUNK_BYTES):
        while chunk:
            if decompressor.eof:  # a run that was resumed has left more than one stream
                decompressor = zlib.decompressobj(wbits=31)
            try:
                lines.write(decompressor.decompress(chunk))
            except zlib.error:
                return False
            chunk = decompressor.unused_data
        is_whole = decompressor.eof
    return is_whole


def _put(lines: BinaryIO, file: OutFile) -> None:
    """Let `lines` be what `file` holds, at once."""
    lines.seek(0)
    with file.replace() as sink:
        while chunk := lines.read(_CHUNK_BYTES):
            sink.write(chunk)
