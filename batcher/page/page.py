"""One HTML file with runs in it and all that shows them: it loads nothing, and runs nothing else.

Rule: what comes from a run is in the file as base64 alone, or escaped by `report`; and a browser is
told to run the scripts of the page and no others.
"""

import base64
import html
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from hashlib import sha256
from importlib.resources import files
from itertools import islice, repeat
from math import nan
from operator import attrgetter, itemgetter
from typing import Any, Generic, Literal, NamedTuple, TypeVar, get_args

import msgspec
import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from batcher.events import BlockedReason, Event, FinishEvent, PreemptReason, RejectEvent, Role
from batcher.explaining.story import (
    GAVE_WAY,
    SHORT_CAUSES,
    STANDSTILLS,
    Arrival,
    Cause,
    RequestEnd,
    StoryDrafts,
    StoryRetry,
    computes_at_once,
)
from batcher.page import START
from batcher.result import FinishReason
from batcher.trace.run import AdmissionRecord, BlockedSpan, RequestTimeline, SlotSpan, aging_of
from batcher.trace.timeline import SortedRecords, Timeline

# Tables packed for a page: blocks of columns, each an array of one type, as base64 of one gzip.
#
# A block is the length of its header (4 bytes, the least first), the header in JSON and the bytes
# of its columns, one after the other.  Those of numbers are put by their places, the least first
# of all, which packs better.  assets/unpack.js reads it.
#
# Rule: a block is written as soon as it is made, so what is in memory does not grow with the rows.

ROWS_OF_BLOCK = 2**14
_MAX_WHOLE = 2**32 - 1
_WIDTHS = ((1, 2**8), (2, 2**16), (4, 2**32))
_BYTES_OF_GROUP = 3  # that base64 makes four characters of

Row = TypeVar("Row")
Kind = Literal["number", "ascending", "text"]


class TableColumn(NamedTuple, Generic[Row]):
    """A column: what is in it, and how to find that in a row.

    number: a whole one or a float.  ascending: whole ones of which most are a little more than the
    one before.
    """

    kind: Kind
    of: Callable[[Row], Any]


class _Packed(NamedTuple):
    """The bytes of a column, and what the header of its block says of them."""

    content: bytes
    said: dict[str, Any]


def table(
    name: str, columns: Mapping[str, TableColumn[Row]], rows: Iterable[Row]
) -> Iterator[bytes]:
    """Yield the blocks of a table; one without rows has none."""
    remaining = iter(rows)
    while block := list(islice(remaining, ROWS_OF_BLOCK)):
        packed = [
            (title, _pack(column.kind, [column.of(row) for row in block]))
            for title, column in columns.items()
        ]
        header = {
            "table": name,
            "rows": len(block),
            "columns": [{"name": title} | column.said for title, column in packed],
        }
        yield _block(header, b"".join(column.content for _, column in packed))


def value(name: str, content: object) -> bytes:
    """Return the block that is one value, as JSON."""
    return _block({"value": name}, msgspec.json.encode(content))


def packed_lines(blocks: Iterable[bytes]) -> Iterator[bytes]:
    """Yield `blocks`, packed, as lines of base64; equal blocks give equal lines."""
    compressor, rest = zlib.compressobj(wbits=31), b""
    for block in blocks:
        rest += compressor.compress(block)
        whole = len(rest) // _BYTES_OF_GROUP * _BYTES_OF_GROUP
        if whole:
            yield base64.b64encode(rest[:whole]) + b"\n"
            rest = rest[whole:]
    yield base64.b64encode(rest + compressor.flush()) + b"\n"


def _block(header: Mapping[str, Any], body: bytes) -> bytes:
    encoded = msgspec.json.encode(dict(header, bytes=len(body)))
    return len(encoded).to_bytes(4, "little") + encoded + body


def _pack(kind: Kind, values: list[Any]) -> _Packed:
    if kind == "text":
        return _pack_texts(values)
    numbers = np.array(values, dtype=np.float64)
    is_whole = bool((numbers == np.floor(numbers)).all())
    is_whole = is_whole and numbers.min() >= 0 and numbers.max() <= _MAX_WHOLE
    if kind == "ascending" and is_whole:
        steps = np.diff(numbers, prepend=0.0)
        folded = np.where(steps < 0, -2 * steps - 1, 2 * steps)  # 0, -1, 1, -2 as 0, 1, 2, 3
        if folded.max() <= _MAX_WHOLE:
            return _pack_numbers(folded, "ascending")
    if is_whole:
        return _pack_numbers(numbers, "whole")
    return _Packed(_by_place(numbers), {"as": "float", "width": 8})


