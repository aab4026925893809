"""Rows that come, share blocks, draft, stand still, fork and go: what each yields is its own.

What a row comes to, and what it would come to after each draft, is that of its tokens alone.
"""

import numpy as np
from drafted_trees import is_line, random_parents, way_to

from batcher.models.base import NO_SLOTS, Batch, Chunk, Pages, moves_along

NUM_SLOTS = 5


class Row:
    """A row of a slot: its tokens, how many are computed, how many were before this step.

    drafts: what it has beside its tokens in this step, and parents: which of these each follows.
    has_gone_back: whether it had any before.
    """

    def __init__(self, tokens, num_computed, num_before):
        self.tokens, self.num_computed, self.num_before = tokens, num_computed, num_before
        self.drafts = []
        self.parents = []
        self.has_gone_back = False

    @property
    def num_new(self):
        return len(self.tokens) - self.num_computed

    @property
    def ways(self):
        ways = [way_to(draft, self.parents) for draft in range(len(self.drafts))]
        return [[self.drafts[number] for number in way] for way in ways]


class PagedRows:
    """Rows that are cut into chunks, stand still, jump, fork and leave.

    scores: the logits [1 + ways, vocab] after some tokens alone, and after these and each way.
    spoil: writes over all that no row has computed.  Without pages rows do not draft or share, and
    the blocks are counted all the same.
    """

    def __init__(
        self, model, random, scores, spoil=None, *, is_paged=True, vocab_size=512, max_tokens=None
    ):
        self.model, self.random, self.scores, self.spoil = model, random, scores, spoil
        self.is_paged, self.vocab_size, self.max_tokens = is_paged, vocab_size, max_tokens
        size = random.choice([1, 2, 4, 16])
        self.windows = getattr(model, "cache_windows", (None,))
        self.recomputes = getattr(model, "recomputes_drafts", False)
        self.tables = [[[] for _ in range(NUM_SLOTS)] for _ in self.windows]
        self.pages = Pages(size, self.tables[0], self.tables[1:])
        self.batch = Batch(NUM_SLOTS, self.pages if is_paged else None)
        self.counts = {}  # block -> how many tables have it
        self.rows = {}
        self.num_accepted = self.num_rejected = 0
        is_limited = random.random() < 0.5
        self.pages.num_blocks = 600 if is_limited else 0
        if is_paged:
            model.allocate_pages(NUM_SLOTS, 600 if is_limited else None, size)
        else:
            model.allocate(NUM_SLOTS)

    def draw(self, most):
        return [self.random.randrange(self.vocab_size) for _ in range(self.random.randint(1, most))]

    # -- blocks ----------------------------------------------------------------------------------

    def take_block(self):
        """Take a free block, any; there are more of them if there were none."""
        free = [block for block in range(self.pages.num_blocks) if block not in self.counts]
        if not free:
            self.pages.num_blocks += 3
            return self.take_block()
        block = self.random.choice(free)
        self.counts[block] = 1
        return block

    def drop(self, blocks):
        for block in blocks:
            if block >= 0:
                self.counts[block] -= 1
                if not self.counts[block]:
                    del self.counts[block]

    def give_back(self, slot, num_tokens):
        num_kept = -(-num_tokens // self.pages.block_size)
        for tables in self.tables:
            self.drop(tables[slot][num_kept:])
            del tables[slot][num_kept:]

    def own(self, slot, start, stop):
        """Have blocks that nobody else has where the row writes; free what windows have passed."""
        size = self.pages.block_size
        for tables, window in zip(self.tables, self.windows, strict=True):
            table = tables[slot]
            while len(table) * size < stop:
                table.append(self.take_block())
            for place in range(start // size, -(-stop // size)):
                if self.counts[table[place]] > 1:
                    copy = self.take_block()
                    self.pages.copies.append((table[place], copy))
                    self.drop([table[place]])
                    table[place] = copy
            if window is not None and self.random.random() < 0.7:
                for place in range(max(start - window + 1, 0) // size):
                    self.drop([table[place]])
                    table[place] = -1

    def share(self, source, target, num_tokens):
        """Let a row have the blocks of another one's first tokens, if all that is read is there."""
        num_blocks = -(-num_tokens // self.pages.block_size)
        for tables, window in zip(self.tables, self.windows, strict=True):
            first = 0 if window is None else max(num_tokens - window + 1, 0)
            if -1 in tables[source][first // self.pages.block_size : num_blocks]:
                return False
        for tables in self.tables:
            shared = tables[source][:num_blocks]
            for block in shared:
                if block >= 0:
                    self.counts[block] += 1
            tables[target].extend(shared)
        return True

    # -- what happens between two steps ----------------------------------------------------------

    def change(self):
        """Let rows go and be forked."""
        for slot, row in list(self.rows.items()):
            is_long = self.max_tokens is not None and len(row.tokens) > self.max_tokens
            if is_long or self.random.random() < 0.1:
                self.leave(slot)
        decoding = [slot for slot, row in self.rows.items() if self.is_decoding(slot, row)]
        free = [slot for slot in range(NUM_SLOTS) if slot not in self.rows]
        if decoding and free and self.random.random() < 0.3:
            self.fork(self.random.choice(decoding), self.random.choice(free))
        if not self.is_paged and len(decoding) > 1 and self.random.random() < 0.3:
            source, target = self.random.sample(decoding, 2)
            self.give_back(target, 0)
            self.fork(source, target)  # whose row is forgotten
        if self.spoil is not None and self.random.random() < 0.5:
            self.spoil(self)

    def leave(self, slot):
        del self.rows[slot]
        self.give_back(slot, 0)
        self.pages.moved.pop(slot, None)
        self.batch.leave(slot)
        self.model.release(slot)

    def is_decoding(self, slot, row):
        return self.batch.holds(slot) and row.num_new == 1

    def fork(self, source, target):
        row, [token] = self.rows[source], self.draw(1)
        self.share(source, target, row.num_computed)
        self.rows[target] = Row([*row.tokens[:-1], token], row.num_computed, row.num_computed)
        self.rows[target].has_gone_back = row.has_gone_back
        self.model.fork(source, target)
        self.batch.enter(target)
        self.batch.tokens[target] = token
        self.pages.moved[target] = row.num_computed

    def admit(self, slot):
        """Begin a row; half of them after tokens that another one has, or will have by then."""
        tokens = self.draw(self.random.choice([1, 5, 30]))
        num_shared = num_before = 0
        if self.is_paged and self.rows and self.random.random() < 0.5:
            source = self.random.choice(list(self.rows))
            row, size = self.rows[source], self.pages.block_size
            num_shared = self.random.randint(0, row.num_computed)
            if self.recomputes:  # states are kept at the ends of blocks, and at the end
                ends = range(0, row.num_before + 1, size)
                num_shared = self.random.choice([self.random.choice(ends), row.num_before])
            if num_shared > row.num_before:  # what is written in this step cannot be copied in it
                num_shared = num_shared // size * size
            if not self.share(source, slot, num_shared):
                num_shared = 0
            num_before = min(num_shared, row.num_before)
            tokens = row.tokens[:num_shared] + tokens
        self.rows[slot] = Row(tokens, num_shared, num_before)

    # -- steps -----------------------------------------------------------------------------------

    def step(self):
        """Compute some of what is there to compute, and check what every row yields."""
        stands_still = self.random.random() < 0.2
        for row in self.rows.values():
            row.num_before = row.num_computed
        yielding = [slot for slot, row in self.rows.items() if self.is_decoding(slot, row)]
        if stands_still:
            yielding = []
        for slot in yielding:
            self.decode(slot)
        for slot in self.random.sample(range(NUM_SLOTS), NUM_SLOTS):
            if slot not in self.rows and self.random.random() < 0.5:
                self.admit(slot)
            if slot in self.rows and slot not in yielding and self.add_chunk(slot, stands_still):
                yielding.append(slot)
        if stands_still and self.batch.chunks:
            with self.batch.standing_still():
                assert self.batch.slots.size == self.batch.logit_slots.size == 0
                self.model.forward(self.batch)
            self.pages.moves.clear()
        elif self.batch.chunks or yielding:
            self.check(yielding)
            self.pages.moved.clear()
        self.batch.chunks = []
        self.pages.copies.clear()

    def chunk(self, slot, start, stop, *, can_draft):
        """Return some tokens of a row, perhaps with drafts behind them, and have blocks for all."""
        row = self.rows[slot]
        num_drafts = self.random.choice([0, 0, 1, 3, 9]) if can_draft and self.is_paged else 0
        row.drafts = [self.random.randrange(self.vocab_size) for _ in range(num_drafts)]
        row.parents = [*range(-1, num_drafts - 1)]
        if getattr(self.model, "verifies_trees", False):
            row.parents = random_parents(self.random, num_drafts)
        self.own(slot, start, stop + num_drafts)
        parents = () if is_line(row.parents) else tuple(stop - start + p for p in row.parents)
        tokens = row.tokens[start:stop] + row.drafts
        return Chunk(slot, tokens, start, num_drafts=num_drafts, draft_parents=parents)

    def decode(self, slot):
        row, position = self.rows[slot], self.rows[slot].num_computed
        before = [tables[slot].copy() for tables in self.tables]
        chunk = self.chunk(slot, position, position + 1, can_draft=True)
        has_changed = before != [tables[slot] for tables in self.tables]
        if row.drafts:
            self.pages.moved.pop(slot, None)
            self.batch.join(chunk)
        elif has_changed or row.has_gone_back or position % self.pages.block_size == 0:
            self.pages.moved[slot] = position
        row.num_computed += 1

    def add_chunk(self, slot, stands_still):
        """Plan some of a row's new tokens; return whether it yields."""
        row = self.rows[slot]
        start, is_jump = row.num_computed, self.batch.holds(slot)
        if stands_still:
            count = 0 if is_jump else self.random.randrange(max(1, row.num_new))
        else:
            count = self.random.randint(1 if is_jump else 0, row.num_new)
        does_yield = count == row.num_new and not stands_still
        if not count and not does_yield:
            return False
        chunk = self.chunk(slot, start, start + count, can_draft=does_yield and count > 0)
        row.num_computed += count
        if does_yield:
            self.batch.join(chunk)
        else:
            self.batch.add_part(chunk)
        return does_yield

    def check(self, yielding):
        assert self.batch.slots.tolist() == sorted(yielding)
        is_told_logits = self.model.gives == "logits"
        self.batch.logit_slots = self.batch.slots if is_told_logits else NO_SLOTS
        output = self.model.forward(self.batch)
        assert not output.failed
        self.pages.moves.clear()
        expected = {
            slot: self.scores(self.rows[slot].tokens, self.rows[slot].ways)
            for slot in self.batch.slots.tolist()
        }
        tokens = output.tokens
        if output.logits is not None:
            tokens[self.batch.slots] = output.logits.argmax(axis=1)
            if self.is_paged:
                assert (output.logits == [logits[0] for logits in expected.values()]).all()
        drafting = [chunk.slot for chunk in self.batch.chunks if chunk.num_drafts]
        if drafting:
            after_drafts = np.concatenate([expected[slot][1:] for slot in drafting])
            assert (output.draft_logits == after_drafts).all()
            assert output.draft_logits.dtype == np.float32
        else:
            assert output.draft_logits is None
        for slot in yielding:
            assert int(tokens[slot]) == expected[slot][0].argmax()
            self.accept(slot, int(tokens[slot]))
        self.batch.tokens = tokens

    def accept(self, slot, token):
        """Give a row some of its drafts, its next token, and perhaps more at once."""
        row = self.rows[slot]
        path = way_to(self.random.randint(-1, len(row.drafts) - 1), row.parents)
        for chunk in self.batch.chunks if path else ():
            if chunk.slot == slot:
                first = len(chunk.token_ids) - chunk.num_drafts
                self.pages.moves += moves_along([first + at for at in path], chunk, self.pages)
        jumped = self.draw(3) if self.random.random() < 0.3 else []
        row.tokens += [*[row.drafts[at] for at in path], token, *jumped]
        if not self.recomputes:
            row.num_computed += len(path)
        self.num_accepted += len(path)
        self.num_rejected += len(row.drafts) - len(path)
        row.has_gone_back, row.drafts = bool(row.drafts), []
        if row.has_gone_back and self.random.random() < 0.5:
            self.give_back(slot, row.num_computed)
