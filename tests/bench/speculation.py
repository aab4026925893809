"""Benchmark of speculation: whole runs with drafts against the same without, and what drafts cost.

Runs are compared by the seconds of the processor, one after the other in one process.
"""

import statistics
import time
from collections.abc import Iterator
from pathlib import Path

from report import Row

from batcher import BatchdecodeError, Engine, Request, SimulatedModel
from batcher.events import AcceptEvent, DraftEvent
from batcher.models.checkpoints import load_transformer
from batcher.models.transformer import TransformerModel
from batcher.scheduling.clock import WallClock
from batcher.speculation.settings import SpeculationSettings
from batcher.transformer.config import TransformerSettings

PAIR = Path(__file__).parents[2] / "samples" / "shakespeare"
KINDS = {"fp32": TransformerSettings(), "--fast-math": TransformerSettings(fast_math=True)}
TEXT = (
    "The lighthouse keeper kept a ledger of every ship that passed. On the third of March he "
    "wrote: the brig Marigold, two masts, bound for Lisbon, passed at dawn in a light fog."
)
QUOTE = (
    "<|im_start|>user\nRepeat the following text word for word, then repeat it again:\n"
    f"{TEXT}<|im_end|>\n<|im_start|>assistant\n"
)
SPEECHES = ["ROMEO. ", "My lord, I ", "What is thy name?", "Good morrow, cousin."]
NUM_ROWS, NUM_TOKENS = 64, 400
NUM_DRAFTS, AGREEMENT, TIMES = (4, 8, 16), 0.8, 9


def seconds(
    model: TransformerModel,
    requests: list[Request],
    num_slots: int,
    speculation: SpeculationSettings | None,
) -> float:
    """Return what it takes to decode all requests, once their prompts are computed."""
    engine = Engine(model.twin(), num_slots, clock=WallClock(), speculation=speculation)
    for request in requests:
        engine.add(request)
    engine.step()
    began = time.process_time()
    while engine.has_work:
        engine.step()
    return time.process_time() - began


def speedup(
    model: TransformerModel, requests: list[Request], num_slots: int, how: SpeculationSettings
) -> str:
    """Return how much faster a run is with drafts."""
    without = seconds(model, requests, num_slots, None)
    return f"{without / seconds(model, requests, num_slots, how):.2f}x"


def own_cost(num_drafts: int) -> tuple[float, float]:
    """Return what the loop takes in steps of NUM_ROWS rows beside the model and what drafts for it.

    That is microseconds for each draft, and how often as long as a step without drafts it takes.
    """
    seconds, num_drafted, num_steps = engine_seconds(f"simulated:{AGREEMENT}", num_drafts)
    plain, _, num_plain_steps = engine_seconds(None, 0)
    return seconds / num_drafted * 1e6, seconds / num_steps / (plain / num_plain_steps)


def engine_seconds(draft: str | None, num_drafts: int) -> tuple[float, int, int]:
    """Return the seconds of an engine less those of its model and its drafts, drafts and steps.

    Of the steps that give all rows tokens, from the second to the one in which the first row ends.
    """
    model, spent = SimulatedModel(), [0.0]
    speculation = draft and SpeculationSettings(draft=draft, draft_tokens=num_drafts)
    engine = Engine(model, NUM_ROWS, speculation=speculation or None)

    def timed(call):
        def run(*arguments):
            began = time.process_time()
            answer = call(*arguments)
            spent[0] += time.process_time() - began
            return answer

        return run

    model.forward = timed(model.forward)
    if engine._speculator is not None:
        drafter = engine._speculator._drafter
        drafter.propose, drafter.extend = timed(drafter.propose), timed(drafter.extend)
    for number in range(NUM_ROWS):
        engine.add(Request(prompt=[40 + number] * 9, max_tokens=NUM_TOKENS, ignore_eos=True))
    engine.step()
    spent[0], num_drafted, began = 0.0, 0, time.process_time()
    while engine.num_running == NUM_ROWS:
        events = engine.step().events
        num_drafted += sum(event.tokens for event in events if type(event) is DraftEvent)
    return time.process_time() - began - spent[0], num_drafted, engine.num_steps - 1


