"""A model that keeps account of what it is told, and insists that it is right."""

from batcher import SimulatedModel

UNKNOWN = -1  # a token that another row has computed into shared blocks


class LedgerModel(SimulatedModel):
    """The simulated model; it refuses what no cache could serve.

    rows: slot -> all tokens it holds for the row there.
    parts: slots whose rows yield no token yet.
    """

    def __init__(self, *, is_attentive=False):
        self.rows = {}
        self.parts = set()
        super().__init__(is_attentive=is_attentive)

    def forward(self, batch):
        fresh = set()
        for chunk in batch.chunks:
            assert chunk.slot not in fresh, "two chunks for one slot"
            fresh.add(chunk.slot)
            self._take(chunk, batch)
        slots = set(batch.slots.tolist())
        assert slots or batch.chunks, "nothing to compute"
        if batch.pages is not None and slots:
            moved = set(batch.pages.moved)
            assert moved <= slots - fresh, "told of rows that compute nothing they generated"
        self.parts = (self.parts | fresh) - slots
        self._note_forks(slots - fresh, batch)
        held = set(self.rows) - self.parts
        assert slots in (held, set()), "the rows computed are not those that are held"
        for slot in slots - fresh:
            self.rows[slot].append(int(batch.tokens[slot]))
        assert slots.issuperset(batch.logit_slots.tolist())
        return super().forward(batch)

    def _take(self, chunk, batch):
        if chunk.slot not in self.rows:
            num_found = chunk.start if batch.pages is not None else 0
            self.rows[chunk.slot] = [UNKNOWN] * num_found
        assert chunk.start == len(self.rows[chunk.slot]), "not where the row goes on"
        self.rows[chunk.slot] += chunk.token_ids

    def _note_forks(self, slots, batch):
        for slot in slots - set(self.rows):
            assert batch.pages is not None, "a row of which nothing was told"
            self.rows[slot] = [UNKNOWN] * batch.pages.moved[slot]

    def fork(self, source, target):
        self.rows[target] = self.rows[source].copy()
        super().fork(source, target)

    def release(self, slot):
        self.rows.pop(slot, None)
        self.parts.discard(slot)
        super().release(slot)
