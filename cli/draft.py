"""`batchdecode draft diagnose`: from a file of requests to what is wrong with a draft."""

from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec.structs import replace

from batcher.api import decode
from batcher.engine import Engine
from batcher.errors import BatchdecodeError
from batcher.models.base import Model
from batcher.models.loading import load_model
from batcher.prompts import read_prompt
from batcher.request import SAMPLING_FIELDS, Request
from batcher.requests.validation import misfit
from batcher.speculation.diagnosis import Cause, Diagnosis, TargetOutput, can_be_compared, diagnose
from batcher.speculation.settings import ModelDraft, expected_tokens, parse_draft
from batcher.transformer.config import is_checkpoint

from .models import capabilities_of, load, model_again
from .run.files import print_json, print_text
from .run.input import open_input, read_requests
from .screen.terminal import aligned, counted, printable

if TYPE_CHECKING:
    from .commands.draft import DiagnoseOptions

_BATCH = 8
_NUM_PARTS = 8  # of the outputs, whose overlaps are shown beside each other
_NUM_DRAFTS = 4  # of the example
_ADVICE: dict[Cause, str] = {
    "tokenizer": "give it a draft with the tokenizer of the target, special tokens included",
    "cache": "the cache of the draft does not hold what the row has: see what rolls it back",
    "positions": "the draft answers for another position than it is asked for: see where it begins",
    "temperature": "let the draft draw at the temperature of the target",
    "processor": "let the draft have all settings of the target that change its probabilities",
    "weak": "nothing is wrong with how it is asked: a better draft is one that knows more",
    "none": "it drafts well",
}


def print_diagnosis(options: "DiagnoseOptions") -> None:
    """Carry out `batchdecode draft diagnose`.

    Raises:
        BatchdecodeError: the input or a model is not right.
        WriteError, BrokenPipeError: stdout takes no more.
    """
    model = load(options)
    draft, fields = _loaded_draft(options), _read_fields(options.draft_fields)
    rows, name = _sample(options, model)
    diagnosis = diagnose(rows, model_again(model, options), draft, fields)
    if options.json:
        print_json(diagnosis)
    else:
        print_text(render_diagnosis(diagnosis, options, name))


def _loaded_draft(options: "DiagnoseOptions") -> Model:
    """Return the model that drafts, or raise a BatchdecodeError."""
    named = parse_draft(options.draft)
    if not isinstance(named, ModelDraft) or named.name.startswith("simulated:"):
        raise BatchdecodeError(
            f"--draft {options.draft} has no probabilities to compare: name a model, as --model"
        )
    given = {**options.transformer_settings, **options.checkpoint}
    is_file = is_checkpoint(named.name)
    return load_model(named.name, {}, None, options.llm_settings, given if is_file else {})


def _read_fields(text: str | None) -> dict[str, Any]:
    """Return the sampling fields in `text`, or raise a BatchdecodeError."""
    if text is None:
        return {}
    known = [name for name in SAMPLING_FIELDS if name != "seed"]
    try:
        given = msgspec.json.decode(text, type=dict[str, Any])
        unknown = next((name for name in given if name not in known), None)
        if unknown is not None:
            raise BatchdecodeError(f"--draft-fields: {unknown!r} is none of {', '.join(known)}")
        wrong = misfit(Request, given)
        if wrong is not None:
            raise BatchdecodeError(f"--draft-fields: {wrong}")
        request = msgspec.convert({"prompt": "", **given}, Request)
    except (ValueError, RecursionError) as error:  # the other: nested too deeply
        raise BatchdecodeError(f"--draft-fields: {error}") from None
    return {name: getattr(request, name) for name in given}


def _sample(options: "DiagnoseOptions", model: Model) -> tuple[list[TargetOutput], str]:
    """Return what the target writes for some of the requests, and the name of the input.

    Raises:
        BatchdecodeError: the input is not right, or has nothing to compare.
    """
    engine = Engine(model, 1, grammar_timeout=options.grammar_timeout)
    capabilities = replace(capabilities_of(engine, options), num_slots=None)
    with open_input(options.input, nullcontext) as source:
        requests = read_requests(source, capabilities, options.color, "nothing decoded.")
    chosen = [
        replace(
            request,
            max_tokens=min(request.output_limit, options.tokens),
            arrival_time=0.0,
            deadline=None,
            n=1,
            best_of=None,
        )
        for request in requests
        if can_be_compared(request)
    ][: options.sample]
    rows = []
    for request, result in zip(chosen, decode(chosen, model=model, batch_size=_BATCH), strict=True):
        prompt = read_prompt(request.prompt, "prompt", result.id, model).tokens
        if prompt and result.tokens:
            rows.append(TargetOutput(request, list(prompt), result.tokens))
    if not rows:
        raise BatchdecodeError(
            f"{source.name} has no request to compare: one that is sampled alone, with a prompt, "
            "without a constraint, a session or a negative prompt"
        )
    return rows, source.name


def render_diagnosis(diagnosis: Diagnosis, options: "DiagnoseOptions", name: str) -> str:
    """Return the diagnosis as lines for a person."""
    positions = counted(diagnosis.num_positions, "position")
    lines = [f"{name}: {counted(diagnosis.num_rows, 'request')}, {positions}"]
    if diagnosis.overlap is not None:
        tokens = expected_tokens(diagnosis.overlap, _NUM_DRAFTS)
        many = f"{_NUM_DRAFTS} drafts of {options.draft} give {tokens:.2f} tokens a step"
        exact = diagnosis.overlap / (2 - diagnosis.overlap)
        lines += [
            f"overlap    {diagnosis.overlap:.3f}  how often leviathan accepts a draft; {many}",
            f"at least   {exact:.3f}  how often exact, the default, accepts one",
            f"agreement  {diagnosis.agreement:.3f}  how often both think the same token likeliest",
            f"on the way {' '.join(_parts(diagnosis.by_position))}",
        ]
    table = [("fault", "without", "", "")]
    for check in diagnosis.checks:
        overlap = "-" if check.overlap is None else f"{check.overlap:.3f}"
        table.append((check.cause, overlap, "FAULT" if check.is_fault else "", check.text))
    lines += ["", *aligned(table, right={1}), ""]
    lines.append(f"{diagnosis.cause}: {_ADVICE[diagnosis.cause]}")
    return "".join(f"{printable(line)}\n" for line in lines)


def _parts(by_position: list[float]) -> list[str]:
    """Return the mean overlaps of parts of the outputs, from the first tokens to the last."""
    size = -(-len(by_position) // _NUM_PARTS)
    parts = [by_position[begin : begin + size] for begin in range(0, len(by_position), size)]
    return [f"{sum(part) / len(part):.2f}" for part in parts]
