"""`batchdecode verify`: proves that outputs do not depend on the batch, or shows where they do."""

import os
import shlex
import sys
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Annotated, Any, cast

import msgspec
from msgspec.structs import replace

from batcher.engine import Engine
from batcher.errors import BatchdecodeError
from batcher.models.base import Model, Tokenizer, bytes_of
from batcher.request import Request
from batcher.settings import GRAMMAR_TIMEOUT
from batcher.speculation.settings import SpeculationSettings
from batcher.verifying.verifying import Case, Difference, Verdict, make_cases, needs_of
from batcher.verifying.verifying import verify as verify_outputs

from ..command import OUTPUT, command, flag, option
from ..models import capabilities_of, load, model_again
from ..options import Color, ConfigOfModel, GrammarTimeout, Input, ModelOptions, speculation_group
from ..progress import seldom
from ..run.files import print_json, print_text
from ..run.input import open_input, read_requests
from ..run.stdout import user_code_prints_to_stderr
from ..screen.summary import marks_in
from ..screen.terminal import counted, encoding_of, printable

VERIFYING = "Verifying"
MAX_SETTINGS = 100_000


@dataclass(frozen=True, kw_only=True)
class VerifyOptions(ModelOptions):
    """The options of `batchdecode verify`; docs/cli.md has a table of them."""

    input: Input = None
    config: ConfigOfModel = None
    grammar_timeout: GrammarTimeout = GRAMMAR_TIMEOUT
    speculation: Annotated[SpeculationSettings | None, speculation_group()] = None
    settings: Annotated[
        int,
        option(
            VERIFYING,
            "Number of batch settings to decode everything with.",
            "N",
            min=1,
            max=MAX_SETTINGS,
            common=True,
        ),
    ] = 64
    seed: Annotated[
        int, option(VERIFYING, "Seed of the random settings and arrivals.", "S", common=True)
    ] = 0
    only: Annotated[
        int | None,
        option(VERIFYING, "Try only setting K.", "K", min=1, max=MAX_SETTINGS, common=True),
    ] = None
    json: Annotated[bool, flag(OUTPUT, "Print the verdict as JSON.", common=True)] = False
    color: Color = "auto"


def verify(options: VerifyOptions) -> int:
    """Prove that outputs do not depend on the batch, or show the first difference.

    Exit status: 0 if outputs are equal under all settings, 1 if not, 2 for bad input.
    """
    with user_code_prints_to_stderr():
        return verify_requests(options)


COMMANDS = {"verify": command(verify, VerifyOptions)}

# -- from requests to a verdict --------------------------------------------------------------------

PROVEN, DIFFERENT = 0, 1
PROGRESS_INTERVAL = 2.0  # seconds
NUM_BEFORE, NUM_AFTER = 6, 2  # tokens shown around the first that differs
_ARRIVALS = {
    "given": "arriving as they say",
    "at-once": "all arriving at 0",
    "shuffled": "all arriving at 0, in another order",
    "scattered": "arriving at times that are drawn",
}


def verify_requests(options: VerifyOptions) -> int:
    """Carry out `batchdecode verify`, and return its exit status.

    Raises:
        BatchdecodeError: the input or the model is not right.
        WriteError, BrokenPipeError: stdout takes no more.
    """
    if options.speculation is not None and options.speculation.acceptance != "exact":
        raise BatchdecodeError(
            f"--acceptance {options.speculation.acceptance} has nothing to verify: which tokens a "
            "request draws depends on the drafts that it is given, and so on the batch"
        )
    model = load(options)

    def make_model() -> Model:
        return model_again(model, options)

    requests, name = _read(options, model)
    num_cases = options.settings if options.only is None else options.only
    cases = make_cases(needs_of(requests, model), num_cases, options.seed)
    cases = cases if options.only is None else cases[-1:]
    show = seldom(
        lambda num_done: f"{num_done} of {len(cases)} settings: all outputs are identical",
        PROGRESS_INTERVAL,
    )
    verdict = verify_outputs(requests, make_model, cases, options.seed, show, options.speculation)
    if options.json:
        print_json(record_of(verdict, options))
    else:
        print_text(render_verdict(verdict, options, name, model.tokenizer))
    return PROVEN if verdict.difference is None else DIFFERENT


def _read(options: VerifyOptions, model: Model) -> tuple[list[Request], str]:
    """Return all requests of the input, and its name.

    Raises:
        BatchdecodeError: the input has bad lines, which have been reported, or cannot be read.
    """
    engine = Engine(model, 1, grammar_timeout=options.grammar_timeout)
    capabilities = replace(capabilities_of(engine, options), num_slots=None)
    with open_input(options.input, nullcontext) as source:
        requests = read_requests(source, capabilities, options.color, "nothing decoded.")
    if not requests:
        raise BatchdecodeError(f"{source.name} has no requests, so there is nothing to verify")
    return requests, source.name


def _command(options: VerifyOptions, case: Case | None) -> str:
    """Return the command that decodes alone, and under `case`, again."""
    words = ["batchdecode", "verify", *_source(options)]
    if options.seed:
        words += ["--seed", str(options.seed)]
    return shlex.join([*words, "--only", str(1 if case is None else case.number)])


def _source(options: VerifyOptions) -> list[str]:
    """Return the arguments of the command that any other has to repeat."""
    words = ["-" if options.input is None else options.input]
    if options.config is not None:
        words += ["--config", options.config]
    if options.model != "simulated":
        words += ["--model", options.model]
    if options.chat:
        words.append("--chat")
    for name, value in options.checkpoint.items():
        option = f"--{name.replace('_', '-')}"
        words += [option] if value is True else [option, str(value)]
    return words


