"""A verdict as a person reads it, and as JSON."""

import shlex
import sys
from dataclasses import dataclass
from typing import Any

import msgspec

from batcher.models.base import Tokenizer, bytes_of
from batcher.verifying.cases import Case
from batcher.verifying.outputs import Difference
from batcher.verifying.verification import Verdict

from ..screen.cells import counted, printable

NUM_BEFORE, NUM_AFTER = 6, 2  # tokens shown around the first that differs
_ARRIVALS = {
    "given": "arriving as they say",
    "at-once": "all arriving at 0",
    "shuffled": "all arriving at 0, in another order",
    "scattered": "arriving at times that are drawn",
}


@dataclass(frozen=True, slots=True)
class Again:
    """What of the command has to be said again to reproduce what it found."""

    input: str | None
    config: str | None
    model: str
    seed: int

    def command(self, case: Case | None) -> str:
        """Return the command that decodes alone, and under `case`, again."""
        words = ["batchdecode", "verify", *self._source()]
        if self.seed:
            words += ["--seed", str(self.seed)]
        return shlex.join([*words, "--only", str(1 if case is None else case.number)])

    def run(self, case: Case) -> str | None:
        """Return the `run` that does what `case` did, None if none can."""
        if case.arrivals != "given":
            return None
        return shlex.join(["batchdecode", "run", *self._source(), *arguments_of(case)])

    def _source(self) -> list[str]:
        words = ["-" if self.input is None else self.input]
        if self.config is not None:
            words += ["--config", self.config]
        if self.model != "simulated":
            words += ["--model", self.model]
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


def encode_verdict(verdict: Verdict, again: Again) -> bytes:
    """Return the verdict as a JSON document."""
    case, document = verdict.case, msgspec.to_builtins(verdict)
    document["is_proven"] = verdict.difference is None
    document["is_deterministic"] = verdict.is_deterministic
    if verdict.difference is not None:
        document["again"] = again.command(case)
    return msgspec.json.format(msgspec.json.encode(document), indent=2) + b"\n"


def render_verdict(verdict: Verdict, again: Again, name: str, tokenizer: Tokenizer) -> bytes:
    """Return the verdict as lines for a person."""
    if verdict.difference is None:
        lines = _proof(verdict, name)
    else:
        lines = _difference(verdict, verdict.difference, again, tokenizer)
    text = "".join(f"{printable(line)}\n" for line in lines)
    return text.encode(sys.stdout.encoding or "utf-8", "backslashreplace")


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
    return [
        f"{name}: {', '.join(what)}",
        f"the same alone, twice, and under {counted(verdict.num_settings, 'setting')}",
        f"on the way: {', '.join(ways)}",
    ]


def _difference(
    verdict: Verdict, difference: Difference, again: Again, tokenizer: Tokenizer
) -> list[str]:
    case = verdict.case
    which = f"request {difference.id}, output {difference.index}"
    if case is None:
        first = "not deterministic even alone: decoded alone a second time, in the opposite order,"
        lines, here = [first, f"{which} differs"], "again"
    else:
        lines = [f"not the same under setting {case.number}: {which}"]
        here = "here"
    lines += [f"  {line}" for line in _values(difference, here, tokenizer)]
    for side, error in (("alone", difference.alone_error), (here, difference.here_error)):
        if error is not None:
            lines.append(f"  {side:<9}ended with {error.code}: {error.message}")
    if case is not None:
        lines.append(f"  setting  {shlex.join(arguments_of(case))}; {_ARRIVALS[case.arrivals]}")
    lines.append(f"  verify   {again.command(case)}")
    run = None if case is None else again.run(case)
    if run is not None:
        lines.append(f"  run      {run}")
    if verdict.num_settings:
        lines.append(f"the same under {counted(verdict.num_settings, 'setting')} before")
    return lines


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
