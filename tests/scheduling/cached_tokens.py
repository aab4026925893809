"""A KV cache that knows the tokens of its sequences, for tests that take its steps one by one."""

from batcher.scheduling.kv_cache import KVCache
from batcher.scheduling.sequence import Schedulable
from batcher.settings import SchedulingSettings

SIZE = 4


class Cache(KVCache):
    """A cache that knows the tokens of its sequences, and lets steps be taken one by one."""

    def __init__(self, num_blocks=20, *, prefix_cache=True):
        fields = {"kv_blocks": num_blocks, "block_size": SIZE, "prefix_cache": prefix_cache}
        if num_blocks is not None:
            fields["capacity"] = "on-demand"
        super().__init__(SchedulingSettings(**fields), self.contents)
        self.tokens = {}
        self.sequences = []
        self.built = []  # where each block begins whose content was asked for

    def contents(self, sequence, start, stop, size):
        tokens = self.tokens[sequence.id]
        assert stop <= len(tokens)
        for at in range(start, stop, size):
            self.built.append(at // size)
            yield tuple(tokens[at : min(at + size, stop)])

    def sequence(self, name, tokens, **fields):
        self.tokens[name] = list(tokens)
        num_tokens = len(self.tokens[name])
        return Schedulable(
            id=name,
            num_prompt_tokens=num_tokens,
            num_tokens=num_tokens,
            max_tokens=9,
            block_table=[],
            **fields,
        )

    def begin(self, sequence, stop=None):
        """Let `sequence` compute up to `stop` tokens, all of them if not told, in one step."""
        stop = sequence.num_tokens if stop is None else stop
        num_free = self.pool.num_free
        match = self.match(sequence)
        match.stop, match.num_planned = stop, stop - match.num_tokens
        num_needed = self.num_needed({sequence: match}, is_alone=True)
        self.admit({sequence: match})
        sequence.num_computed_tokens = stop
        assert self.pool.num_free == num_free - num_needed, "not what was asked for"
        self.sequences.append(sequence)

    def go_on(self, sequence, stop):
        self.extend(sequence, stop)
        self.register_planned(sequence, sequence.num_computed_tokens, stop)
        sequence.num_computed_tokens = stop

    def leave(self, sequence):
        self.close(sequence, sequence.num_computed_tokens)
        self.sequences.remove(sequence)
        assert sequence.block_table == []

    def check_all(self):
        self.check(self.sequences)
