"""What stands for simulated tokens: equal where tokens are, and found without going over all."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st
from jobs import job_of

from batcher.planning.simulated_sequence import GREEDY, Piece, SimulatedContents


class CountedPieces(tuple[Piece, ...]):  # noqa: SLOT001 - it counts
    """Pieces that count how many of them were looked at."""

    num_seen = 0

    def __iter__(self):
        for piece in super().__iter__():
            self.num_seen += 1
            yield piece

    def __getitem__(self, place):
        self.num_seen += 1
        return super().__getitem__(place)


def sequence_of(pieces):
    return job_of(0, sum(piece.length for piece in pieces), 0, prompt=tuple(pieces))


def test_a_prompt_of_many_pieces_takes_time_in_proportion_to_them():
    seen = []
    for num_pieces in (100, 200, 400):
        sequence = sequence_of([Piece(40, ("seed", number)) for number in range(num_pieces)])
        sequence.pieces = CountedPieces(sequence.lay_out())
        blocks = [*SimulatedContents().blocks(sequence, 0, 40 * num_pieces, 16)]
        assert len(blocks) == 40 * num_pieces // 16
        seen.append(sequence.pieces.num_seen)
    for fewer, more in pairwise(seen):
        assert more <= 2 * fewer + 2
    assert seen[0] <= 300, "two whole blocks and one with two pieces"


def tokens_of(pieces):
    """The tokens themselves; what a symbol stands for depends on where it begins."""
    tokens = []
    for piece in pieces:
        if piece.tokens is not None:
            tokens += piece.tokens
        else:
            start = len(tokens)
            tokens += [(piece.symbol, start, at) for at in range(piece.length)]
    return tokens


listed = st.lists(st.integers(1, 3), min_size=1, max_size=5).map(
    lambda tokens: Piece(len(tokens), tokens=tuple(tokens))
)
symbols = st.sampled_from([("seed", 1), ("seed", 2), GREEDY])
symbolic = st.builds(Piece, st.integers(1, 9), symbols, st.none())
prompts = st.lists(st.one_of(listed, symbolic), min_size=1, max_size=6)


@given(prompts, prompts, st.integers(1, 5))
def test_contents_are_equal_exactly_where_the_tokens_are(first, second, size):
    contents = SimulatedContents()
    all_tokens = [tokens_of(first), tokens_of(second)]
    length = min(map(len, all_tokens))
    one, other = (
        [*contents.blocks(sequence_of(pieces), 0, length, size)] for pieces in (first, second)
    )
    assert len(one) == len(other) == -(-length // size)
    for place in range(len(one)):
        start, stop = place * size, min((place + 1) * size, length)
        if all_tokens[0][:start] != all_tokens[1][:start]:
            break  # another parent, so another key
        is_same = all_tokens[0][start:stop] == all_tokens[1][start:stop]
        assert (one[place] == other[place]) == is_same
