"""`batchdecode verify`: checks that outputs do not depend on the batch, or shows where they do."""

import shlex
import sys
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import msgspec
from msgspec.structs import replace

from batcher.engine import Engine
from batcher.errors import BatchdecodeError
from batcher.models.base import Tokenizer, bytes_of
from batcher.speculation.settings import SpeculationSettings
from batcher.verifying import Case, Difference, Verdict, make_cases, needs_of
from batcher.verifying import verify as verify_outputs

from ..command import OUTPUT, command, flag, option
from ..models import capabilities_of, load, model_again
from ..options import (
    Color,
    ModelOptions,
    color_option,
    grammar_timeout_option,
    input_argument,
    model_config_option,
    speculation_group,
)
from ..run.files import print_json, print_text
from ..run.input import open_input, read_requests
from ..run.problems import seldom
from ..screen.summary import marks_in
from ..screen.terminal import counted, encoding_of, printable
from ..signals import user_code_prints_to_stderr

VERIFYING = "Verifying"
MAX_SETTINGS = 100_000


@dataclass(frozen=True, kw_only=True)
class VerifyOptions(ModelOptions):
    """The options of `batchdecode verify`; docs/reference/cli.md has a table of them."""

    input: str | None = input_argument()
    config: str | None = model_config_option()
    grammar_timeout: float = grammar_timeout_option()
    speculation: SpeculationSettings | None = speculation_group().as_field()
    settings: int = option(
        VERIFYING,
        "Number of batch settings to try.",
        "N",
        min=1,
        max=MAX_SETTINGS,
        common=True,
        default=64,
    )
    seed: int = option(
        VERIFYING, "Seed of the random settings and arrivals.", "S", common=True, default=0
    )
    only: int | None = option(
        VERIFYING, "Try only setting K.", "K", min=1, max=MAX_SETTINGS, common=True
    )
    json: bool = flag(OUTPUT, "Print the verdict as JSON.", common=True)
    color: Color = color_option()


PROVEN, DIFFERENT = 0, 1
PROGRESS_INTERVAL = 2.0  # seconds
NUM_BEFORE, NUM_AFTER = 6, 2  # tokens shown around the first that differs
_ARRIVALS = {
    "given": "arriving at their own times",
    "at-once": "all arriving at 0",
    "shuffled": "all arriving at 0, in a different order",
    "scattered": "arriving at random times",
}


def verify(options: VerifyOptions) -> int:
    """Prove that outputs do not depend on the batch, or show the first difference.

    Exit status: 0 if outputs are equal under all settings, 1 if not, 2 for bad input.
    """
    if options.speculation is not None and options.speculation.acceptance != "exact":
        raise BatchdecodeError(
            f"--acceptance {options.speculation.acceptance} cannot be verified: its tokens depend "
            "on the drafts, and so on the batch"
        )
    with user_code_prints_to_stderr():
        model = load(options)
        engine = Engine(model, 1, grammar_timeout=options.grammar_timeout)
        capabilities = replace(capabilities_of(engine, options), num_slots=None)
        with open_input(options.input, nullcontext) as source:
            requests = read_requests(source, capabilities, options.color, "nothing decoded.")
        if not requests:
            raise BatchdecodeError(f"{source.name} has no requests, so there is nothing to verify")
        num_cases = options.settings if options.only is None else options.only
        cases = make_cases(needs_of(requests, model), num_cases, options.seed)
        cases = cases if options.only is None else cases[-1:]
        show = seldom(
            lambda num_done: f"{num_done} of {len(cases)} settings: all outputs are identical",
            PROGRESS_INTERVAL,
        )
        verdict = verify_outputs(
            requests,
            lambda: model_again(model, options),
            cases,
            options.seed,
            show,
            options.speculation,
        )
        if options.json:
            document = msgspec.to_builtins(verdict)
            document["is_proven"] = verdict.difference is None
            document["is_deterministic"] = verdict.is_deterministic
            if verdict.difference is not None:
                document["again"] = _command(options, verdict.case)
            print_json(document)
        else:
            lines = _proof(verdict, source.name)
            if verdict.difference is not None:
                lines = _differences(verdict, verdict.difference, options, model.tokenizer)
            print_text("".join(f"{printable(line)}\n" for line in lines))
    return PROVEN if verdict.difference is None else DIFFERENT


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
        accepted, rejected = done.accepted_drafts, done.rejected_drafts
        ways.append(f"{accepted:,} drafts accepted and {rejected:,} rejected")
    settings = counted(verdict.num_settings, "batch setting")
    return [
        f"{name}: {', '.join(what)}",
        f"on the way: {', '.join(ways)}",
        f"{_marks().good} identical outputs: alone, repeated, and in {settings}",
    ]


