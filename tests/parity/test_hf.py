"""Models of transformers in our batch give the tokens that `generate` gives for each request."""

from random import Random

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from hf_models import PAGED, ROW_BY_ROW, VOCAB, generated, random_model  # noqa: E402 - needs torch

from batcher import Engine, Request, load_model  # noqa: E402 - as above
from batcher.models.slots import SlotModel  # noqa: E402 - as above
from batcher.models.transformer import TransformerModel  # noqa: E402 - as above
from batcher.settings import SchedulingSettings  # noqa: E402 - as above

NUM_TOKENS = 64
LENGTHS = (3, 17, 9, 30, 1, 12)
SCHEDULES = {
    "plain": {},
    "chunks": {"max_batch_tokens": 7, "prefill_order": "prefill-first"},
    "few blocks": {"kv_blocks": 80, "block_size": 4, "max_batch_tokens": 12},
    "prefix cache": {"prefix_cache": True, "block_size": 4, "long_prefill_threshold": 5},
}


@pytest.fixture(autouse=True)
def _alone_and_quiet():
    torch.set_num_threads(1)  # of tiny products several only wait for each other
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()


def prompts():
    draw = Random(0)
    begin = [draw.randrange(3, VOCAB) for _ in range(8)]
    drawn = [[draw.randrange(3, VOCAB) for _ in range(length)] for length in LENGTHS]
    return [*drawn, begin + drawn[0], begin + drawn[1]]


def decoded(model, schedule, speculation=None, **fields):
    engine = Engine(model, 3, settings=SchedulingSettings(**schedule), speculation=speculation)
    for number, prompt in enumerate(prompts()):
        request = {"prompt": prompt, "max_tokens": NUM_TOKENS, "ignore_eos": True, **fields}
        engine.add(Request(id=str(number), **request))
    results = []
    while engine.has_work:
        results += engine.step().results
    assert not [result.error for result in results if result.error]
    return [result.tokens for result in sorted(results, key=lambda result: int(result.id))]


@pytest.fixture(params=[*PAGED, *ROW_BY_ROW])
def saved(request, tmp_path):
    """A kind of model, its folder, and what it generates of each prompt."""
    model = random_model(request.param)
    model.save_pretrained(tmp_path)
    expected = [generated(model, prompt, NUM_TOKENS) for prompt in prompts()]
    assert len({token for tokens in expected for token in tokens}) > 20
    return request.param, tmp_path, expected


def test_tokens_are_those_that_generate_gives(saved):
    name, folder, expected = saved
    model = load_model(f"hf:{folder}")
    assert isinstance(model.inner, TransformerModel if name in PAGED else SlotModel)
    for schedule in SCHEDULES.values():
        assert decoded(model, schedule) == expected, schedule
