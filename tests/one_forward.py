"""The tokens of one sequence in one forward, in blocks that are not in order."""

from batcher.transformer.step import Snapshot, Span

BLOCK_SIZE = 16


def logits_after_each(transformer, token_ids):
    """Return the logits [tokens, vocab_size] after each of the tokens of a sequence."""
    num_tokens = len(token_ids)
    num_blocks = -(-num_tokens // BLOCK_SIZE)
    num_tables = sum(not group.is_recurrent for group in transformer.cache_groups)
    store, states = transformer.new_store(), transformer.new_states()
    store.make_room(num_tables * num_blocks * BLOCK_SIZE)
    if states is not None:
        states.make_room(1)
    blocks = [*range(num_tables * num_blocks)][::-1]
    cells = [
        store.cells(blocks[number::num_tables], BLOCK_SIZE, num_tokens)
        for number in range(num_tables)
    ]
    span = Span(token_ids, 0, cells, snapshots=[Snapshot(num_tokens, 1)])
    return transformer.logits(transformer.forward([span], store, states))
