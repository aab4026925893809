"""What an engine hands out."""

from typing import NamedTuple

from batcher.events import RequestEvent, TokenEvent
from batcher.result import Result


class StepOutcome(NamedTuple):
    """What one step did.

    events: in the order they happened.  results: of the samples that ended, first those that never
    held a slot, then by slot.  tokens: what each row was given, by slot, if the engine streams.
    """

    events: list[RequestEvent]
    results: list[Result]
    tokens: list[TokenEvent]