def _pack_numbers(numbers: NDArray[np.float64], how: str) -> _Packed:
    width = next(width for width, limit in _WIDTHS if numbers.max() < limit)
    return _Packed(_by_place(numbers.astype(f"<u{width}")), {"as": how, "width": width})


def _by_place(numbers: NDArray[Any]) -> bytes:
    """Return the lowest bytes of all `numbers`, then the next ones, and so on."""
    in_order = numbers.astype(numbers.dtype.newbyteorder("<"))
    return in_order.view(np.uint8).reshape(len(in_order), -1).T.tobytes()


def _pack_texts(texts: list[str]) -> _Packed:
    """Return texts as their lengths in JavaScript, which counts in UTF-16, and all in UTF-8."""
    lengths = [
        len(text) if text.isascii() else len(text.encode("utf-16-le")) // 2 for text in texts
    ]
    packed = _pack("number", lengths)
    joined = "".join(texts).encode()
    said = {"as": "text", "width": packed.said["width"], "bytes": len(joined)}
    return _Packed(packed.content + joined, said)


# The timeline of a page: with all that the stories of its sequences are made of.
#
# Rule: of a sequence that has ended nothing stays in memory but what sorted records keep of all.

_encoder = msgspec.json.Encoder()


class PageSequence(Struct, frozen=True):
    """A sequence, as a story tells of it.

    arrived: None if nothing tells of that.
    ended: None if nothing tells; its time is that of its event, `in_slot` or not.
    """

    id: str
    index: int
    role: Role
    num_rows: int
    arrived: Arrival | None
    ended: RequestEnd | None
    in_slot: bool


class SpanDetail(Struct, frozen=True):
    """What a story tells of a slot span, and a SlotSpan does not.

    sequence: the number of the one that held the slot.  has_first_token: whether a step was through
    with what it began with.  has_share: whether the step that admitted it computed any of that.
    more: drafts, retries, and the later steps that computed some, as JSON; "" for nothing.
    """

    sequence: int
    has_first_token: bool
    has_share: bool
    more: str


class PageTimeline(Timeline):
    """A timeline that keeps of its sequences what a page tells of them, beside their spans.

    sequences: as they became known, which is how they are numbered.  details: of the spans, in
    their order.  rejects: the lines that were no requests.
    """

    def __init__(self) -> None:
        super().__init__()
        self.sequences = SortedRecords[PageSequence](PageSequence)
        self.details = SortedRecords[SpanDetail](SpanDetail)
        self.rejects = SortedRecords[RejectEvent](RejectEvent)
        self._open: dict[int, tuple[int, RequestTimeline]] = {}  # by identity, with their numbers
        self._num_known = 0

    def add(self, event: Event) -> RequestTimeline | None:
        """Take in the next event, as every timeline does."""
        found = super().add(event)
        if self.parts:
            return found
        if isinstance(event, RejectEvent):
            self.rejects.add((len(self.rejects),), event)
        if found is None:
            return None
        if found.first_event is event:
            self._open[id(found)] = self._num_known, found
            self._num_known += 1
        if type(event) is FinishEvent and id(found) in self._open:
            self._keep(*self._open.pop(id(found)))
        return found

    def close(self) -> None:
        """End what has not ended where the events break off."""
        for number, found in self._open.values():
            self._keep(number, found)
        self._open.clear()
        super().close()

    def _keep(self, number: int, found: RequestTimeline) -> None:
        """Record a sequence of which all is known, and what its spans do not tell."""
        arrive, finish = found.arrive, found.finish
        sequence = PageSequence(
            id=found.id,
            index=found.index,
            role=found.role,
            num_rows=found.num_rows,
            arrived=None if arrive is None else Arrival.by(arrive, finish),
            ended=None if finish is None else RequestEnd.by(finish, finish.time),
            in_slot=found.admission is not None,
        )
        self.sequences.add((number,), sequence)
        for admission in found.admissions:
            detail = SpanDetail(
                number,
                admission.first_token is not None,
                computes_at_once(found, admission),
                _more(admission),
            )
            self.details.add((admission.event.step, admission.event.slot), detail)