def _differences(
    verdict: Verdict, found: Difference, options: VerifyOptions, tokenizer: Tokenizer
) -> list[str]:
    case, position = verdict.case, found.position
    name, here = f"request {found.id}, output {found.index}", "again" if case is None else "here"
    lines, where = [name], "" if position is None else f" of token {position}"
    if found.field == "tokens" and position is not None:
        lines.append(f"  first difference at token {position}, counted from 0")
        alone = _context(found.alone_tokens, position, tokenizer)
        other = _context(found.here_tokens, position, tokenizer)
    else:
        is_equal = found.alone_tokens == found.here_tokens
        what = "the tokens are equal, but not" if is_equal else "first difference:"
        lines.append(f"  {what} {found.field}{where}")
        alone, other = (msgspec.json.encode(each).decode() for each in (found.alone, found.here))
    lines += [f"  alone    {alone}", f"  {here:<9}{other}"]
    for side, error in (("alone", found.alone_error), (here, found.here_error)):
        if error is not None:
            lines.append(f"  {side:<9}ended with {error.code}: {error.message}")
    if case is not None:
        lines.append(f"  setting  {shlex.join(arguments_of(case))}; {_ARRIVALS[case.arrivals]}")
    lines.append(f"  verify   {_command(options, case)}")
    if case is not None and case.arrivals == "given":  # or else no `run` does the same
        run = shlex.join(["batchdecode", "run", *_source(options), *arguments_of(case)])
        lines.append(f"  run      {run}")
    place = f"{name} changes when it is decoded alone a second time"
    if case is not None:
        before = counted(verdict.num_settings, "setting")
        identical = f"; identical in {before} before" if verdict.num_settings else ""
        place = f"{name}, in batch setting {case.number}{identical}"
    return [*lines, f"{_marks().bad} different outputs: {place}"]


def _marks() -> Any:
    return marks_in(encoding_of((sys.__stdout__ or sys.stdout).encoding))


def _context(tokens: list[int], position: int, tokenizer: Tokenizer) -> str:
    """Return the tokens around `position`, with that token in brackets."""
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


def _command(options: VerifyOptions, case: Case | None) -> str:
    words = ["batchdecode", "verify", *_source(options)]
    if options.seed:
        words += ["--seed", str(options.seed)]
    return shlex.join([*words, "--only", str(1 if case is None else case.number)])


def _source(options: VerifyOptions) -> list[str]:
    """Return the arguments that select the model and the requests."""
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
    """Return the options of `run` for `case`, except arrivals."""
    words = ["--batch", str(case.batch)]
    for name, value in msgspec.to_builtins(case.settings).items():
        option = name.replace("_", "-")
        shown = str(value)
        if isinstance(value, bool):
            shown = "on" if value else "off"
        words += [f"--{option}", shown]
    if case.step_seconds != 1.0:
        words += ["--profile", f"constant:{case.step_seconds:g}"]
    if case.is_streaming:
        words.append("--stream")
    return words


COMMANDS = {"verify": command(verify, VerifyOptions)}
