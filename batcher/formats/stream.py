"""Token events as lines of JSON, as they stand among the results of a run that streams."""

from collections.abc import Iterable

import msgspec

from batcher.events import TokenEvent

_encoder = msgspec.json.Encoder()


def encode_tokens(events: Iterable[TokenEvent]) -> bytes:
    """Return `events` as lines, newlines included."""
    return _encoder.encode_lines(events)
