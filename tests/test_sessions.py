"""Turns of a conversation: each waits for the one before it, and goes on from what that left."""

import pytest
from msgspec.structs import replace
from reference import ENGLISH, decode_alone

from batcher import Engine, Request, SimulatedModel
from batcher.errors import InvariantError
from batcher.events import ArriveEvent
from batcher.scheduling.scheduler import NO_CHANGES
from batcher.settings import DEFAULT_SCHEDULING, SchedulingSettings

ENCODE = ENGLISH.tokenizer.encode
PAGED = SchedulingSettings(kv_blocks=60, block_size=4)


def turn(name, prompt="Tell me", **fields):
    return Request(id=name, **{"prompt": prompt, "session": "s", "max_tokens": 8, **fields})


class Run:
    """An engine, and all it has said."""

    def __init__(self, requests=(), batch_size=3, settings=DEFAULT_SCHEDULING):
        model = SimulatedModel(is_attentive=True)
        self.engine = Engine(model, batch_size, settings=settings, is_checked=True)
        self.results = {}
        self.events = []
        for request in requests:
            self.engine.add(request)

    def step(self, num_steps=1):
        for _ in range(num_steps):
            outcome = self.engine.step()
            self.events += outcome.events
            self.results |= {result.id: result for result in outcome.results}
        return self

    def finish(self):
        while self.engine.has_work:
            assert self.engine.num_steps < 1000
            self.step()
        return self

    def arrivals(self):
        told = [event for event in self.events if isinstance(event, ArriveEvent)]
        return {event.id: (event.time, event.reason) for event in told}


def check_conversation(requests, results):
    """Each turn is what its prompt, behind all that was said before it, gives alone."""
    history = []
    for request in requests:
        own = ENCODE(request.prompt) if isinstance(request.prompt, str) else request.prompt
        prompt = [*history, *own]
        result = results[request.id]
        alone = decode_alone(replace(request, prompt=prompt), ENGLISH)
        assert (result.tokens, result.finish_reason) == (alone.tokens, alone.finish_reason)
        assert result.usage.prompt_tokens == len(prompt)
        history = [*prompt, *result.tokens]


CONVERSATION = [
    turn("a", " the river", ignore_eos=True),
    turn("b", [5, 6, 7], max_tokens=13),
    turn("c", "", max_tokens=5, stop_token=46),
    turn("d", "é—", max_tokens=0),
    turn("e", "And then?", max_tokens=20),
]


@pytest.mark.parametrize(
    "settings",
    [
        DEFAULT_SCHEDULING,
        PAGED,
        replace(PAGED, prefix_cache=False, max_batch_tokens=6),
        replace(PAGED, kv_blocks=30, prefill_order="prefill-first"),
        SchedulingSettings(policy="lpm", prefix_cache=True, long_prefill_threshold=3),
    ],
)
def test_a_turn_goes_on_from_all_that_was_said_before(settings):
    others = [Request(id=f"o{n}", prompt=[n] * 9, max_tokens=30, ignore_eos=True) for n in (3, 4)]
    run = Run([*CONVERSATION, *others], settings=settings).finish()
    check_conversation(CONVERSATION, run.results)


def test_a_turn_arrives_when_it_has_been_thought_about():
    requests = [
        turn("a", ignore_eos=True),
        turn("b", think_time=2.5, ignore_eos=True),
        turn("c", arrival_time=40.0, think_time=1.0),
        turn("d", arrival_time=3.0),
    ]
    run = Run(requests).finish()
    end = {name: run.results[name].steps.finished for name in "abc"}
    arrivals = run.arrivals()
    assert arrivals["a"] == (0.0, "input")
    assert arrivals["b"] == (8.0 + 2.5, "turn")
    assert arrivals["c"] == (40.0, "input"), "it comes later than it could"
    assert arrivals["d"][1] == "turn"
    assert arrivals["d"][0] == 40.0 + end["c"] - run.results["c"].steps.admitted + 1


def failed(run):
    errors = {name: result.error for name, result in run.results.items() if result.error}
    assert {error.code for error in errors.values()} <= {"session-failed"}
    return sorted(errors)


def test_behind_a_turn_that_failed_all_fail():
    settings = SchedulingSettings(kv_blocks=5, block_size=4)
    requests = [turn("a"), turn("big", [5] * 40), turn("c"), turn("d"), turn("x", session="y")]
    run = Run(requests, settings=settings).finish()
    assert run.results["big"].error.code == "kv-too-small"
    del run.results["big"]
    assert failed(run) == ["c", "d"]
    assert "'big'" in run.results["c"].error.message
    run.engine.add(turn("e"))
    assert failed(run.finish()) == ["c", "d", "e"]


def test_aborting_a_turn_that_waits_leaves_the_one_that_runs_alone():
    run = Run([turn(name, ignore_eos=True) for name in "abc"]).step(3)
    run.engine.abort("b")
    run.engine.add(turn("d"))
    run.step()
    assert run.engine.num_running == 1, "two turns run at once"
    run.finish()
    run.engine.add(turn("e"))
    run.finish()
    assert run.results["a"].finish_reason == "length"
    assert run.results["b"].finish_reason == "aborted"
    assert failed(run) == ["c", "d", "e"]


def test_a_session_is_remembered_and_a_failed_turn_names_no_time():
    run = Run([turn("a", ignore_eos=True)]).finish()
    late = turn("b", think_time=3.0)
    run.engine.add(late)
    run.finish()
    check_conversation([turn("a", ignore_eos=True), late], run.results)
    assert run.arrivals()["b"] == (11.0, "turn")
    requests = [turn("a", [5] * 300), turn("b", arrival_time=17.0)]
    run = Run(requests, settings=PAGED).step(2)
    assert {result.finish_reason for result in run.results.values()} == {"error"}
    assert not run.engine.has_work
    assert run.engine.wants_request


def test_a_step_without_progress_is_an_error(monkeypatch):
    run = Run([turn("a")])
    monkeypatch.setattr(run.engine.scheduler, "schedule", lambda *_: NO_CHANGES)
    with pytest.raises(InvariantError, match="none can run"):
        run.step(2)  # it arrives in the first
