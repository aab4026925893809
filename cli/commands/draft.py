"""`batchdecode draft diagnose`: shows why the drafts of a model are rejected."""

from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

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
from batcher.speculation.diagnosis import Cause, Diagnosis, TargetOutput, can_be_compared
from batcher.speculation.diagnosis import diagnose as diagnose_draft
from batcher.speculation.settings import expected_tokens, parse_draft
from batcher.transformer.config import is_checkpoint, is_hf

from ..command import OUTPUT, REQUIRED, command, flag, option
from ..models import capabilities_of, load, model_again
from ..options import (
    Color,
    ModelOptions,
    color_option,
    grammar_timeout_option,
    input_argument,
    model_config_option,
)
from ..run.files import print_json, print_text
from ..run.input import open_input, read_requests
from ..screen.terminal import aligned, counted, printable
from ..signals import user_code_prints_to_stderr

DRAFT = "Draft"
MAX_SAMPLE = 10_000
_BATCH = 8
_NUM_PARTS = 8  # of the outputs, whose overlaps are shown in one row
_NUM_DRAFTS = 4  # of the example
_ADVICE: dict[Cause, str] = {
    "tokenizer": "use a draft with the tokenizer of the target, special tokens included",
    "cache": "the cache of the draft does not match its row: check how it is rolled back",
    "positions": "the draft answers for the wrong position: check where it begins",
    "temperature": "sample the draft at the temperature of the target",
    "processor": "use the sampling settings of the target for the draft as well",
    "weak": "the draft is used correctly: only a stronger draft model accepts more",
    "none": "it drafts well",
}


@dataclass(frozen=True, kw_only=True)
class DiagnoseOptions(ModelOptions):
    """The options of `batchdecode draft diagnose`; docs/guide/speculation.md explains them."""

    input: str | None = input_argument()
    config: str | None = model_config_option()
    grammar_timeout: float = grammar_timeout_option()
    draft: str = option(
        DRAFT, "Draft model, named as for --model.", "NAME", complete="model", default=REQUIRED
    )
    draft_fields: str | None = option(
        DRAFT, 'Sampling fields that differ for the draft, such as {"temperature": 1}.', "JSON"
    )
    sample: int = option(
        DRAFT, "Number of requests to decode.", "N", min=1, max=MAX_SAMPLE, common=True, default=8
    )
    tokens: int = option(
        DRAFT,
        "Number of tokens to compare per request.",
        "N",
        min=1,
        max=MAX_SAMPLE,
        common=True,
        default=48,
    )
    json: bool = flag(OUTPUT, "Print the diagnosis as JSON.", common=True)
    color: Color = color_option()


def diagnose(options: DiagnoseOptions) -> None:
    """Show why the drafts of a model are rejected, position by position."""
    with user_code_prints_to_stderr():
        model = load(options)
        named = parse_draft(options.draft)
        if isinstance(named, int) or named.startswith("simulated:"):
            raise BatchdecodeError(
                f"--draft {options.draft} has no probabilities to compare: name a model, as --model"
            )
        given = {} if named == "simulated" or is_hf(named) else options.llm_settings
        if is_checkpoint(named):
            given = {**options.transformer_settings, **options.checkpoint}
        draft = load_model(named, given)
        fields = _read_fields(options.draft_fields)
        rows, name = _sample(options, model)
        diagnosis = diagnose_draft(rows, model_again(model, options), draft, fields)
        if options.json:
            print_json(diagnosis)
        else:
            print_text(_rendered(diagnosis, options.draft, name))


def _read_fields(text: str | None) -> dict[str, Any]:
    if text is None:
        return {}
    known = [name for name in SAMPLING_FIELDS if name != "seed"]
    try:
        given = msgspec.json.decode(text, type=dict[str, Any])
        unknown = next((name for name in given if name not in known), None)
        if unknown is not None:
            raise BatchdecodeError(
                f"--draft-fields: {unknown!r} is unknown (known: {', '.join(known)})"
            )
        wrong = misfit(Request, given)
        if wrong is not None:
            raise BatchdecodeError(f"--draft-fields: {wrong}")
        request = msgspec.convert({"prompt": "", **given}, Request)
    except (ValueError, RecursionError) as error:  # the other: nested too deeply
        raise BatchdecodeError(f"--draft-fields: {error}") from None
    return {name: getattr(request, name) for name in given}


def _sample(options: DiagnoseOptions, model: Model) -> tuple[list[TargetOutput], str]:
    """Return the target's outputs for some of the requests, and the name of the input."""
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
            f"{source.name} has no request to compare: use requests with a prompt and one sample, "
            "without a constraint, a session or a negative prompt"
        )
    return rows, source.name


def _rendered(diagnosis: Diagnosis, draft: str, name: str) -> str:
    positions = counted(diagnosis.num_positions, "position")
    lines = [f"{name}: {counted(diagnosis.num_rows, 'request')}, {positions}"]
    if diagnosis.overlap is not None:
        tokens = expected_tokens(diagnosis.overlap, _NUM_DRAFTS)
        many = f"{_NUM_DRAFTS} drafts of {draft} give {tokens:.2f} tokens a step"
        exact, means = diagnosis.overlap / (2 - diagnosis.overlap), diagnosis.by_position
        size = -(-len(means) // _NUM_PARTS)
        parts = [means[begin : begin + size] for begin in range(0, len(means), size)]
        lines += [
            f"overlap    {diagnosis.overlap:.3f}  how often leviathan accepts a draft; {many}",
            f"at least   {exact:.3f}  how often exact, the default, accepts one",
            f"agreement  {diagnosis.agreement:.3f}  how often both rank the same token first",
            f"on the way {' '.join(f'{sum(part) / len(part):.2f}' for part in parts)}",
        ]
    table = [("fault", "without", "", "")]
    for check in diagnosis.checks:
        overlap = "-" if check.overlap is None else f"{check.overlap:.3f}"
        table.append((check.cause, overlap, "FAULT" if check.is_fault else "", check.text))
    lines += ["", *aligned(table, right={1}), ""]
    lines.append(f"{diagnosis.cause}: {_ADVICE[diagnosis.cause]}")
    return "".join(f"{printable(line)}\n" for line in lines)


COMMANDS = {"draft diagnose": command(diagnose, DiagnoseOptions)}
