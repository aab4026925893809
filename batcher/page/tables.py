"""The tables of a page: what it is told of a run, column by column; assets/run.js reads them.

Rule: nothing is left out, so that spans, and the story of every request, follow from the tables.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from math import nan
from operator import attrgetter, itemgetter
from typing import Any, NamedTuple, get_args

import msgspec

from batcher.events import BlockedReason, RejectEvent, Role
from batcher.page.blocks import TableColumn, table, value
from batcher.page.records import PageSequence, PageTimeline, SpanDetail
from batcher.result import FinishReason
from batcher.trace.run import BlockedSpan, SlotSpan, aging_of
from batcher.trace.timeline import Timeline

OUTCOMES = ("", "preempted", *get_args(FinishReason), "unused", "lost")
ROLES: tuple[str, ...] = get_args(Role)
REASONS: tuple[str, ...] = get_args(BlockedReason)
_RARE_OF_SPANS = ("forks", "preemption", "cached_from")
_encoder = msgspec.json.Encoder()


class _Span(NamedTuple):
    """A row of the table of spans."""

    span: SlotSpan
    detail: SpanDetail


def _bits(*names: str) -> Callable[[Any], int]:
    """Return what makes one number of some yes-or-no fields, the first being its lowest bit."""
    fields = [attrgetter(name) for name in names]
    return lambda row: sum(bool(field(row)) << bit for bit, field in enumerate(fields))


def _more(row: _Span) -> str:
    """Return what few spans have, as JSON; "" for nothing."""
    told = {name: found for name in _RARE_OF_SPANS if (found := getattr(row.span, name))}
    if not told:
        return row.detail.more
    own = msgspec.json.decode(row.detail.more) if row.detail.more else {}
    return _encoder.encode(own | told).decode()


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
    return _encoder.encode(told).decode() if told else ""


def _span_number(name: str) -> TableColumn[_Span]:
    return TableColumn("number", attrgetter(f"span.{name}"))


_SPANS: Mapping[str, TableColumn[_Span]] = {
    "start": TableColumn("ascending", attrgetter("span.start")),
    "steps": TableColumn("number", lambda row: row.span.end - row.span.start),
    "slot": _span_number("slot"),
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
    "more": TableColumn("text", _more),
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
    "event": TableColumn("text", lambda row: _encoder.encode(row).decode()),
}
_SERIES: Mapping[str, TableColumn[tuple[int, int]]] = {
    "step": TableColumn("ascending", itemgetter(0)),
    "value": TableColumn("number", itemgetter(1)),
}
_STARTS: Mapping[str, TableColumn[tuple[int, float]]] = {
    "step": TableColumn("ascending", itemgetter(0)),
    "time": TableColumn("number", itemgetter(1)),
}


def blocks_of(timeline: PageTimeline, name: str, first_slot: int = 0) -> Iterator[bytes]:
    """Yield what a page is told of the run that is called `name`, block by block.

    first_slot: what number its first slot is shown with.
    """
    yield value("run", _facts(timeline, name) | {"first_slot": first_slot})
    spans = map(_Span, timeline.spans, timeline.details)
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