def arguments_of(case: Case) -> list[str]:
    """Return the options of `run` that stand for `case`, but for when requests arrive."""
    words = ["--batch", str(case.batch)]
    for name, value in msgspec.to_builtins(case.settings).items():
        option = name.replace("_", "-")
        if isinstance(value, bool):
            words.append(f"--{option}" if value else f"--no-{option}")
        else:
            words += [f"--{option}", str(value)]
    if case.step_seconds != 1.0:
        words += ["--profile", f"constant:{case.step_seconds:g}"]
    if case.is_streaming:
        words.append("--stream")
    return words


def record_of(verdict: Verdict, options: VerifyOptions) -> dict[str, Any]:
    """Return the verdict for programs."""
    case, document = verdict.case, msgspec.to_builtins(verdict)
    document["is_proven"] = verdict.difference is None
    document["is_deterministic"] = verdict.is_deterministic
    if verdict.difference is not None:
        document["again"] = _command(options, case)
    return cast(dict[str, Any], document)


def render_verdict(
    verdict: Verdict, options: VerifyOptions, name: str, tokenizer: Tokenizer
) -> str:
    """Return the verdict as lines for a person; the last one says it all."""
    encoding = encoding_of((sys.__stdout__ or sys.stdout).encoding, os.environ)
    marks, difference = marks_in(encoding), verdict.difference
    if difference is None:
        settings = counted(verdict.num_settings, "batch setting")
        lines = _proof(verdict, name)
        lines.append(f"{marks.good} identical outputs: alone, repeated, and in {settings}")
    else:
        lines = _difference(verdict, difference, options, tokenizer)
        lines.append(f"{marks.bad} different outputs: {_place(verdict, difference)}")
    return "".join(f"{printable(line)}\n" for line in lines)


def _proof(verdict: Verdict, name: str) -> list[str]:
    done = verdict.exercised
    what = [
        counted(verdict.num_requests, "request"),
        counted(verdict.num_outputs, "output"),
        counted(verdict.num_tokens, "token"),
    ]
    ways = [
        counted(done.steps, "step"),
        counted(done.preemptions, "preemption"),
        f"{counted(done.chunks, 'later chunk')} of prompts",
        f"{counted(done.cached_tokens, 'token')} found in blocks",
    ]
    if done.accepted_drafts or done.rejected_drafts:
        ways.append(
            f"{done.accepted_drafts:,} drafts accepted and {done.rejected_drafts:,} rejected"
        )
    return [
        f"{name}: {', '.join(what)}",
        f"on the way: {', '.join(ways)}",
    ]


def _difference(
    verdict: Verdict, difference: Difference, options: VerifyOptions, tokenizer: Tokenizer
) -> list[str]:
    case = verdict.case
    here = "again" if case is None else "here"
    lines = [_named(difference)]
    lines += [f"  {line}" for line in _values(difference, here, tokenizer)]
    for side, error in (("alone", difference.alone_error), (here, difference.here_error)):
        if error is not None:
            lines.append(f"  {side:<9}ended with {error.code}: {error.message}")
    if case is not None:
        lines.append(f"  setting  {shlex.join(arguments_of(case))}; {_ARRIVALS[case.arrivals]}")
    lines.append(f"  verify   {_command(options, case)}")
    if case is not None and case.arrivals == "given":  # or else no `run` does the same
        run = shlex.join(["batchdecode", "run", *_source(options), *arguments_of(case)])
        lines.append(f"  run      {run}")
    return lines


def _named(difference: Difference) -> str:
    return f"request {difference.id}, output {difference.index}"


def _place(verdict: Verdict, difference: Difference) -> str:
    """Return which output differs, and where."""
    if verdict.case is None:
        return f"{_named(difference)} changes when it is decoded alone a second time"
    before = verdict.num_settings
    identical = f"; identical in {counted(before, 'setting')} before" if before else ""
    return f"{_named(difference)}, in batch setting {verdict.case.number}{identical}"


def _values(difference: Difference, here: str, tokenizer: Tokenizer) -> list[str]:
    """Return what both were given, in the place where they part."""
    position = difference.position
    if difference.field == "tokens" and position is not None:
        return [
            f"first difference at token {position}, counted from 0",
            f"alone    {_context(difference.alone_tokens, position, tokenizer)}",
            f"{here:<9}{_context(difference.here_tokens, position, tokenizer)}",
        ]
    where = "" if position is None else f" of token {position}"
    return [
        f"the tokens are the same, but not {difference.field}{where}"
        if difference.alone_tokens == difference.here_tokens
        else f"first difference: {difference.field}{where}",
        f"alone    {_shown(difference.alone)}",
        f"{here:<9}{_shown(difference.here)}",
    ]


def _context(tokens: list[int], position: int, tokenizer: Tokenizer) -> str:
    """Return the tokens around the one at `position`, which stands in brackets."""
    start = max(position - NUM_BEFORE, 0)
    shown = ["..."] if start else []
    for place in range(start, min(position + NUM_AFTER + 1, len(tokens))):
        text = bytes_of(tokens[place], tokenizer.token_bytes).decode("utf-8", "replace")
        token = f"{tokens[place]} {text!r}"
        shown.append(f"[{token}]" if place == position else token)
    if position >= len(tokens):
        shown.append("[the end]")
    elif position + NUM_AFTER + 1 < len(tokens):
        shown.append("...")
    return "  ".join(shown)


def _shown(value: Any) -> str:
    return msgspec.json.encode(value).decode()
