"""What can be simulated by lengths alone, and what a workload makes of requests."""

import pytest
from jobs import simulate

from batcher import Request, SimulatedModel
from batcher.errors import BatchdecodeError
from batcher.planning.workload import workload_of
from batcher.request import PromptSegment
from batcher.settings import SchedulingSettings
from batcher.timing.step_time import ConstantStepTime

MODEL = SimulatedModel()


def request(**more):
    return Request(**{"prompt": [5, 6, 7], "max_tokens": 4, "ignore_eos": True, **more})


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"num_beams": 2}, "request '1': num_beams 2 cannot be simulated; only"),
        ({"cfg_scale": 1.5}, "request '1': cfg_scale 1.5 cannot be simulated; only"),
        ({"ignore_eos": False}, "request '1' may end before max_tokens"),
        ({"stop": "x"}, "request '1' may end before max_tokens"),
        ({"regex": "a+"}, "request '1' may end before max_tokens"),
    ],
)
def test_what_does_not_follow_from_lengths_is_refused(more, message):
    with pytest.raises(BatchdecodeError) as caught:
        workload_of([request(**more)], MODEL)
    assert str(caught.value).startswith(message)


def test_outputs_that_are_known_may_end_early():
    workload = workload_of([request(ignore_eos=False)], MODEL, {(0, 0): [9, 2]})
    (job,) = workload.jobs
    assert (job.output.length, job.max_tokens) == (2, 4)
    (sequence,) = simulate(workload, 1, SchedulingSettings(), ConstantStepTime()).sequences
    assert (sequence.admitted, sequence.first_token, sequence.end) == (0.0, 1.0, 2.0)


def test_samples_are_jobs_of_their_own():
    workload = workload_of([request(n=3, temperature=1.0), request()], MODEL)
    assert [(job.id, job.index, job.input_index) for job in workload.jobs] == [
        ("1", 0, 0),
        ("1", 1, 0),
        ("1", 2, 0),
        ("2", 0, 1),
    ]
    assert workload.num_output_tokens == 16


def found(first, second):
    """How many tokens the second finds in blocks of 4 when the first has ended."""
    settings = SchedulingSettings(prefix_cache=True, block_size=4)
    workload = workload_of([first, second], MODEL)
    return simulate(workload, 1, settings, ConstantStepTime()).sequences[1].num_cached_at_first


def test_equal_seeds_are_equal_tokens_and_others_are_not():
    def drawn(*parts):
        segments = [PromptSegment(length=length, seed=seed) for length, seed in parts]
        return request(prompt=segments)

    assert found(drawn((10, 1)), drawn((20, 1))) == 8
    assert found(drawn((10, 1)), drawn((20, 2))) == 0
    assert found(drawn((8, 1), (8, 2)), drawn((8, 1), (8, 3))) == 8
    assert found(request(prompt=[7] * 9), request(prompt=[7] * 9)) == 8
    assert found(request(prompt=[7] * 9), request(prompt=[7] * 9, cache_salt="a")) == 0


def test_greedy_outputs_of_equal_prompts_are_equal():
    def turn(prompt, **more):
        return request(prompt=prompt, max_tokens=9, session="s", **more)

    settings = SchedulingSettings(prefix_cache=True, block_size=4)
    workload = workload_of([turn([5] * 4), turn([6] * 4)], MODEL)
    result = simulate(workload, 2, settings, ConstantStepTime())
    assert result.sequences[1].num_prompt_tokens == 17
    assert result.sequences[1].num_cached_at_first == 12  # of 4 + 9 the last is not computed
