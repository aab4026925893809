"""Benchmark of SmolLM2: whole runs beside other engines, memory, likelihood, the engine's share.

Whatever is compared is done in turn, and the median of the ratios is told.
"""

import random
import statistics
import subprocess
import sys
import time
from pathlib import Path

from model_peers import peers
from workload import Row

from batcher import BatchdecodeError, Engine, Request
from batcher.models.checkpoints import load_transformer, smollm2_file
from batcher.settings import SchedulingSettings
from batcher.transformer.config import TransformerSettings

NUM_ROWS, NUM_STEPS = 64, 12
VOCABULARY = 49152
KINDS = {kind: TransformerSettings(weights=kind) for kind in ("fp32", "q8", "q4")}
NUM_PROMPTS, NUM_SYSTEM, NUM_OWN = 64, 512, 16  # prompts, and tokens: of all, and of each
CACHE = SchedulingSettings(block_size=16, prefix_cache=True, max_batch_tokens=2048)
TEXTS = ("docs/learn", "docs/guide", "docs/reference")  # folders of pages
NUM_PAGES = 4
NUM_SCORED = 1000  # tokens of each page; of fewer, a single one can change the sum by a percent
LOSSES = {"q8": "<= 0.3%", "q4": "<= 0.6%"}  # the rows are rounded, too
SIZES = {"q8": "<= 0.30x", "q4": "<= 0.17x"}
LOADED = """
import resource, sys
from batcher.models.checkpoints import load_transformer, open_checkpoint, smollm2_file
from batcher.transformer.config import TransformerSettings

if sys.argv[1] == "nothing":
    load_transformer("samples/tiny.gguf", TransformerSettings(weights="q8"))
    open_checkpoint(smollm2_file()).tokenizer
else:
    model = load_transformer("smollm2", TransformerSettings(weights=sys.argv[1]))
with open("/proc/self/status") as status:
    print(*[line.split()[1] for line in status if line.startswith("RssAnon")])
"""


class Watched:
    """Notes how long each step of a model takes, and how many tokens of prompts they have."""

    def __init__(self, model):
        self.seconds = []
        self.num_prompt_tokens = 0
        self._forward = model.forward
        model.forward = self._watch

    def _watch(self, batch):
        self.num_prompt_tokens += sum(len(chunk.token_ids) for chunk in batch.chunks)
        began = time.perf_counter()
        output = self._forward(batch)
        self.seconds.append(time.perf_counter() - began)
        return output


def own_share(model):
    """Yield the share of a step that is not the model's."""
    draw, twin = random.Random(0), model.twin()
    watched, engine, steps = Watched(twin), Engine(twin, NUM_ROWS), []
    for _ in range(NUM_ROWS):
        prompt = [draw.randrange(3, VOCABULARY) for _ in range(20)]
        engine.add(Request(prompt=prompt, max_tokens=NUM_STEPS + 3, ignore_eos=True))
    for _ in range(NUM_STEPS + 2):
        began = time.perf_counter()
        engine.step()
        steps.append(time.perf_counter() - began)
    pairs = [*zip(steps, watched.seconds, strict=True)][2:]
    share = statistics.median(1 - model / step for step, model in pairs)
    yield Row(f"the engine's own share of a step, q8, B={NUM_ROWS}", f"{share:.1%}", "<= 2 %")


