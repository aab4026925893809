"""A model that keeps account of what it is told, and insists that it is right."""

from batcher import ModelOutput, SimulatedModel
from batcher.models.base import Batch


class LedgerModel(SimulatedModel):
    """The simulated model; it refuses what no cache could serve.

    rows: slot -> all tokens it holds for the row there.
    """

    def __init__(self) -> None:
        self.rows: dict[int, list[int]] = {}
        super().__init__()

    def forward(self, batch: Batch) -> ModelOutput:
        fresh = set()
        for chunk in batch.chunks:
            assert chunk.slot not in fresh, "two chunks for one slot"
            fresh.add(chunk.slot)
            if chunk.slot not in self.rows:
                self.rows[chunk.slot] = []
            assert chunk.start == len(self.rows[chunk.slot]), "not where the row goes on"
            self.rows[chunk.slot] += chunk.token_ids
        slots = set(batch.slots.tolist())
        assert slots == set(self.rows), "the rows computed are not those that are held"
        for slot in slots - fresh:
            self.rows[slot].append(int(batch.tokens[slot]))
        assert slots.issuperset(batch.logit_slots.tolist())
        return super().forward(batch)

    def fork(self, source: int, target: int) -> None:
        self.rows[target] = self.rows[source].copy()
        super().fork(source, target)

    def release(self, slot: int) -> None:
        del self.rows[slot]
        super().release(slot)
