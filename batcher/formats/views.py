"""Views of a timeline as lines to write out: spans, steps and CSV, each made as it is written."""

import csv
from collections.abc import Iterator
from io import StringIO

import msgspec

from batcher.stays import Span
from batcher.timeline import EVERYTHING, Selection, Timeline

_encoder = msgspec.json.Encoder()
_CSV_FIELDS = Span.__struct_fields__[:-1]  # forks, the last, are more than a cell can say


def encode_spans(timeline: Timeline, selection: Selection = EVERYTHING) -> Iterator[bytes]:
    """Yield a JSON line for each span."""
    for span in timeline.select_spans(selection):
        yield _encoder.encode(span) + b"\n"


def encode_steps(timeline: Timeline, selection: Selection = EVERYTHING) -> Iterator[bytes]:
    """Yield a JSON line for each step, with the label in each slot; an empty one is null."""
    for row in timeline.select_steps(selection):
        yield _encoder.encode(row) + b"\n"


def encode_csv(timeline: Timeline, selection: Selection = EVERYTHING) -> Iterator[bytes]:
    """Yield a header and a CSV line for each span, as RFC 4180 but ended by a newline alone."""
    buffer = StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow(_CSV_FIELDS)
    yield buffer.getvalue().encode()
    for span in timeline.select_spans(selection):
        buffer.seek(0)
        buffer.truncate()
        *cells, dropped = msgspec.structs.astuple(span)[: len(_CSV_FIELDS)]
        writer.writerow([*cells, "true" if dropped else "false"])
        yield buffer.getvalue().encode()
