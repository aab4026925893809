"""Encode runs as one HTML file that loads nothing from elsewhere.

A run is in the page as packed lines of JSON, which assets/run.js reads: ["run", {...}] for facts,
["spans", {"slot": [...], "+start": [...]}] for rows of a table, with a list for each column.  A
column with a + has the differences from row to row.

Text of a run is only in the file as base64, or escaped by `report`, and the content security policy
allows the scripts of the page alone.  Memory grows with what waits or runs at once, not with the
length of the run.
"""

import base64
import zlib
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from hashlib import sha256
from heapq import merge
from importlib.resources import files
from itertools import chain, groupby, islice
from operator import itemgetter
from typing import Any, NamedTuple, get_args

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from batcher.events import Event, FinishEvent, RejectEvent
from batcher.explaining.story import StoryWords, admissions_of, outline, story_of, waits_of
from batcher.page import START
from batcher.page.report import escaped
from batcher.result import FinishReason
from batcher.trace.run import RequestTimeline, is_follower
from batcher.trace.timeline import SortedRecords, Timeline

# Each script uses those before it.
SCRIPTS = ("d3.min.js", "run.js", "view.js", "chart.js", "panel.js", "controls.js", "page.js")
OUTCOMES = ("", "preempted", *get_args(FinishReason), "unused", "lost")
SPAN_COLUMNS = ("+start", "steps", "slot", "+sequence", "outcome", "resumed", "prefill", "cached")
ROWS_OF_BLOCK = 2**14
MAX_STORIES = 100_000  # at some 70 bytes each; `trace why` has the others
_DIGITS = 6  # of times in seconds
_encoder = msgspec.json.Encoder()


class PageTimeline(Timeline):
    """A timeline that keeps its sequences.

    sequences: in the order of their first events, each with the number of its leader or its own.
    owners: the number of the sequence of each span.  rejects: invalid lines.
    """

    def __init__(self) -> None:
        super().__init__()
        kind = tuple[int, RequestTimeline]
        self.sequences = SortedRecords[kind](kind)
        self.owners = SortedRecords[int](int)
        self.rejects = SortedRecords[RejectEvent](RejectEvent)
        self._open: dict[int, tuple[int, int, RequestTimeline]] = {}  # by identity
        self._leaders: dict[tuple[str, int], int] = {}  # the numbers of open leaders
        self._num_known = 0

    def add(self, event: Event) -> RequestTimeline | None:
        found = super().add(event)
        if self.parts:
            return found
        if isinstance(event, RejectEvent):
            self.rejects.add((len(self.rejects),), event)
        if found is None:
            return None
        group = found.id, 0 if found.role == "beam" else found.index
        if found.first_event is event:
            number = leader = self._num_known
            self._num_known += 1
            if is_follower(found):
                leader = self._leaders.get(group, number)
            else:
                self._leaders[group] = number
            self._open[id(found)] = number, leader, found
        if type(event) is FinishEvent and id(found) in self._open:
            self._keep(*self._open.pop(id(found)))
            if not is_follower(found):
                self._leaders.pop(group, None)
        return found

    def close(self) -> None:
        for known in self._open.values():
            self._keep(*known)
        self._open.clear()
        super().close()

    def _keep(self, number: int, leader: int, found: RequestTimeline) -> None:
        self.sequences.add((number,), (leader, found))
        for admission in found.admissions:
            self.owners.add((admission.event.step, admission.event.slot), number)


class PageRun(NamedTuple):
    """A run on a page, or a worker of a run."""

    name: str
    timeline: PageTimeline


def encode_run(
    path: str,
    timelines: Sequence[PageTimeline],
    facts: "PageFacts",
    words: StoryWords,
    *report: str,
) -> Iterator[bytes]:
    """Return the page of the run at `path`; timelines: its workers.  report: see encode_page."""
    name = path.rpartition("/")[2]
    names = [f"{name}, worker {worker}" for worker in range(len(timelines))]
    names = names if len(names) > 1 else [name]
    return encode_page(map(PageRun, names, timelines), facts, words, name, *report)


class Opening(Struct, frozen=True, omit_defaults=True):
    """The steps [start, end), requests and slots that a page shows first; None for all."""

    steps: tuple[int, int] | None = None
    requests: list[str] | None = None
    slots: list[int] | None = None


class PageDifference(Struct, frozen=True):
    """The step at which two runs part, lines of text, and the labels that changed most."""

    step: int | None
    lines: list[str]
    changed: list[str]


class PageFacts(Struct, frozen=True):
    """Facts in addition to the runs; is_part: whether the page is part of a longer document."""

    opening: Opening = Opening()
    diff: PageDifference | None = None
    is_part: bool = False


def encode_page(
    runs: Iterable[PageRun],
    facts: PageFacts,
    words: StoryWords,
    title: str,
    above: str = "",
    below: str = "",
) -> Iterator[bytes]:
    """Yield the file in pieces: a run, its workers, or two runs; above, below: HTML around them."""
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
            f"<title>{escaped(title)} - batchdecode</title>\n<style>{style}</style>\n</head>\n"
            f"<body>\n{above}"
            '<main id="page"><noscript><p>The timeline needs JavaScript, which is off in this '
            f"browser.</p></noscript></main>\n{below}"
        ).encode()
    )
    yield b'<script type="text/plain" id="facts">' + base64.b64encode(_encoder.encode(facts))
    yield b"</script>\n"
    for run in runs:
        yield b'<script type="text/plain" class="run">\n'
        yield from _packed(_run_lines(run, words))
        yield b"</script>\n"
    yield f"<!-- d3: {licence}-->\n".encode()
    for script in scripts.values():
        yield f"<script>{script}</script>\n".encode()
    yield b"</body>\n</html>\n"


