"""Follows how sequences that take several steps for it compute what they begin with.

Rule: a sequence is known here from an admission that leaves tokens to later steps to its end, or
from the step in which a constraint forced more tokens on it than the next one could compute.
"""

from batcher.errors import InvariantError
from batcher.events import AdmitEvent, PrefillEvent
from batcher.timeline.stays import SequenceKey, key_of, label_of


class Prefills:
    """How much those sequences have left to compute, and in which step they were through."""

    def __init__(self) -> None:
        self._left: dict[SequenceKey, int] = {}
        self._first_tokens: dict[SequenceKey, int] = {}  # steps that gave one
        self._jumped: set[SequenceKey] = set()

    def begin(self, key: SequenceKey, event: AdmitEvent) -> None:
        """Follow the sequence that is admitted and leaves tokens to later steps.

        Raises:
            InvariantError: it leaves fewer than none.
        """
        if event.left < 0:
            label = label_of(event.id, event.index, event.role)
            raise InvariantError(f"{label!r} is admitted with {event.left} tokens left")
        self._left[key] = event.left

    def jump(self, key: SequenceKey) -> None:
        """Note that the sequence was given tokens which it may compute in several steps."""
        self._jumped.add(key)

    def add(self, event: PrefillEvent, admit: AdmitEvent | None) -> None:
        """Take in what a step computed of a sequence, which `admit` gave its slot.

        Raises:
            InvariantError: it does not hold that slot, or had not that many tokens to compute.
        """
        label = label_of(event.id, event.index, event.role)
        if admit is None or admit.slot != event.slot or admit.role != event.role:
            raise InvariantError(f"{label!r} computes in slot {event.slot}, which it does not hold")
        key = key_of(event.id, event.index, event.role)
        left = self._left.get(key, 0)
        if not left and key in self._jumped:
            left = event.tokens + event.left
        if event.step <= admit.step or event.tokens < 1 or left - event.tokens != event.left:
            raise InvariantError(
                f"{label!r} computes {event.tokens} tokens in step {event.step} and leaves "
                f"{event.left}, but {left} were left"
            )
        self._jumped.discard(key)
        if event.left:
            self._left[key] = event.left
        else:
            self._first_tokens.setdefault(key, event.step)
            self._left.pop(key, None)

    def has_begun(self, key: SequenceKey) -> bool:
        """Return whether the sequence has something left to compute."""
        return key in self._left

    def end(self, key: SequenceKey, admit: AdmitEvent, end: int) -> int:
        """Forget the sequence, and return how many steps up to `end` it computed or waited for it.

        The step that gave its first token counts.
        """
        self._left.pop(key, None)
        self._jumped.discard(key)
        first_token = self._first_tokens.pop(key, end - 1)
        return first_token + 1 - admit.step if admit.left else 1
