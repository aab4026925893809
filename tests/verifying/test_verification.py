"""The proof: it holds for the simulated model, and not for one that depends on the batch."""

import sys
from pathlib import Path

import pytest
from examples import mostly_heavy
from grouped_model import GroupedModel
from msgspec.structs import replace

from batcher import Request, SimulatedModel
from batcher.engine.model_runner import ModelRunner
from batcher.errors import InvariantError
from batcher.models.loading import as_model
from batcher.requests.lines import RequestParser
from batcher.requests.validation import ModelCapabilities
from batcher.scheduling.kv_cache import KVCache
from batcher.verifying import make_cases, needs_of, verify

SAMPLES = Path(__file__).parents[2] / "samples"
sys.path.insert(0, str(SAMPLES))
import batch_dependent  # noqa: E402 - it is a sample


def requests_of(name):
    parser = RequestParser(ModelCapabilities())
    lines = (SAMPLES / name).read_bytes().splitlines()
    return [parser.parse(line, number).request for number, line in enumerate(lines, start=1)]


def verdict_of(requests, make_model=SimulatedModel, num_cases=40, seed=0):
    cases = make_cases(needs_of(requests, make_model()), num_cases, seed)
    done = []
    found = verify(requests, make_model, cases, seed, done.append)
    assert done == [*range(1, found.num_settings + 1)]
    return found


FEW, MANY = (10, 21), (40, 0)  # settings, and the seed of what is drawn


@pytest.mark.parametrize(
    "name",
    mostly_heavy(
        [
            "scheduling/requests.jsonl",
            "prompts/sessions.jsonl",
            "decoding/beams.jsonl",
            "decoding/healing.jsonl",
            "decoding/states.jsonl",
            "decoding/sampling.jsonl",
        ],
        *("scheduling/requests.jsonl", "decoding/beams.jsonl"),
    ),
)
@pytest.mark.parametrize(
    ("num_settings", "seed"), [FEW, pytest.param(*MANY, marks=pytest.mark.heavy)]
)
def test_the_simulated_model_is_proven(name, num_settings, seed):
    found = verdict_of(requests_of(name), num_cases=num_settings, seed=seed)
    assert found.difference is None
    assert found.num_settings == num_settings
    assert found.exercised.cached_tokens
    assert found.exercised.chunks
    assert found.exercised.preemptions or name == "prompts/sessions.jsonl"


@pytest.mark.parametrize("kinds", [(None, 5, "state"), (None, 3)], ids=str)
def test_a_model_with_groups_of_layers_is_proven(kinds):
    requests = [
        Request(id=str(length), prompt=[5] * length, max_tokens=12, ignore_eos=True)
        for length in (20, 21, 22)
    ]
    found = verdict_of(requests, lambda: GroupedModel(*kinds), num_cases=24)
    assert found.difference is None
    assert found.exercised.cached_tokens


PLAIN = requests_of("scheduling/requests.jsonl")


def model_of(name):
    return lambda: as_model(getattr(batch_dependent, name))


@pytest.mark.parametrize("name", ["mixes_rows", "forgets_order", "KnowsSlots"])
def test_a_model_that_looks_beyond_its_rows_is_caught(name):
    found = verdict_of(PLAIN, model_of(name))
    assert found.is_deterministic
    assert found.difference.field == "tokens"
    assert found.case is not None


@pytest.mark.parametrize("name", ["draws", "StaleCache"])
def test_a_model_that_differs_from_itself_is_told_apart(name):
    found = verdict_of(PLAIN, model_of(name))
    assert not found.is_deterministic
    assert found.case is None
    assert found.num_settings == 0


@pytest.mark.heavy
def test_a_model_of_the_same_file_that_looks_at_its_rows_alone_is_proven():
    assert verdict_of(PLAIN, model_of("honest")).difference is None


def test_a_model_that_fails_in_a_large_batch_is_caught():
    def tired(prefixes):
        if len(prefixes) > 3:
            raise RuntimeError("too many")
        return [len(prefix) % 50 for prefix in prefixes]

    found = verdict_of(PLAIN, lambda: as_model(tired))
    assert found.difference is not None
    assert found.case.batch > 3


def test_a_copy_that_is_lost_is_caught(monkeypatch):
    monkeypatch.setattr(KVCache, "take_copies", lambda _: [])
    found = verdict_of(requests_of("decoding/beams.jsonl"))
    assert found.case.settings.is_paged


def test_blocks_that_are_shared_wrongly_are_caught(monkeypatch):
    begin = KVCache.__init__

    def forgetful(cache, its_settings, contents, *others):
        begin(cache, its_settings, lambda *asked: (0 for _ in contents(*asked)), *others)

    monkeypatch.setattr(KVCache, "__init__", forgetful)  # all blocks look alike
    found = verdict_of(PLAIN)
    assert found.case.settings.has_prefix_cache


def test_blocks_that_are_lost_are_caught_where_it_happens(monkeypatch):
    monkeypatch.setattr(KVCache, "close", lambda *_: None)
    with pytest.raises(InvariantError, match=r"\(under setting \d+\)"):
        verdict_of(PLAIN)


def without_the_first(events):
    return events[1:]


def in_capitals(events):
    return [replace(event, text=event.text.upper()) for event in events]


@pytest.mark.parametrize("telling", [without_the_first, in_capitals])
def test_a_stream_that_tells_something_else_is_caught(monkeypatch, telling):
    take = ModelRunner.take_streamed
    monkeypatch.setattr(ModelRunner, "take_streamed", lambda runner: telling(take(runner)))
    found = verdict_of(PLAIN)
    assert found.difference.field == "stream"
    assert found.case.is_streaming
