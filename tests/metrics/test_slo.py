import pytest

from batcher.errors import BatchdecodeError
from batcher.metrics.slo import Slo, doubtful_limits, parse_slo, parse_slos


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
    ("text", "remarks"),
    [
        ("tpot=30", ["tpot=30 is 30 seconds; for milliseconds: tpot=30ms"]),
        (
            "priority=1:ttft=500, tpot = 1.5 ,e2e=900",
            [
                "ttft=500 is 500 seconds; for milliseconds: ttft=500ms",
                "tpot=1.5 is 1.5 seconds; for milliseconds: tpot=1.5ms",
            ],
        ),
        ("tpot=30s,ttft=500 s", []),
        ("tpot=0.03,ttft=2,queue=900,e2e=86400", []),
    ],
)
def test_a_number_that_may_be_meant_in_milliseconds_is_remarked(text, remarks):
    parse_slos([text])
    assert doubtful_limits([text]) == remarks


A_PRIORITY = "expected a whole number from -2,147,483,647 to 2,147,483,647"


def test_classes_are_promised_other_things_than_all():
    slo = parse_slos(["ttft=1,tpot=30ms", "priority=1:ttft=0.3", " priority = -2 : e2e=5"])
    assert slo == Slo({"ttft": 1, "tpot": 0.03}, {1: Slo({"ttft": 0.3}), -2: Slo({"e2e": 5})})
    assert slo.all_limits == {"ttft": 1, "tpot": 0.03, "priority=1:ttft": 0.3, "priority=-2:e2e": 5}
    assert parse_slos(["priority=1:ttft=0.3"]) == Slo({}, {1: Slo({"ttft": 0.3})})
    assert parse_slos([]) is None


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        ([""], "SLO '': '' is not a limit such as ttft=0.5"),
        (["ttft"], "SLO 'ttft': 'ttft' is not a limit such as ttft=0.5"),
        (["ttft=1,"], "SLO 'ttft=1,': '' is not a limit such as ttft=0.5"),
        (["itl=1"], "SLO 'itl=1': unknown metric 'itl'; known: queue, ttft, tpot, e2e"),
        (["ttft=1,ttft=2"], "SLO 'ttft=1,ttft=2': ttft is given twice"),
        (
            ["ttft=5m"],
            "SLO 'ttft=5m': ttft: unknown unit 'm'; known: s, ms, us, or none for seconds",
        ),
        (["ttft=-1"], "SLO 'ttft=-1': ttft: '-1' is not a time such as 0.5 or 500ms"),
        (["ttft="], "SLO 'ttft=': ttft: '' is not a time such as 0.5 or 500ms"),
        (["ttft=nan"], "SLO 'ttft=nan': ttft: 'nan' is not a time such as 0.5 or 500ms"),
        (["ttft=0"], "SLO 'ttft=0': ttft: 0 is shorter than 1 us, or not a time"),
        (["ttft=1e999"], "SLO 'ttft=1e999': ttft: 1e999 is shorter than 1 us, or not a time"),
        (["ttft=1", "tpot=1"], "SLO 'tpot=1': a second SLO for all requests"),
        (
            ["priority=1:ttft=1", "priority=+1:tpot=1"],
            "SLO 'priority=+1:tpot=1': a second SLO for priority=1",
        ),
        (["priority=high:ttft=1"], f"SLO 'priority=high:ttft=1': priority 'high': {A_PRIORITY}"),
        (
            ["priority=2147483648:ttft=1"],
            f"SLO 'priority=2147483648:ttft=1': priority '2147483648': {A_PRIORITY}",
        ),
        (["priority=1:"], "SLO '': '' is not a limit such as ttft=0.5"),
        (["tag=1:ttft=1"], "SLO 'tag=1:ttft=1': 'tag=1:ttft=1' is not a limit such as ttft=0.5"),
    ],
)
def test_what_is_no_slo_is_refused_and_says_what_is(texts, message):
    with pytest.raises(BatchdecodeError) as refused:
        parse_slos(texts)
    assert str(refused.value) == message