def _more(admission: AdmissionRecord) -> str:
    """Return what few spans have, as JSON; "" for nothing."""
    told: dict[str, object] = {}
    if admission.drafts is not None:
        told["drafts"] = StoryDrafts.of(admission.drafts)
    if admission.retries:
        told["retries"] = [StoryRetry.by(event) for event in admission.retries]
    if admission.chunks:
        told["chunks"] = admission.chunks
    return _encoder.encode(told).decode() if told else ""


# The tables of a page: what it is told of a run, column by column; assets/run.js reads them.
#
# Rule: nothing is left out, so that spans, and the story of every request, follow from the tables.

OUTCOMES = ("", "preempted", *get_args(FinishReason), "unused", "lost")
ROLES: tuple[str, ...] = get_args(Role)
REASONS: tuple[str, ...] = get_args(BlockedReason)
_RARE_OF_SPANS = ("forks", "preemption", "cached_from")
_json_encoder = msgspec.json.Encoder()


class _Span(NamedTuple):
    """A row of the table of spans."""

    span: SlotSpan
    detail: SpanDetail
    first_slot: int


def _bits(*names: str) -> Callable[[Any], int]:
    """Return what makes one number of some yes-or-no fields, the first being its lowest bit."""
    fields = [attrgetter(name) for name in names]
    return lambda row: sum(bool(field(row)) << bit for bit, field in enumerate(fields))


def _more_of_span(row: _Span) -> str:
    """Return what few spans have, as JSON; "" for nothing."""
    told = {name: found for name in _RARE_OF_SPANS if (found := getattr(row.span, name))}
    if not told:
        return row.detail.more
    own = msgspec.json.decode(row.detail.more) if row.detail.more else {}
    return _json_encoder.encode(own | told).decode()


def _more_of_sequence(row: PageSequence) -> str:
    """Return what few sequences have, as JSON; "" for nothing."""
    told: dict[str, Any] = {}
    if row.arrived is not None and row.arrived.dropped_turns:
        told["dropped_turns"] = row.arrived.dropped_turns
        told["dropped_tokens"] = row.arrived.dropped_tokens
    for name in ("limit", "error"):
        if (found := getattr(row.ended, name, None)) is not None:
            told[name] = found
    if row.ended is not None and not row.in_slot:
        told["end_time"] = row.ended.time
    return _json_encoder.encode(told).decode() if told else ""


def _place_of(row: _Span) -> int:
    """Return the number of a slot among those of its worker."""
    return row.span.slot - row.first_slot


def _span_number(name: str) -> TableColumn[_Span]:
    return TableColumn("number", attrgetter(f"span.{name}"))