def own_costs() -> Iterator[Row]:
    """Yield what drafts cost the loop, the medians of TIMES."""
    for number in NUM_DRAFTS:
        costs = [own_cost(number) for _ in range(TIMES + 1)][1:]
        each, ratio = map(statistics.median, zip(*costs, strict=True))
        name = (
            f"the loop's own cost of a draft, {number} drafts, B={NUM_ROWS}: "
            f"its step is {ratio:.0f} plain ones"
        )
        yield Row(name, f"{each:.1f} us", "<= 1 us")


def shapes() -> Iterator[Row]:
    """Yield what as many drafts give in a line and in a tree, by how often they are right."""
    requests = [
        Request(id=str(number), prompt=[number] * 5, max_tokens=NUM_TOKENS // 2, ignore_eos=True)
        for number in range(NUM_ROWS)
    ]
    for rate in (0.4, 0.6, 0.8):
        for tree in (None, "2x4"):
            how = SpeculationSettings(draft=f"simulated:{rate}", draft_tokens=8, draft_tree=tree)
            engine = Engine(SimulatedModel(), NUM_ROWS, speculation=how)
            for request in requests:
                engine.add(request)
            num_steps = num_more = 0
            while engine.has_work:
                events = engine.step().events
                num_steps += sum(type(event) is DraftEvent for event in events)
                num_more += sum(event.tokens for event in events if type(event) is AcceptEvent)
            shape = "in a line" if tree is None else f"in a tree of {tree}"
            name = f"tokens of a step with 8 drafts {shape}, right {rate:.0%} of the time"
            yield Row(name, f"{1 + num_more / num_steps:.2f}", "")


def speculation(folder: Path) -> Iterator[Row]:
    """Yield all rows; those of SmolLM2 if it is installed."""
    yield from own_costs()
    yield from shapes()
    speeches = [
        Request(prompt=p, max_tokens=120, temperature=1.0, ignore_eos=True) for p in SPEECHES
    ]
    for kind, how in KINDS.items():
        target = load_transformer(str(PAIR / "target"), how)
        for number in (2, 3):
            draft = SpeculationSettings(draft=str(PAIR / "draft"), draft_tokens=number)
            name = f"samples/shakespeare, {kind}, B=1, {number} drafts of its draft model"
            yield Row(name, speedup(target, speeches, 1, draft), ">= 1.3x")
        tree = SpeculationSettings(draft=str(PAIR / "draft"), draft_tree="4x1")
        name = f"samples/shakespeare, {kind}, B=1, 4 drafts of its draft model, a tree of 4x1"
        yield Row(name, speedup(target, speeches, 1, tree), "")
    for kind, how in KINDS.items():
        try:
            smollm2 = load_transformer("smollm2", how)
        except BatchdecodeError as error:
            yield Row(f"SmolLM2: {error}", "not run", "")
            return
        quote = [Request(prompt=QUOTE, max_tokens=64, ignore_eos=True)]
        for draft, number in (("ngram", 8), ("ngram", "auto")):
            how_many = SpeculationSettings(draft=draft, draft_tokens=number)
            name = f"SmolLM2 quoting, {kind}, B=1, {draft}, {number} drafts"
            target = {"fp32": ">= 2x", "--fast-math": ">= 1.2x"}[kind] if draft == "ngram" else ""
            yield Row(name, speedup(smollm2, quote, 1, how_many), target)
        tree = SpeculationSettings(draft="ngram", draft_tree="2x4")
        name = f"SmolLM2 quoting, {kind}, B=1, ngram, 8 drafts in a tree of 2x4"
        yield Row(name, speedup(smollm2, quote, 1, tree), "")
    auto = SpeculationSettings(draft="ngram", draft_tokens="auto")
    many = [
        Request(prompt=f"Write about the number {number}.", max_tokens=128, ignore_eos=True)
        for number in range(NUM_ROWS)
    ]
    name = f"SmolLM2 writing, --fast-math, B={NUM_ROWS}, ngram, auto"
    yield Row(name, speedup(smollm2, many, NUM_ROWS, auto), ">= 0.97x")
