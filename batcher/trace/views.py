"""Views of a timeline as lines to write out: spans, steps and CSV, each made as it is written."""

import csv
from collections.abc import Iterator
from io import StringIO

import msgspec

from batcher.trace.timeline import EVERYTHING, Selection, Timeline

_encoder = msgspec.json.Encoder()
_CSV_FIELDS = ("slot", "id", "index", "start", "end", "outcome", "role", "jumped", "dropped")
_CSV_DRAFT_FIELDS = ("drafted", "accepted")
_CSV_WORKER_FIELDS = ("worker",)
_FORMULA_STARTS = ("=", "+", "-", "@", "\t", "\r")
_CSV_MEMORY_FIELDS = ("prefill", "cached", "generated", "resumed")


def encode_spans(timeline: Timeline, selection: Selection = EVERYTHING) -> Iterator[bytes]:
    """Yield a JSON line for each span."""
    for span in timeline.select_spans(selection):
        yield _encoder.encode(span) + b"\n"


def encode_steps(timeline: Timeline, selection: Selection = EVERYTHING) -> Iterator[bytes]:
    """Yield a JSON line for each step, with the label in each slot; an empty one is null."""
    for row in timeline.select_steps(selection):
        yield _encoder.encode(row) + b"\n"


def encode_csv(timeline: Timeline, selection: Selection = EVERYTHING) -> Iterator[bytes]:
    """Yield a header and a CSV line for each span, as RFC 4180 but ended by a newline alone.

    There are columns about what was computed and preempted, and about drafts, if that happened
    anywhere in the run, and one for the worker if there are several.
    """
    fields = _CSV_FIELDS + (_CSV_MEMORY_FIELDS if timeline.has_memory else ())
    fields += _CSV_DRAFT_FIELDS if timeline.has_drafts else ()
    fields += _CSV_WORKER_FIELDS if timeline.run.workers > 1 else ()
    buffer = StringIO()
    writer = csv.writer(buffer)  # it quotes what has a character of the end of its lines, "\r\n"
    writer.writerow(fields)
    yield buffer.getvalue()[:-2].encode() + b"\n"
    for span in timeline.select_spans(selection):
        buffer.seek(0)
        buffer.truncate()
        writer.writerow(_cell(getattr(span, field)) for field in fields)
        yield buffer.getvalue()[:-2].encode() + b"\n"


def _cell(value: object) -> object:
    """Return a value as a cell; a text that a spreadsheet would run as a formula gets a `'`."""
    if isinstance(value, bool):
        return str(value).lower()
    return f"'{value}" if isinstance(value, str) and value.startswith(_FORMULA_STARTS) else value