@cache
def _asset(name: str) -> str:
    return files(__package__).joinpath("assets", name).read_text("utf-8")


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(sha256(text.encode()).digest()).decode()}'"


def _packed(lines: Iterable[bytes]) -> Iterator[bytes]:
    compressor, rest = zlib.compressobj(wbits=31), b""
    for line in lines:
        rest += compressor.compress(line)
        whole = len(rest) // 3 * 3  # base64 encodes three bytes at a time
        if whole:
            yield base64.b64encode(rest[:whole]) + b"\n"
            rest = rest[whole:]
    yield base64.b64encode(rest + compressor.flush()) + b"\n"


def _run_lines(run: PageRun, words: StoryWords) -> Iterator[bytes]:
    """Yield the lines of a run.

    run: facts.  spans: by slot.  sequences: with their story, arrival and end.  waits: reasons for
    waits.  rejects: invalid lines.  slots, waiting, tokens, blocks: numbers of steps, from `step`
    on.  times: the start of steps.
    """
    timeline, of_run = run.timeline, run.timeline.run
    requests, outputs = timeline.num_requests, timeline.num_outputs
    counts = {"request": requests, "output": outputs, "step": timeline.num_steps}
    counts["slot"] = of_run.batch
    if outputs == requests:
        del counts["output"]
    parts = [f"{number:,} {what}{'s' * (number != 1)}" for what, number in counts.items()]
    parts += [
        f"worker replaced before step {restart.step:,} ({restart.reason})"
        for restart in timeline.restarts
    ]
    facts = {
        "name": run.name,
        "headline": ", ".join([*parts, of_run.policy, of_run.model]),
        "num_steps": timeline.num_steps,
        "num_slots": timeline.num_slots,
        "first_slot": timeline.slots.start,
        "restarts": [restart.step for restart in timeline.restarts],
        "outcomes": OUTCOMES,
    }
    yield _encoder.encode(("run", facts)) + b"\n"
    spans = (
        (
            span.start,
            span.end - span.start,
            span.slot - timeline.slots.start,  # those of a worker are from 0
            owner,
            OUTCOMES.index(span.outcome or ""),
            int(span.resumed),
            span.prefill,
            span.cached,
        )
        for span, owner in zip(timeline.spans, timeline.owners, strict=True)
    )
    yield from _table("spans", SPAN_COLUMNS, spans)
    columns = ("id", "label", "+leader", "+arrived", "+end", "reason", "story")
    yield from _table("sequences", columns, _sequence_rows(timeline, words))
    # A stretch has one reason throughout, but different sequences in the slots.
    anyone = story_of(timeline, RequestTimeline("", 0, "sample", worker=timeline.worker), [])
    whys = ((part, words.wait(replace(part, by=()), anyone)) for part in waits_of(timeline))
    waits = (
        (part.start, part.end, why.removeprefix(f"behind {part.behind} ")) for part, why in whys
    )
    yield from _table("waits", ("+start", "+end", "why"), waits)
    rejects = ((event.id, words.reject(event)) for event in timeline.rejects)
    yield from _table("rejects", ("id", "story"), rejects)
    figures = timeline.figures
    series: dict[str, Iterable[tuple[int, int]]] = {
        "slots": ((start, number) for start, _, number in timeline.occupied()),
        "waiting": ((start, number) for start, _, number in timeline.waiting()),
    }
    if timeline.has_figures:
        series |= {"tokens": enumerate(figures.tokens), "blocks": enumerate(figures.blocks)}
    for name, numbers in series.items():
        changes = (next(run) for _, run in groupby(numbers, itemgetter(1)))
        yield from _table(name, ("+step", "value"), changes)
    if timeline.has_figures:
        yield from _table("times", ("+step", "before", "start"), _time_rows(timeline))


def _time_rows(timeline: Timeline) -> Iterator[tuple[int, float, float | None]]:
    """Yield steps with the end of the step before, and their start if it differs."""
    figures = timeline.figures
    known = merge(range(len(figures.ends) + 1), (step for step, _ in figures.starts()))
    last = -1
    for step in chain(known, [timeline.num_steps]):
        if last < step <= timeline.num_steps:
            last = step
            before, start = figures.end_before(step), figures.start_of(step)
            before, start = round(before, _DIGITS), round(start, _DIGITS)
            yield step, before, None if start == before else start


def _sequence_rows(timeline: PageTimeline, words: StoryWords) -> Iterator[tuple[Any, ...]]:
    """Yield the row of each sequence; only leaders have a story."""
    admitted = admissions_of(timeline)
    for number, (leader, found) in enumerate(timeline.sequences):
        lines: list[str] = []
        if leader == number < MAX_STORIES:
            parts = outline(timeline, found, admitted)
            lines = words.story(story_of(timeline, found, parts))
        reason = OUTCOMES.index("" if found.finish is None else found.finish.reason)
        began = found.arrive or (found.admissions[0].event if found.admissions else None)
        arrived, end = 0 if began is None else began.step, found.end(timeline.num_steps)
        yield found.id, found.label, leader, arrived, end, reason, lines


def _table(name: str, columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> Iterator[bytes]:
    """Yield lines with the rows of a table, none if it is empty."""
    remaining = iter(rows)
    last = dict.fromkeys(columns, 0)
    while block := list(islice(remaining, ROWS_OF_BLOCK)):
        content = {}
        for column, values in zip(columns, zip(*block, strict=True), strict=True):
            content[column] = values
            if column.startswith("+"):
                befores = (last[column], *values)
                content[column] = tuple(map(int.__sub__, values, befores))
                last[column] = values[-1]
        yield _encoder.encode((name, content)) + b"\n"
