"""The records that go between the driver of a run and its workers, as MessagePack.

Rule: a line of the input is known by its index, from 0, without blank ones.  What a line is by
itself, a worker finds out; what it is beside others (an id given before), the driver does.
"""

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import msgspec
from msgspec import Struct

from batcher.events import Event, RunEvent
from batcher.metrics.summary import EngineState
from batcher.requests.diagnostics import Problem
from batcher.requests.openai import Form

Row = tuple[int, int, bytes, int]
"""What makes a `Line`, where a thousand of them are handled at once."""


class Line(Struct, frozen=True, gc=False):
    """A line of the input.

    number: as a person counts, from 1.  checksum: that of a line that is known to be a request, see
    LineParser; 0 of one that is to be looked at.
    """

    index: int
    number: int
    text: bytes
    checksum: int


class Remark(Struct, frozen=True):
    """What is odd about a line beside others.

    first_number: which line has the id of this one already; 0 if none has.
    last_arrival: that of the line before it, if this one goes back behind it.
    deaths: why the workers died that had it alone, if they were so many that it has failed.
    """

    first_number: int = 0
    last_arrival: float | None = None
    deaths: str = ""


class Lines(Struct, array_like=True):
    """Lines of the input, in its order, by what a `Line` has of each; remarks: by their indexes.

    Millions go by in thousands, so nothing is done for one of them that is not done in C.
    """

    indexes: list[int] = []
    numbers: list[int] = []
    texts: list[bytes] = []
    checksums: list[int] = []
    remarks: dict[int, Remark] = {}

    def __len__(self) -> int:
        """Return how many there are."""
        return len(self.indexes)

    def rows(self) -> Iterable[Row]:
        """Return those that there are now, one by one."""
        return zip(self.indexes, self.numbers, self.texts, self.checksums, strict=True)

    def append(self, line: Line, remark: Remark | None = None) -> None:
        """Add one more."""
        self.indexes.append(line.index)
        self.numbers.append(line.number)
        self.texts.append(line.text)
        self.checksums.append(line.checksum)
        if remark is not None:
            self.remarks[line.index] = remark

    def extend(self, more: "Lines") -> None:
        """Add those that come next."""
        self.indexes += more.indexes
        self.numbers += more.numbers
        self.texts += more.texts
        self.checksums += more.checksums
        self.remarks |= more.remarks

    def take(self, most: int) -> "Lines":
        """Return the first of them, up to so many, which are here no longer."""
        indexes, numbers, texts, checksums = columns = (
            self.indexes,
            self.numbers,
            self.texts,
            self.checksums,
        )
        taken = Lines(indexes[:most], numbers[:most], texts[:most], checksums[:most])
        for column in columns:
            del column[:most]
        if self.remarks:
            first = set(taken.indexes).intersection(self.remarks)
            taken.remarks = {index: self.remarks.pop(index) for index in first}
        return taken


class Several(NamedTuple):
    """How many results a line is answered with, and how many its best are chosen from."""

    num_results: int
    num_outputs: int


class Refused(NamedTuple):
    """What a BadLine is."""

    id: str
    problems: list[Problem]
    form: Form


# -- from the driver ------------------------------------------------------------------------------


class Check(Struct, frozen=True, tag=True):
    """Tell what these lines are; they are not decoded yet.  Answered by `Checked`."""

    numbers: list[int]
    texts: list[bytes]


class Decode(Struct, frozen=True, tag=True):
    """Answer these lines, in whatever order; in steps of all that are there."""

    lines: Lines


class Finish(Struct, frozen=True, tag=True):
    """There will be no more lines.  Answered by `Finished`, when all are answered."""


class Drop(Struct, frozen=True, tag=True):
    """Do not begin what has not begun.  Answered by `Dropped`."""


# -- from a worker --------------------------------------------------------------------------------


class Ready(Struct, frozen=True, tag=True):
    """The model is there.  run: how a trace of this worker alone would begin."""

    run: RunEvent


class Checked(Struct, frozen=True, tag=True):
    """What the lines of one `Check` are, in their order.

    ids: of the requests, and those that bad lines give.  checksums: see Line.
    bad: by the place in the list, as are the others.  several: those with more than one result.
    arrivals: of all lines, where there is one that is not 0.  sessions: those of requests with one.
    """

    ids: list[str]
    checksums: list[int]
    bad: dict[int, Refused]
    several: dict[int, Several]
    arrivals: list[float]
    sessions: dict[int, str]


class Answered(Struct, frozen=True, tag=True):
    """Lines that have been answered since the last one.

    indexes: of the lines.  answers: their results as lines of the output, one after the other.
    lengths: how many bytes of them each line is answered with.
    num_failed: how many requests have failed.  first_failure: what the model did to the first.
    said: what a person should know, in whole lines.
    events: what has happened, as the trace of the whole run has it, if it is wanted.
    num_steps: that were taken.  now: when the next one starts, in seconds of the engine's clock.
    totals: the numbers so far, see decode_totals; b"" for those of the
    report before it.  state: how the engine stands, if that is wanted.
    num_begun: lines that are in the engine.
    """

    indexes: list[int]
    answers: bytes
    lengths: list[int]
    num_failed: int = 0
    first_failure: str = ""
    said: str = ""
    events: list[Event] = []
    num_steps: int = 0
    now: float = 0.0
    totals: bytes = b""
    state: EngineState | None = None
    num_begun: int = 0

    def by_line(self) -> Iterator[tuple[int, bytes]]:
        """Yield the index of each line, and what it is answered with."""
        start = 0
        for index, length in zip(self.indexes, self.lengths, strict=True):
            yield index, self.answers[start : start + length]
            start += length


class Dropped(Struct, frozen=True, tag=True):
    """These lines will have no answer; indexes: of the lines."""

    indexes: list[int]


class Finished(Struct, frozen=True, tag=True):
    """All lines are answered, there will be no more, and all that has happened is told."""


class Failed(Struct, frozen=True, tag=True):
    """The worker cannot go on, and no other one could: the run is over.

    traceback: of what the model's code raised, if that is why.  is_input: the input is at fault.
    """

    message: str
    traceback: str = ""
    is_input: bool = False


class StoppedByModel(Struct, frozen=True, tag=True):
    """The model has raised a KeyboardInterrupt, which stops the run."""


Instruction = Check | Decode | Finish | Drop
Report = Ready | Checked | Answered | Dropped | Finished | Failed | StoppedByModel

encode = msgspec.msgpack.Encoder().encode
decode_instruction = msgspec.msgpack.Decoder(Instruction).decode
decode_report = msgspec.msgpack.Decoder(Report).decode
