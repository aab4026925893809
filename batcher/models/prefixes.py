"""The token ids of every row, for models that have no cache and are asked with whole prefixes."""

from batcher.models.base import Batch


class Prefixes:
    """Prompt and output so far, by slot."""

    def __init__(self) -> None:
        self._prefixes: dict[int, list[int]] = {}

    def clear(self) -> None:
        """Forget all rows."""
        self._prefixes.clear()

    def extend(self, batch: Batch) -> None:
        """Add the new tokens of every row of `batch`, whether it yields yet or not."""
        has_chunk = set()
        for chunk in batch.chunks:
            has_chunk.add(chunk.slot)
            self._prefixes.setdefault(chunk.slot, [])[chunk.start :] = chunk.token_ids
        slots = batch.slots
        for slot, token in zip(slots.tolist(), batch.tokens[slots].tolist(), strict=True):
            if slot not in has_chunk:
                self._prefixes[slot].append(token)

    def __contains__(self, slot: int) -> bool:
        """Whether there is a row in `slot`."""
        return slot in self._prefixes

    def copy_of(self, slot: int) -> list[int]:
        """Return all tokens of the row in `slot`, in a list of the caller's own."""
        return self._prefixes[slot].copy()

    def fork(self, source: int, target: int) -> None:
        """Let the row in `target` be what the one in `source` is."""
        self._prefixes[target] = self._prefixes[source].copy()

    def release(self, slot: int) -> None:
        """Forget the row in `slot`, if there is one."""
        self._prefixes.pop(slot, None)


class PrefixModel:
    """The slots of a Model (see base.py) that has no cache; `forward` is its own business."""

    def __init__(self) -> None:
        self._prefixes = Prefixes()
        self._num_slots = 0

    def allocate(self, num_slots: int) -> None:
        """Make room for `num_slots` rows."""
        self._prefixes.clear()
        self._num_slots = num_slots

    def fork(self, source: int, target: int) -> None:
        """Let the row in `target` be what the one in `source` is."""
        self._prefixes.fork(source, target)

    def release(self, slot: int) -> None:
        """Forget the row in `slot`, if there is one."""
        self._prefixes.release(slot)
