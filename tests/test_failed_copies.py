"""Rows whose blocks a call was to copy do not go on from what is not there if that call fails."""

from itertools import count

from test_scheduling_invariance import Outputs, alone, run

from batcher import Batch, Engine, ModelOutput, Request, SimulatedModel
from batcher.errors import ModelError
from batcher.settings import SchedulingSettings


class FailsOnce(SimulatedModel):
    """A model that raises in one of its calls, before it has done anything."""

    def __init__(self, number: int) -> None:
        super().__init__(is_attentive=True)
        self._number, self._calls = number, count()

    def forward(self, batch: Batch) -> ModelOutput:
        if next(self._calls) == self._number:
            raise ModelError("out of memory")
        return super().forward(batch)


def test_a_beam_does_not_go_on_from_a_copy_that_a_call_of_prompts_alone_was_to_make() -> None:
    beams = Request(id="beams", prompt=[40] * 5, max_tokens=24, num_beams=3, n=3, ignore_eos=True)
    later = [
        Request(id=f"late{n}", prompt=[50 + n] * 9, max_tokens=2, arrival_time=n)
        for n in range(2, 20, 2)
    ]
    settings = SchedulingSettings(
        prefill_order="prefill-first", max_batch_tokens=5, block_size=4, kv_blocks=90
    )
    good: Outputs = {}
    for request in [beams, *later]:
        good |= alone(SimulatedModel, request)
    num_failed = 0
    for number in range(30):
        engine = Engine(FailsOnce(number), 5, settings=settings, is_checked=True)
        for request in [beams, *later]:
            engine.add(request)
        for name, result in run(engine).items():
            num_failed += result.finish_reason == "error"
            assert result.finish_reason == "error" or result == good[name], (number, name)
    assert 30 < num_failed < 30 * len(good) / 3
