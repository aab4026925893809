"""Messages between a run and its workers: whole, in order, however the bytes come."""

from hypothesis import given
from hypothesis import strategies as st

from cli.run.worker import (
    CHUNK_BYTES,
    Answered,
    Decode,
    Inbox,
    Lines,
    Remark,
    decode_instruction,
    decode_report,
    encode,
    frame_of,
)

REPORTS = st.lists(st.sampled_from([0, 1, 7, 300, CHUNK_BYTES, 5 * CHUNK_BYTES]), max_size=6).map(
    lambda sizes: [Answered([n], bytes([n]) * size, [size]) for n, size in enumerate(sizes)]
)


@given(REPORTS, st.lists(st.integers(1, 2000), max_size=40), st.integers(100, 3 * CHUNK_BYTES))
def test_messages_are_whole_and_in_order(reports, sizes, piece_bytes):
    content = b"".join(map(frame_of, reports))
    inbox, found = Inbox(decode_report), []
    while content:
        size = sizes.pop() if sizes else piece_bytes
        inbox.add(content[:size])
        found += inbox.take()
        content = content[size:]
    assert found == reports


@given(
    st.lists(st.tuples(st.booleans(), st.integers(0, 5)), max_size=9),
    st.lists(st.integers(1, 9), max_size=9),
)
def test_lines_come_out_as_they_went_in(going_in, coming_out):
    lines, found, kept, remarks = Lines(), Lines(), [], {}
    for is_odd, count in going_in:
        more = Lines()
        for index in range(len(kept), len(kept) + count):
            line = (index, index + 1, b"%d\n" % index, 7 * index)
            remark = Remark(first_number=index) if is_odd else None
            if remark is not None:
                remarks[index] = remark
            more.append_line(line, remark)
            kept.append(line)
        lines.extend(more)
    for most in coming_out:
        taken = lines.take_first(most)
        assert taken.remarks.keys() <= set(taken.indexes)
        assert len(taken) == min(most, len(taken) + len(lines))
        found.extend(decode_instruction(encode(Decode(taken))).lines)
    assert lines.remarks.keys() <= set(lines.indexes)
    assert [*found.rows(), *lines.rows()] == kept
    assert found.remarks | lines.remarks == remarks
