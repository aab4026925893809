import pytest

from batcher.errors import BatchdecodeError
from batcher.metrics.slo import Slo, parse_slo


@pytest.mark.parametrize(
    ("text", "limits"),
    [
        ("ttft=0.5", {"ttft": 0.5}),
        ("ttft=0.5,tpot=50ms,e2e=10s,queue=2", {"ttft": 0.5, "tpot": 0.05, "e2e": 10, "queue": 2}),
        (" tpot = 1e-2 , ttft=.5 ", {"tpot": 0.01, "ttft": 0.5}),
        ("tpot=800us", {"tpot": 0.0008}),
        ("e2e=2. s", {"e2e": 2.0}),
    ],
)
def test_limits_are_seconds_unless_they_have_a_unit(text, limits):
    assert parse_slo(text) == Slo(pytest.approx(limits))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "SLO '': '' is no limit such as ttft=0.5"),
        ("ttft", "SLO 'ttft': 'ttft' is no limit such as ttft=0.5"),
        ("ttft=1,", "SLO 'ttft=1,': '' is no limit such as ttft=0.5"),
        ("itl=1", "SLO 'itl=1': unknown metric 'itl'; known: queue, ttft, tpot, e2e"),
        ("ttft=1,ttft=2", "SLO 'ttft=1,ttft=2': ttft is there twice"),
        ("ttft=5m", "SLO 'ttft=5m': ttft: unknown unit 'm'; known: s, ms, us, none for seconds"),
        ("ttft=-1", "SLO 'ttft=-1': ttft: '-1' is no time such as 0.5 or 500ms"),
        ("ttft=", "SLO 'ttft=': ttft: '' is no time such as 0.5 or 500ms"),
        ("ttft=nan", "SLO 'ttft=nan': ttft: 'nan' is no time such as 0.5 or 500ms"),
        ("ttft=0", "SLO 'ttft=0': ttft: 0 is not a time of at least a microsecond"),
        ("ttft=1e999", "SLO 'ttft=1e999': ttft: 1e999 is not a time of at least a microsecond"),
    ],
)
def test_what_is_no_slo_is_refused_and_says_what_is(text, message):
    with pytest.raises(BatchdecodeError) as refused:
        parse_slo(text)
    assert str(refused.value) == message