_SPANS: Mapping[str, TableColumn[_Span]] = {
    "start": TableColumn("ascending", attrgetter("span.start")),
    "steps": TableColumn("number", lambda row: row.span.end - row.span.start),
    "slot": TableColumn("number", _place_of),
    "sequence": TableColumn("ascending", attrgetter("detail.sequence")),
    "outcome": TableColumn("number", lambda row: OUTCOMES.index(row.span.outcome or "")),
    "flags": TableColumn(
        "number",
        _bits("span.dropped", "span.resumed", "detail.has_first_token", "detail.has_share"),
    ),
    "prefill": _span_number("prefill"),
    "cached": _span_number("cached"),
    "generated": _span_number("generated"),
    "jumped": _span_number("jumped"),
    "drafted": _span_number("drafted"),
    "accepted": _span_number("accepted"),
    "more": TableColumn("text", _more_of_span),
}
_SEQUENCES: Mapping[str, TableColumn[PageSequence]] = {
    "id": TableColumn("text", attrgetter("id")),
    "index": TableColumn("number", attrgetter("index")),
    "role": TableColumn("number", lambda row: ROLES.index(row.role)),
    "num_rows": TableColumn("number", attrgetter("num_rows")),
    "arrived": TableColumn("ascending", lambda row: row.arrived.step if row.arrived else 0),
    "time": TableColumn("number", lambda row: row.arrived.time if row.arrived else nan),
    "prompt": TableColumn("number", lambda row: row.arrived.prompt_tokens if row.arrived else 0),
    "limit": TableColumn("number", lambda row: row.arrived.max_tokens if row.arrived else 0),
    "last": TableColumn("ascending", lambda row: row.ended.step if row.ended else 0),
    "reason": TableColumn(
        "number", lambda row: OUTCOMES.index(row.ended.reason if row.ended else "")
    ),
    "tokens": TableColumn("number", lambda row: row.ended.tokens if row.ended else 0),
    "flags": TableColumn("number", _bits("in_slot")),
    "more": TableColumn("text", _more_of_sequence),
}
_BLOCKED: Mapping[str, TableColumn[BlockedSpan]] = {
    "start": TableColumn("ascending", attrgetter("start")),
    "end": TableColumn("ascending", attrgetter("end")),
    "id": TableColumn("text", attrgetter("id")),
    "index": TableColumn("number", attrgetter("index")),
    "reason": TableColumn("number", lambda row: REASONS.index(row.reason)),
    "blocks": TableColumn("number", attrgetter("blocks")),
}
_REJECTS: Mapping[str, TableColumn[RejectEvent]] = {
    "id": TableColumn("text", attrgetter("id")),
    "event": TableColumn("text", lambda row: _json_encoder.encode(row).decode()),
}
_SERIES: Mapping[str, TableColumn[tuple[int, int]]] = {
    "step": TableColumn("ascending", itemgetter(0)),
    "value": TableColumn("number", itemgetter(1)),
}
_STARTS: Mapping[str, TableColumn[tuple[int, float]]] = {
    "step": TableColumn("ascending", itemgetter(0)),
    "time": TableColumn("number", itemgetter(1)),
}


def blocks_of(timeline: PageTimeline, name: str) -> Iterator[bytes]:
    """Yield what a page is told of the run that is called `name`, block by block."""
    first_slot = timeline.slots.start
    yield value("run", _facts(timeline, name) | {"first_slot": first_slot})
    spans = map(_Span, timeline.spans, timeline.details, repeat(first_slot))
    yield from table("spans", _SPANS, spans)
    yield from table("sequences", _SEQUENCES, timeline.sequences)
    yield from table("blocked", _BLOCKED, timeline.blocked)
    yield from table("rejects", _REJECTS, timeline.rejects)
    for title, series in _series(timeline).items():
        yield from table(title, _SERIES, _changes(series))
    yield from _times(timeline)


def _facts(timeline: Timeline, name: str) -> dict[str, Any]:
    """Return what is told of the run as a whole; assets/run.js says what each is for."""
    return {
        "name": name,
        "run": timeline.run,
        "num_steps": timeline.num_steps,
        "num_requests": timeline.num_requests,
        "num_outputs": timeline.num_outputs,
        "has_times": timeline.has_figures,
        "is_timed": bool(timeline.run.step_time),
        "aging": aging_of(timeline.run),
        "told_steps": len(timeline.figures.ends),
        "restarts": timeline.restarts,
        "outcomes": OUTCOMES,
        "roles": ROLES,
        "reasons": REASONS,
    }


def _series(timeline: Timeline) -> dict[str, Iterable[tuple[int, int]]]:
    """Return what there is of each step, by name, as steps and the values from there on."""
    found: dict[str, Iterable[tuple[int, int]]] = {
        "slots": ((start, number) for start, _, number in timeline.occupied()),
        "waiting": ((start, number) for start, _, number in timeline.waiting()),
    }
    if timeline.has_figures:
        figures = timeline.figures
        found["tokens"] = enumerate(figures.tokens)
        found["blocks"] = enumerate(figures.blocks)
        found["standstill"] = enumerate(int(not decodes) for decodes in figures.decodes)
    return found


