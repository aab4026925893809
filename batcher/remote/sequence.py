"""One sample of a request that a server answers, on its way through the slots."""

from typing import Any

from batcher.events import ArriveReason
from batcher.remote.reply import Reply
from batcher.request import Request
from batcher.scheduling.sequence import Schedulable


class RemoteSequence(Schedulable, eq=False, gc=False, kw_only=True):
    """What one slot is given to; of what Schedulable has, that of slots and queues alone is used.

    Set by inputs.py: request: what it is an output of.  arrive_reason: why it arrives when it does.
    context: the text, or the messages, that it goes on from.
    Set by attempts.py: reply: what has come of its answer; text: what of that is still to be told.
    num_told: how many ids are.
    """

    request: Request
    arrive_reason: ArriveReason
    context: Any = None
    reply: Reply
    text: str = ""
    num_told: int = 0

    def take_told(self) -> tuple[list[int] | None, str]:
        """Return the ids since the last call, None if they are not known, and the text."""
        text, self.text = self.text, ""
        ids = self.reply.token_ids
        start, self.num_told = self.num_told, len(ids or ())
        return None if ids is None else ids[start:], text
