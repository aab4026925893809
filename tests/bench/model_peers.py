"""SmolLM2 in other engines, from the same file, on the same cores: whole runs of equal prompts."""

import json
import os
import random
import time
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from importlib.util import find_spec
from statistics import median
from urllib.request import Request as HttpRequest
from urllib.request import urlopen

from workload import Row

from batcher import ByteTokenizer, Engine, Request
from batcher.models.tiles import TileModel

NUM_PROMPT, NUM_NEW = 20, 32  # tokens of a request
VOCABULARY = 49152
STREAMS = (1, 8, 16, 64)
NUM_TURNS = 3
CONTEXT = 256  # tokens of a stream
GOALS = {1: ">= 0.75x", 8: ">= 1.8x", 16: ">= 2.1x", 64: ">= 2.4x"}  # q8 against llama.cpp


def prompts(count):
    draw = random.Random(0)
    return [[draw.randrange(3, VOCABULARY) for _ in range(NUM_PROMPT)] for _ in range(count)]


def rate(model, count):
    """Return how many tokens a second we generate for so many prompts at once, all in all."""
    engine = Engine(model.twin(), count)
    began = time.perf_counter()
    for prompt in prompts(count):
        engine.add(Request(prompt=prompt, max_tokens=NUM_NEW, ignore_eos=True))
    while engine.has_work:
        engine.step()
    return count * NUM_NEW / (time.perf_counter() - began)


def in_transformers(path):
    """Return the model as transformers reads it."""
    import torch  # noqa: PLC0415 - optional
    from transformers import AutoModelForCausalLM  # noqa: PLC0415 - optional

    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", os.cpu_count() or 1)))
    model = AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32, attn_implementation="sdpa"
    )
    return model.eval().requires_grad_(requires_grad=False)


def transformers_rate(model, count):
    """Return the same of transformers' continuous batching."""
    from transformers import GenerationConfig  # noqa: PLC0415 - optional

    config = GenerationConfig(
        max_new_tokens=NUM_NEW, do_sample=False, eos_token_id=-1, pad_token_id=0, use_cache=True
    )

    def seconds():
        began = time.perf_counter()
        model.generate_batch(inputs=prompts(count), generation_config=config, progress_bar=False)
        return time.perf_counter() - began

    return count * NUM_NEW / min(seconds() for _ in range(2))


def hf(path):
    """Yield what the model of transformers comes to in our batch, and in that of its own.

    Both have the same weights and are measured in turn.
    """
    from batcher.hf.model import Sizes, parts_of  # noqa: PLC0415 - optional
    from batcher.hf.tiles import TileDecoder  # noqa: PLC0415 - optional

    model = in_transformers(path)
    sizes = Sizes(VOCABULARY, CONTEXT, ())
    for kind, is_exact in (("hf:", True), ("hf: --fast-math", False)):
        tiles = TileDecoder(parts_of(deepcopy(model)), sizes, is_exact=is_exact)
        ours = TileModel(tiles, ByteTokenizer(), kind, {})
        rates = [(rate(ours, 16), transformers_rate(model, 16)) for _ in range(3)]
        ratio = median(one / other for one, other in rates)
        our_rate, their_rate = max(one for one, _ in rates), max(other for _, other in rates)
        name = f"SmolLM2, {kind}, B=16: {our_rate:.0f} tokens/s, its own continuous batching"
        yield Row(f"{name} {their_rate:.0f}", f"{ratio:.1f}x", "" if is_exact else ">= 1.2x")


class LlamaServer:
    """llama.cpp's server in this process."""

    def __init__(self, path, num_streams):
        import xllamacpp  # noqa: PLC0415 - optional

        params = xllamacpp.CommonParams()
        params.model.path = str(path)
        params.n_parallel, params.n_ctx = num_streams, num_streams * CONTEXT
        params.port = 0
        params.cpuparams.n_threads = os.cpu_count() or 1
        self._server = xllamacpp.Server(params)

    def _complete(self, prompt):
        asked = {"prompt": prompt, "n_predict": NUM_NEW, "temperature": 0}
        asked |= {"ignore_eos": True, "cache_prompt": False}
        body = json.dumps(asked).encode()
        url = f"{self._server.listening_address}/completion"
        asking = HttpRequest(url, body, {"Content-Type": "application/json"})  # noqa: S310 - our own
        with urlopen(asking) as answer:  # noqa: S310 - as above
            return json.load(answer)["tokens_predicted"]

    def rate(self, count):
        with ThreadPoolExecutor(count) as pool:
            began = time.perf_counter()
            num_tokens = sum(pool.map(self._complete, prompts(count)))
            return num_tokens / (time.perf_counter() - began)


def peers(models, path):
    """Yield the rows of the other engines that are installed."""
    if find_spec("torch") and find_spec("transformers"):
        theirs = transformers_rate(in_transformers(path), 16)
        for kind, model in models.items():
            ours = rate(model, 16)
            name = f"SmolLM2, {kind}, B=16: {ours:.0f} tokens/s, transformers' continuous batching"
            yield Row(f"{name} {theirs:.0f}", f"{ours / theirs:.1f}x", ">= 2x")
        yield from hf(path)
    else:
        yield Row("SmolLM2 against transformers: it is not installed", "not run", ">= 2x")
    if not find_spec("xllamacpp"):
        yield Row("SmolLM2 against llama.cpp: xllamacpp is not installed", "not run", "")
        return
    for count in STREAMS:
        server = LlamaServer(path, count)
        rates = [
            (server.rate(count), *(rate(model, count) for model in models.values()))
            for _ in range(NUM_TURNS)
        ]
        del server
        theirs = max(one for one, *_ in rates)
        for number, kind in enumerate(models, 1):
            ours, ratio = (
                max(one[number] for one in rates),
                median(one[number] / one[0] for one in rates),
            )
            name = f"SmolLM2, {kind}, {count} streams: {ours:.0f} tokens/s, llama.cpp's server"
            yield Row(f"{name} {theirs:.0f}", f"{ratio:.2f}x", GOALS[count] if kind == "q8" else "")
