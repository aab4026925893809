"""Messages between a run and its workers: whole, in order, however the bytes come."""

from hypothesis import given
from hypothesis import strategies as st

from cli.run.worker import CHUNK_BYTES, Answered, Inbox, decode_report, frame_of

REPORTS = st.lists(st.sampled_from([0, 1, 7, 300, CHUNK_BYTES, 5 * CHUNK_BYTES]), max_size=6).map(
    lambda sizes: [Answered([n], [bytes([n]) * size]) for n, size in enumerate(sizes)]
)


@given(REPORTS, st.lists(st.integers(1, 2000), max_size=40), st.integers(100, 3 * CHUNK_BYTES))
def test_messages_are_whole_and_in_order(reports, sizes, piece_bytes):
    content = b"".join(map(frame_of, reports))
    inbox, found = Inbox(decode_report), []
    while content:
        size = sizes.pop() if sizes else piece_bytes
        found += inbox.take(content[:size])
        content = content[size:]
    assert found == reports