def prefix_cache(model):
    """Yield what a prefix cache saves of prompts that begin alike, and until their first tokens."""
    draw = random.Random(0)
    drawn = [draw.randrange(3, VOCABULARY) for _ in range(NUM_SYSTEM + NUM_PROMPTS * NUM_OWN)]
    first_tokens, computed = [], []
    for settings in (CACHE, SchedulingSettings(max_batch_tokens=CACHE.max_batch_tokens)):
        twin = model.twin()
        watched = Watched(twin)
        engine = Engine(twin, NUM_PROMPTS, settings=settings)
        for number in range(NUM_PROMPTS):
            own = drawn[NUM_SYSTEM + number * NUM_OWN :][:NUM_OWN]
            engine.add(Request(prompt=[*drawn[:NUM_SYSTEM], *own], max_tokens=1, ignore_eos=True))
        began, waits = time.perf_counter(), []
        while engine.has_work:
            num_ended = len(engine.step().results)
            waits += [time.perf_counter() - began] * num_ended
        first_tokens.append(statistics.mean(waits))
        computed.append(watched.num_prompt_tokens)
    saved = 1 - computed[0] / computed[1]
    name = f"{NUM_PROMPTS} prompts, {NUM_SYSTEM} tokens of which are the same, prefix cache"
    yield Row(f"{name}: prompt work saved", f"{saved:.0%}", ">= 90 %")
    times = f"{first_tokens[0]:.1f} s, without {first_tokens[1]:.1f} s"
    faster = f"{first_tokens[1] / first_tokens[0]:.1f}x"
    yield Row(f"the same: time to first token {times}", faster, ">= 5x")


def loading(folder):
    """Yield how long a command takes that loads SmolLM2 and generates one token."""
    source, target = folder / "one.jsonl", folder / "one.results.jsonl"
    source.write_text('{"prompt": "Once upon a time", "max_tokens": 1}\n')
    tool = str(Path(sys.executable).with_name("batchdecode"))
    for kind in KINDS:
        seconds = []
        for _ in range(3):
            began = time.perf_counter()
            command = [tool, "run", str(source), "--model", "smollm2", "--weights", kind]
            subprocess.run([*command, "-o", str(target), "-q", "--force"], check=True)
            seconds.append(time.perf_counter() - began)
        name = f"SmolLM2, {kind}: a command from its start to its first token"
        yield Row(name, f"{min(seconds):.1f} s", "<= 1.5 s" if kind == "q8" else "")


def memory():
    """Yield the memory of the weights, as part of that of float32."""
    sizes = {}
    for kind in ("nothing", *KINDS):
        done = subprocess.run(
            [sys.executable, "-c", LOADED, kind], check=True, capture_output=True, text=True
        )
        sizes[kind] = int(done.stdout) - sizes.get("nothing", 0)
    for kind, goal in SIZES.items():
        share = sizes[kind] / sizes["fp32"]
        name = f"SmolLM2, {kind}: {sizes[kind] / 1024:.0f} MiB of weights, fp32"
        yield Row(f"{name} {sizes['fp32'] / 1024:.0f}", f"{share:.2f}x", goal)


def log_likelihood(model, text):
    tokens = model.tokenizer.encode(text)[:NUM_SCORED]
    engine = Engine(model.twin(), 1)
    engine.add(Request(prompt=[*tokens], max_tokens=1, prompt_logprobs=0))
    [result] = [result for _ in range(3) if engine.has_work for result in engine.step().results]
    return sum(entry.logprob or 0.0 for entry in result.prompt_logprobs)


def likelihoods(models):
    """Yield what the formats lose of the log-likelihood of texts."""
    for folder in TEXTS:
        pages = sorted(Path(folder).glob("*.md"))[:NUM_PAGES]
        texts = [page.read_text(encoding="utf-8") for page in pages]
        sums = {
            kind: sum(log_likelihood(model, text) for text in texts)
            for kind, model in models.items()
        }
        for kind, goal in LOSSES.items():
            lost = sums[kind] / sums["fp32"] - 1
            name = f"SmolLM2, {NUM_PAGES} pages of {folder}: log-likelihood lost to {kind}"
            yield Row(name, f"{lost:+.2%}", goal)


def models(folder):
    """Yield all rows of SmolLM2; of other engines, if they are installed."""
    try:
        path = smollm2_file()
    except BatchdecodeError as error:
        yield Row(f"SmolLM2: {error}", "not run", "")
        return
    loaded = {kind: load_transformer("smollm2", how) for kind, how in KINDS.items()}
    yield from likelihoods(loaded)
    yield from memory()
    yield from loading(folder)
    yield from own_share(loaded["q8"])
    yield from prefix_cache(loaded["q8"])
    yield from peers(loaded, path)
