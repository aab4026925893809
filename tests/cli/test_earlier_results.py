import pytest

from batcher.request import Request
from batcher.requests.lines import ParsedLine, RequestParser
from batcher.requests.result_rows import encode_openai_row
from batcher.requests.results import encode_result
from batcher.requests.validation import ModelCapabilities
from batcher.result import ErrorInfo, Result, StepTimes, Usage
from cli.run.files import ResumeError
from cli.run.resume import ResultLines, take_over


def result(index=0, slot=0, admitted=0, finished=2, *, tokens=(88, 88, 88), error=None, name="o"):
    return Result(
        id=name,
        index=index,
        text="x",
        tokens=list(tokens),
        finish_reason="error" if error else "length",
        stop_reason=None,
        usage=Usage(1, len(tokens)),
        slot=slot,
        steps=StepTimes(0, admitted, admitted, finished),
        error=error,
    )


def rejected(line, name="o"):
    error = ErrorInfo("duplicate-id", "no", line)
    return result(slot=None, admitted=None, finished=None, tokens=(), error=error, name=name)


def row_of(*results):
    return encode_openai_row(list(results), "simulated", "completion", lambda _: b"")


def request(name="o", **fields):
    return Request(id=name, prompt="x", **fields)


READER = ResultLines(2, was_written=lambda _line: True)
FAILURE = ErrorInfo("model-error", "it failed")


@pytest.fixture
def took_over(tmp_path):
    opened = []

    def took_over(*lines, expected=None):
        output = tmp_path / "out"
        output.write_bytes(b"".join(lines))
        (tmp_path / "out.rest").unlink(missing_ok=True)
        opened.append(take_over(str(output), READER, expected=expected))
        return opened[-1]

    yield took_over
    for known in opened:
        known.close()


@pytest.mark.parametrize(
    "earlier",
    [
        result(),
        result(finished=3, error=FAILURE),
        result(slot=None, admitted=None, finished=5, tokens=()),
        result(finished=1),  # a step gave more than one token
    ],
)
@pytest.mark.parametrize("encode", [encode_result, row_of])
def test_a_result_is_found_by_its_request_whatever_its_form(took_over, earlier, encode):
    known = took_over(encode(earlier))
    assert known.results_of(request()) == {0: earlier}
    assert known.results_of(request("p")) == {}
    assert not known.has_rejected("o", 1)


def test_a_bad_line_is_told_from_the_request_that_has_its_id(took_over):
    lines = [rejected(3), result(), rejected(7), rejected(7, name="p")]
    known = took_over(*map(encode_result, lines))
    assert known.results_of(request()) == {0: result()}
    assert [n for n in range(1, 9) if known.has_rejected("o", n)] == [3, 7]
    assert not known.has_rejected("p", 3)


@pytest.mark.parametrize(
    ("edited", "reason"),
    [
        (result(1, admitted=None), "some of slot, admitted and finished are null"),
        (result(1, slot=2), "slot 2, but there are 2"),
        (result(1, admitted=-1, finished=1), "it cannot have held a slot from step -1 to 1"),
        (result(1, admitted=3), "it cannot have held a slot from step 3 to 2"),
    ],
)
def test_what_no_such_run_can_have_given_is_refused(took_over, edited, reason):
    with pytest.raises(ResumeError, match=rf"cannot resume .*out: line 2: {reason}"):
        took_over(encode_result(result()), encode_result(edited))


def test_a_result_that_took_for_ever_is_not_replayed(took_over):
    known = took_over(encode_result(result(finished=2**63 - 1)))
    with pytest.raises(ResumeError, match="steps, but max_tokens is 16"):
        known.check_replay(request(), known.results_of(request()))


ROW = (
    b'{"custom_id":"c","method":"POST","url":"/v1/completions",'
    b'"body":{"prompt":"x","n":2,"temperature":1}}'
)
INPUT = [
    b'{"id":"a","prompt":"x","n":2,"temperature":1}',
    b'{"id":"a","prompt":"x","n":2,"temperature":1}',
    b"nonsense",
    ROW,
    b'{"id":"d","prompt":"x","n":2,"best_of":5,"temperature":1}',
]
ANSWERS = [
    encode_result(result(0, name="a")),
    encode_result(result(1, name="a")),
    encode_result(rejected(2, name="a")),
    encode_result(rejected(3, name="3")),
    row_of(result(0, name="c"), result(1, name="c")),
    encode_result(result(1, name="d")),
    encode_result(result(4, name="d")),
]


def expected():
    parser = RequestParser(ModelCapabilities())
    for number, line in enumerate(INPUT, start=1):
        parsed = parser.parse(line, number)
        yield number, parsed if isinstance(parsed, ParsedLine) else None


@pytest.mark.parametrize(
    ("num_lines", "num_complete", "num_kept"),
    [(0, 0, 0), (1, 0, 0), (2, 1, 2), (3, 2, 3), (4, 3, 4), (5, 4, 5), (6, 4, 5), (7, 5, 7)],
)
def test_in_order_only_complete_requests_are_kept(took_over, num_lines, num_complete, num_kept):
    known = took_over(*ANSWERS[:num_lines], expected=expected())
    assert known.num_complete == num_complete
    assert known.end == len(b"".join(ANSWERS[:num_kept]))