def _changes(series: Iterable[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """Yield those of `series` that differ from the one before."""
    last = None
    for step, number in series:
        if number != last:
            yield step, number
            last = number


def _times(timeline: Timeline) -> Iterator[bytes]:
    """Yield when steps began and ended, as far as that is told."""
    figures = timeline.figures
    ends: Mapping[str, TableColumn[float]] = {"time": TableColumn("number", float)}
    yield from table("ends", ends, figures.ends)
    yield from table("starts", _STARTS, figures.starts())


SCRIPTS = (
    "d3.min.js",
    "unpack.js",
    "run.js",
    "story.js",
    "view.js",
    "chart.js",
    "panel.js",
    "controls.js",
    "page.js",
)
"""In the order in which each finds what it needs."""


class PageRun(NamedTuple):
    """A run, or a worker of one, that a page shows."""

    name: str
    timeline: PageTimeline


def page_runs(timelines: Sequence[PageTimeline], title: str) -> list[PageRun]:
    """Return what a page shows of a run: each worker as one, or the run itself if there is one."""
    if len(timelines) == 1:
        return [PageRun(title, timelines[0])]
    return [
        PageRun(f"{title}, worker {worker}", timeline) for worker, timeline in enumerate(timelines)
    ]


def title_of(path: str) -> str:
    """Return what a run is called on a page: its file without the folders."""
    return path.rpartition("/")[2]


def page_title(name: str) -> str:
    """Return the title of a document about what is called `name`, as HTML."""
    return html.escape(f"{name} - batchdecode")


class Opening(Struct, frozen=True, omit_defaults=True):
    """What a page shows at first: steps [start, end), and requests and slots; None for all."""

    steps: tuple[int, int] | None = None
    requests: list[str] | None = None
    slots: list[int] | None = None


class Sample(Struct, frozen=True):
    """A sample that a page leads to."""

    id: str
    index: int


class PageDifference(Struct, frozen=True):
    """How two runs differ, in lines of text.

    step: where they part, None if they do not.  changed: whom to look at, the most changed first.
    """

    step: int | None
    lines: list[str]
    changed: list[Sample]


class Words(Struct, frozen=True):
    """How a page says why: a request waited, stood still in its slot, or was preempted."""

    waits: Mapping[Cause, str]
    standstills: Mapping[Cause, str]
    preemptions: Mapping[PreemptReason, str]


WORDS = Words(SHORT_CAUSES, STANDSTILLS, GAVE_WAY)


class PageFacts(Struct, frozen=True):
    """What a page is told beside its runs.  is_part: whether a longer document is around it."""

    words: Words
    opening: Opening = Opening()
    diff: PageDifference | None = None
    is_part: bool = False


def encode_page(
    runs: Iterable[PageRun], facts: PageFacts, title: str, above: str = "", below: str = ""
) -> Iterator[bytes]:
    """Yield the file piece by piece: one run, its workers, or two to compare.

    title: of the document, as HTML.  above, below: what stands around the timeline, as HTML.
    """
    scripts = {name: _asset(name) for name in SCRIPTS}
    style, licence = _asset("page.css"), _asset("d3.LICENSE")
    policy = f"default-src 'none'; img-src data:; style-src {_hash(style)}; script-src " + " ".join(
        map(_hash, scripts.values())
    )
    yield (
        START
        + (
            '<html lang="en">\n<head>\n<meta charset="utf-8">\n'
            f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
            '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
            '<link rel="icon" href="data:,">\n'
            f"<title>{title}</title>\n<style>{style}</style>\n</head>\n<body>\n{above}"
            '<main id="page"><noscript><p>The timeline needs JavaScript, which is off in this '
            f"browser.</p></noscript></main>\n{below}"
        ).encode()
    )
    yield b'<script type="text/plain" id="facts">' + base64.b64encode(msgspec.json.encode(facts))
    yield b"</script>\n"
    for name, timeline in runs:
        yield b'<script type="text/plain" class="run">\n'
        yield from packed_lines(blocks_of(timeline, name))
        yield b"</script>\n"
    yield f"<!-- d3: {licence}-->\n".encode()
    for script in scripts.values():
        yield f"<script>{script}</script>\n".encode()
    yield b"</body>\n</html>\n"


@cache
def _asset(name: str) -> str:
    return files(__package__).joinpath("assets", name).read_text("utf-8")


def _hash(text: str) -> str:
    """Return how a policy names a script or a style of just this text."""
    return f"'sha256-{base64.b64encode(sha256(text.encode()).digest()).decode()}'"
