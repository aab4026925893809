"""The rows that go on in lockstep: one token each in every decode step.

The position of the token that a row computes in a decode step is the number of the step plus the
row's offset, so sums over all rows follow from the sum of the offsets.
"""

from collections.abc import Collection, Iterable

from batcher.errors import InvariantError
from batcher.scheduling.sequence import ScheduledSequence


class DecodingRows:
    """The rows that decode.

    num_rows: how many there are.
    """

    __slots__ = ("_block_size", "_by_border", "_forked", "_max_offset", "_sum", "num_rows")

    def __init__(self, block_size: int) -> None:
        """Follow rows whose blocks have `block_size` tokens; 0 if there are no blocks."""
        self.num_rows = 0
        self._block_size = block_size
        self._sum = 0  # of the offsets
        self._max_offset: int | None = None  # None: it has to be looked for
        # By which decode steps, modulo the block size, are at the beginning of a block.
        self._by_border: dict[int, dict[ScheduledSequence, None]] = {}
        self._forked: dict[ScheduledSequence, None] = {}

    def add(self, row: ScheduledSequence) -> None:
        """Take in a row; its offset must not change any more."""
        offset = row.offset
        self.num_rows += 1
        self._sum += offset
        if self._max_offset is not None and offset > self._max_offset:
            self._max_offset = offset
        if self._block_size:
            self._by_border.setdefault(-offset % self._block_size, {})[row] = None

    def remove(self, row: ScheduledSequence) -> None:
        """Let a row go."""
        offset = row.offset
        self.num_rows -= 1
        self._sum -= offset
        if offset == self._max_offset:
            self._max_offset = None
        if self._block_size:
            del self._by_border[-offset % self._block_size][row]
            self._forked.pop(row, None)

    def at_border(self, decode_step: int) -> list[ScheduledSequence]:
        """Return the rows that compute the first token of a block in `decode_step`."""
        return list(self._by_border.get(decode_step % self._block_size, ()))

    def is_growing(self, decode_step: int) -> bool:
        """Whether a row may need a block in `decode_step`."""
        return bool(self._by_border.get(decode_step % self._block_size) or self._forked)

    def by_border(self) -> Iterable[tuple[int, Collection[ScheduledSequence]]]:
        """Return rows by the decode steps, modulo the block size, in which they begin a block."""
        return self._by_border.items()

    def num_steps_to_border(self, decode_step: int) -> int:
        """Return how many steps there are from `decode_step` on before any row begins a block."""
        size = self._block_size
        borders = (border for border, rows in self._by_border.items() if rows)
        return min((border - decode_step) % size for border in borders)

    def num_steps_for(self, decode_step: int, num_blocks: int) -> int:
        """Return for how many steps from `decode_step` on so many blocks are enough."""
        num_cycles, num_left = divmod(num_blocks, self.num_rows)
        size, by_border = self._block_size, self._by_border
        for number in range(size):
            num_left -= len(by_border.get((decode_step + number) % size, ()))
            if num_left < 0:
                return num_cycles * size + number
        raise InvariantError("rows begin no block in as many steps as a block has tokens")

    def note_fork(self, row: ScheduledSequence) -> None:
        """Take note that a row may share its last block from now on."""
        self._forked[row] = None

    def take_forked(self) -> list[ScheduledSequence]:
        """Return the rows that may share their last block since the last call."""
        if not self._forked:
            return []
        forked, self._forked = list(self._forked), {}
        return forked

    def num_read(self, decode_step: int) -> int:
        """Return how many tokens before their own all rows read in `decode_step`."""
        return self._sum + self.num_rows * decode_step

    def padding(self, holders: Iterable[ScheduledSequence | None]) -> int:
        """Return how many more they would read if all were as long as the longest, in any step.

        holders: sequences among which are all rows.
        """
        if not self.num_rows:
            return 0
        if self._max_offset is None:
            self._max_offset = max(row.offset for row in holders if row and row.is_decoding)
        return self._max_offset * self.num_rows - self._sum
