"""SmolLM2 in other engines, from the same file, on the same cores: whole runs of equal prompts."""

import json
import os
import random
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.request import Request as HttpRequest
from urllib.request import urlopen

from report import Row

from batcher import Engine, Request
from batcher.models.transformer import TransformerModel

NUM_PROMPT, NUM_NEW = 20, 32  # tokens of a request
VOCABULARY = 49152
STREAMS = (1, 8, 16, 64)
CONTEXT = 256  # tokens of a stream
GOALS = {16: ">= 1.0x", 64: ">= 2x"}  # against llama.cpp


def prompts(count: int) -> list[list[int]]:
    """Return prompts that have nothing in common."""
    draw = random.Random(0)
    return [[draw.randrange(3, VOCABULARY) for _ in range(NUM_PROMPT)] for _ in range(count)]


def rate(model: TransformerModel, count: int) -> float:
    """Return how many tokens a second we generate for so many prompts at once, all in all."""
    engine = Engine(model.twin(), count)
    began = time.perf_counter()
    for prompt in prompts(count):
        engine.add(Request(prompt=prompt, max_tokens=NUM_NEW, ignore_eos=True))
    while engine.has_work:
        engine.step()
    return count * NUM_NEW / (time.perf_counter() - began)


def transformers_rate(path: Path, count: int) -> float:
    """Return the same of transformers' continuous batching."""
    import torch  # noqa: PLC0415 - optional
    from transformers import AutoModelForCausalLM, GenerationConfig  # noqa: PLC0415 - optional

    torch.set_num_threads(os.cpu_count() or 1)
    model = AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32, attn_implementation="sdpa"
    )
    config = GenerationConfig(
        max_new_tokens=NUM_NEW, do_sample=False, eos_token_id=-1, pad_token_id=0, use_cache=True
    )

    def seconds() -> float:
        began = time.perf_counter()
        model.generate_batch(inputs=prompts(count), generation_config=config, progress_bar=False)
        return time.perf_counter() - began

    return count * NUM_NEW / min(seconds() for _ in range(2))


class LlamaServer:
    """llama.cpp's server in this process."""

    def __init__(self, path: Path, num_streams: int) -> None:
        import xllamacpp  # noqa: PLC0415 - optional

        params = xllamacpp.CommonParams()
        params.model.path = str(path)
        params.n_parallel, params.n_ctx = num_streams, num_streams * CONTEXT
        params.port = 0
        params.cpuparams.n_threads = os.cpu_count() or 1
        self._server = xllamacpp.Server(params)

    def _complete(self, prompt: list[int]) -> int:
        asked: dict[str, Any] = {"prompt": prompt, "n_predict": NUM_NEW, "temperature": 0}
        asked |= {"ignore_eos": True, "cache_prompt": False}
        body = json.dumps(asked).encode()
        url = f"{self._server.listening_address}/completion"
        asking = HttpRequest(url, body, {"Content-Type": "application/json"})  # noqa: S310 - our own
        with urlopen(asking) as answer:  # noqa: S310 - as above
            return json.load(answer)["tokens_predicted"]

    def rate(self, count: int) -> float:
        """Return how many tokens a second it generates for so many prompts at once, all in all."""
        with ThreadPoolExecutor(count) as pool:
            began = time.perf_counter()
            num_tokens = sum(pool.map(self._complete, prompts(count)))
            return num_tokens / (time.perf_counter() - began)


def peers(models: dict[str, TransformerModel], path: Path) -> Iterator[Row]:
    """Yield the rows of the other engines that are installed."""
    if find_spec("torch") and find_spec("transformers"):
        theirs = transformers_rate(path, 16)
        for kind, model in models.items():
            ours = rate(model, 16)
            name = f"SmolLM2, {kind}, B=16: {ours:.0f} tokens/s, transformers' continuous batching"
            yield Row(f"{name} {theirs:.0f}", f"{ours / theirs:.1f}x", ">= 2x")
    else:
        yield Row("SmolLM2 against transformers: it is not installed", "not run", ">= 2x")
    if not find_spec("xllamacpp"):
        yield Row("SmolLM2 against llama.cpp: xllamacpp is not installed", "not run", "")
        return
    for count in STREAMS:
        server = LlamaServer(path, count)
        theirs = max(server.rate(count) for _ in range(2))
        del server
        for kind, model in models.items():
            ours = rate(model, count)
            name = f"SmolLM2, {kind}, {count} streams: {ours:.0f} tokens/s, llama.cpp's server"
            yield Row(f"{name} {theirs:.0f}", f"{ours / theirs:.1f}x", GOALS.get(count, ""))
