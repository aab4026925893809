"""What the engine writes can be told: no contradiction, no step without a reason."""

from random import Random

from hypothesis import given
from hypothesis import strategies as st

from batcher import Engine, Request, SimulatedModel
from batcher.explaining.story import answer_of, read_requests
from batcher.settings import SchedulingSettings


def events_of(seed):
    """The events of a run of requests with a row each, under limits, all drawn from `seed`."""
    rng = Random(seed)
    batch = rng.randint(1, 6)
    scheduling = SchedulingSettings(
        policy=rng.choice(["fcfs", "priority"]),
        kv_blocks=rng.choice([None, rng.randint(24, 60)]),
        block_size=rng.choice([1, 2, 4]),
        max_batch_tokens=rng.choice([None, rng.randint(max(batch, 4), 20)]),
        prefill_order=rng.choice(["decode-first", "prefill-first"]),
        batching=rng.choice(["continuous", "continuous", "static"]),
    )
    engine = Engine(SimulatedModel(), batch, settings=scheduling)
    for number in range(rng.randint(1, 12)):
        engine.add(
            Request(
                id=f"r{number}",
                prompt=[rng.randint(1, 200) for _ in range(rng.randint(1, 12))],
                max_tokens=rng.randint(0, 12),
                arrival_time=rng.choice([0, 0, 0.5, 3, 40]),
                priority=rng.randint(0, 2),
                ignore_eos=True,
            )
        )
    events = [engine.run_event()]
    while engine.has_work:
        events += engine.step().events
    return [*events, engine.end_event()]


@given(st.integers(0, 2**32))
def test_every_step_of_every_request_has_a_reason_that_is_told(seed):
    for story in answer_of(read_requests(events_of(seed))).stories:
        causes = {part.cause for part in story.parts if part.phase == "wait"}
        assert "queue" not in causes  # no request needs more than one slot
        if story.parts:
            assert story.steps.sum == story.ended.step + 1 - story.arrived.step
            num_tokens = story.steps.decode + sum(s.first_token is not None for s in story.spans)
            assert num_tokens == story.ended.tokens
