"""Tokens go in a step at a time and come out a row at a time, across any number of pages."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from batcher import Engine, Request, SimulatedModel
from batcher.decoding import output_tokens
from batcher.decoding.output_tokens import NO_TOKEN, OutputTokens

NUMBERS = st.lists(st.integers(0, 6), min_size=3, max_size=3)


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 40), NUMBERS), max_size=30))
def test_rows_come_out_as_they_went_in(moves):
    kept = OutputTokens(3)
    kept._page_steps = 5
    kept.page = np.zeros((5, 3), np.int64)
    rows = {}
    token = 0
    for slot, num_steps, num_more in moves:
        if slot in rows:
            row = rows.pop(slot)
            assert kept.close(slot, len(row)) == row
        else:
            kept.first_rows[slot] = kept.row
            rows[slot] = []
        for _ in range(num_steps):
            tokens = np.arange(token, token + 3)
            token += 3
            kept.append(tokens)
            for open_slot, row in rows.items():
                row.append(int(tokens[open_slot]))
        slots = sorted(rows, reverse=True)
        lines = np.full((max((num_more[s] for s in slots), default=0), len(slots)), NO_TOKEN)
        for place, open_slot in enumerate(slots):
            more = [*range(token, token + num_more[open_slot])]
            token += len(more)
            lines[: len(more), place] = more
            rows[open_slot] += more
        for line in lines:
            kept.append_more(np.array(slots, np.int64), line)
        for open_slot, row in rows.items():
            if token % 2:  # reading changes nothing
                stop = min(7, len(row))
                assert kept.read(open_slot, min(1, stop), stop).tolist() == row[1:stop]
    for slot, row in rows.items():
        assert kept.close(slot, len(row)) == row


def test_rows_of_an_engine_may_be_longer_than_a_page(monkeypatch):
    def tokens_of_all():
        engine, told = Engine(SimulatedModel(), 3), {}
        for number in range(8):
            length = 3 + 5 * number % 17
            engine.add(Request(prompt=f"Line {number}", max_tokens=length, ignore_eos=True))
        while engine.has_work:
            told |= {result.id: result.tokens for result in engine.step().results}
        return told

    expected = tokens_of_all()
    monkeypatch.setattr(output_tokens, "MIN_PAGE_STEPS", 4)
    monkeypatch.setattr(output_tokens, "MAX_PAGE_STEPS", 4)
    assert tokens_of_all() == expected
    assert max(map(len, expected.values())) > 12
