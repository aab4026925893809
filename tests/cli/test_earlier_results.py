import pytest

from batcher.formats.results import encode_openai_row, encode_result
from batcher.request import ErrorInfo, Result, StepTimes, Usage
from cli.running.earlier_results import ResumeError, take_over
from cli.running.output import OutputError


def result(index=4, slot=0, admitted=0, finished=2, *, tokens=(88, 88, 88), error=None):
    return Result(
        id="o",
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


FAILURE = ErrorInfo("model-error", "it failed")


def took_over(path, *lines):
    """Return what is taken over of a file of `lines`; its run had 6 requests and 2 slots."""
    output = path / "out"
    output.write_bytes(b"".join(lines))
    return take_over(str(output), num_lines=6, num_slots=2, keep_order=False)


@pytest.mark.parametrize(
    "earlier",
    [
        result(),
        result(slot=1, admitted=7, finished=9),
        result(finished=3, error=FAILURE),
        result(finished=0, tokens=(), error=FAILURE),
        result(slot=None, admitted=None, finished=5, tokens=()),
        result(slot=None, admitted=None, finished=None, tokens=(), error=FAILURE),
    ],
)
@pytest.mark.parametrize("encode", [encode_result, lambda r: encode_openai_row(r, "simulated")])
def test_a_result_is_found_by_its_index_whatever_its_form(tmp_path, earlier, encode):
    known = took_over(tmp_path, encode(earlier))
    assert [known.get(index) for index in (0, 3, 4, 5)] == [None, None, earlier, None]
    known.close()


@pytest.mark.parametrize(
    ("edited", "reason"),
    [
        (result(-1), "index -1, but the input has 6 lines"),
        (result(6), "index 6, but the input has 6 lines"),
        (result(10**12), "index 1000000000000, but"),
        (result(1), "a second result with the index 1"),
        (result(admitted=None), "some of slot, admitted and finished are null"),
        (result(slot=None), "some of slot, admitted and finished are null"),
        (result(finished=None), "some of slot, admitted and finished are null"),
        (result(slot=-1), "slot -1, but there are 2"),
        (result(slot=2), "slot 2, but there are 2"),
        (result(admitted=-1, finished=1), "3 tokens cannot take the steps -1 to 1"),
        (result(admitted=3), "3 tokens cannot take the steps 3 to 2"),
        (result(finished=2**63 - 1), "3 tokens cannot take the steps 0 to"),
    ],
)
def test_what_no_such_run_can_have_given_is_refused(tmp_path, edited, reason):
    lines = [encode_result(result(1)), encode_result(edited)]
    with pytest.raises(ResumeError, match=rf"cannot resume .*out: line 2: {reason}"):
        took_over(tmp_path, *lines)


@pytest.mark.parametrize("line", [b'{"a":1}', b'{"a":' + b"[" * 100_000, b"\xff"])
def test_a_file_of_something_else_is_not_taken_over(tmp_path, line):
    with pytest.raises(ResumeError, match=r"cannot resume .*out: line 1"):
        took_over(tmp_path, line + b"\n")


def test_a_folder_is_not_taken_over(tmp_path):
    with pytest.raises(OutputError, match="cannot continue"):
        take_over(str(tmp_path), num_lines=6, num_slots=2, keep_order=False)
