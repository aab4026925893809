import json

import pytest
from process import batchdecode, lines_of, workload

REQUESTS = lines_of(
    *workload(6),
    {"id": "n", "prompt": "Once", "n": 3, "temperature": 1.0},
    {"id": "stops", "prompt": "Once", "stop": [" the", "."], "max_tokens": 40},
    {"id": "none", "prompt": "x", "max_tokens": 0},
    {
        "custom_id": "row",
        "method": "POST",
        "url": "/v1/completions",
        "body": {"prompt": "x", "n": 2, "temperature": 1},
    },
)


def streamed(requests=REQUESTS, *arguments):
    done = batchdecode("run", "--stream", "-q", "-b", 4, *arguments, stdin=requests)
    assert done.returncode == 0
    lines = list(enumerate(map(json.loads, done.stdout.splitlines())))
    events = [(number, line) for number, line in lines if line.get("event") == "token"]
    return events, [(number, line) for number, line in lines if "event" not in line]


def results_of(rows):
    """Return the last step, tokens and text by id and index, of lines of both forms."""
    found = {}
    for number, row in rows:
        if "custom_id" not in row:
            found[row["id"], row["index"]] = (number, row["tokens"], row["text"])
            continue
        for choice in row["response"]["body"]["choices"]:
            found[row["custom_id"], choice["index"]] = (number, None, choice["text"])
    return found


def test_the_token_events_of_a_row_are_its_result_piece_by_piece_in_the_order_of_the_steps():
    events, rows = streamed()
    pieces = {}
    for number, event in events:
        pieces.setdefault((event["id"], event["index"]), []).append((number, event))
    results = results_of(rows)
    assert len(results) == 13
    assert results.keys() - pieces.keys() == {("none", 0)}
    for key, parts in pieces.items():
        number, tokens, text = results[key]
        assert "".join(event["text"] for _, event in parts) == text
        assert tokens in (None, [token for _, event in parts for token in event["tokens"]])
        assert parts[-1][0] < number
    # events come in the order of the steps, and results with their step
    steps = {number: event["step"] for number, event in events}
    steps |= {
        number: row["steps"]["finished"] for number, row in rows if row.get("slot") is not None
    }
    in_order = [step for _, step in sorted(steps.items())]
    assert in_order == sorted(in_order)
    plain = batchdecode("run", "-q", "-b", 4, stdin=REQUESTS).stdout
    assert [row for _, row in rows] == [json.loads(line) for line in plain.splitlines()]


@pytest.mark.parametrize(
    "fields", [{"num_beams": 2, "n": 2}, {"best_of": 3, "n": 2, "temperature": 1.0}]
)
def test_what_is_chosen_at_the_end_is_not_streamed(fields):
    events, rows = streamed(lines_of({"prompt": "x", **fields}))
    assert events == []
    assert len(rows) == 2


def test_a_stream_goes_to_the_output_too(tmp_path):
    to_file = tmp_path / "out"
    assert batchdecode("run", "--stream", "-q", "-o", to_file, stdin=REQUESTS).stdout == b""
    assert to_file.read_bytes() == batchdecode("run", "--stream", "-q", stdin=REQUESTS).stdout
