"""`batchdecode verify`: from a file of requests to a verdict on stdout."""

import time
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

from msgspec.structs import replace

from batcher.engine import Engine
from batcher.errors import BatchdecodeError
from batcher.formats.requests import ParsedLine, RequestParser
from batcher.models.base import Model
from batcher.models.loading import load_model
from batcher.request import Request
from batcher.settings import GRAMMAR_TIMEOUT
from batcher.verifying.cases import Case, make_cases, needs_of
from batcher.verifying.verification import verify

from ..running.intake import open_input
from ..running.output import stdout_json_sink, stdout_sink
from ..running.problems import InvalidInput, ProblemReport, say
from ..running.reading import RequestReader
from ..screen.terminal import ColorChoice
from .verdict import Again, encode_verdict, render_verdict

PROVEN, DIFFERENT = 0, 1
PROGRESS_INTERVAL = 2.0  # seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyOptions:
    """The options of `batchdecode verify`; docs/cli.md says what each one means."""

    input: str | None
    config: str | None = None
    model: str = "simulated"
    model_settings: dict[str, Any] = field(default_factory=dict)
    llm_settings: dict[str, Any] = field(default_factory=dict)
    num_settings: int = 64
    seed: int = 0
    only: int | None = None
    grammar_timeout: float = GRAMMAR_TIMEOUT  # seconds of processor time
    as_json: bool = False
    color: ColorChoice = "auto"

    def make_model(self) -> Model:
        """Return the model, a new one each time if it is a class.

        Raises:
            BatchdecodeError: there is no such model.
        """
        return load_model(self.model, self.model_settings, None, self.llm_settings)


class Progress:
    """Says on stderr every two seconds how many settings are done."""

    def __init__(self, num_settings: int) -> None:
        self._num_settings = num_settings
        self._next = time.monotonic() + PROGRESS_INTERVAL

    def show(self, num_done: int) -> None:
        """Take note that so many are done."""
        if time.monotonic() >= self._next:
            self._next = time.monotonic() + PROGRESS_INTERVAL
            say(f"{num_done} of {self._num_settings} settings: all outputs are the same\n")


def verify_requests(options: VerifyOptions) -> int:
    """Carry out `batchdecode verify`, and return its exit status.

    Raises:
        BatchdecodeError: the input or the model is not right.
        WriteError, BrokenPipeError: stdout takes no more.
    """
    model = options.make_model()
    requests, name = _read(options, model)
    cases = _cases(options, requests, model)
    verdict = verify(requests, options.make_model, cases, options.seed, Progress(len(cases)).show)
    again = Again(options.input, options.config, options.model, options.seed)
    if options.as_json:
        sink, output = stdout_json_sink(), encode_verdict(verdict, again)
    else:
        sink, output = stdout_sink(), render_verdict(verdict, again, name, model.tokenizer)
    sink.write(output)
    sink.close()
    return PROVEN if verdict.difference is None else DIFFERENT


def _read(options: VerifyOptions, model: Model) -> tuple[list[Request], str]:
    """Return all requests of the input, and its name.

    Raises:
        BatchdecodeError: the input has bad lines, which have been reported, or cannot be read.
    """
    engine = Engine(model, 1, grammar_timeout=options.grammar_timeout)
    capabilities = replace(engine.capabilities, num_slots=None)
    requests: list[Request] = []
    with open_input(options.input, nullcontext) as source:
        report = ProblemReport(source.name, options.color)
        reader = RequestReader(source.lines(), RequestParser(capabilities))
        num_lines = 0
        while (line := reader.read()) is not None:
            num_lines += 1
            if isinstance(line, ParsedLine):
                requests.append(line.request)
            else:
                report.add(line)
    say(source.take_notes() + report.closing())
    if report.num_lines:
        raise InvalidInput(report, num_lines, "nothing decoded.")
    if not requests:
        raise BatchdecodeError(f"{source.name} has no requests, so there is nothing to verify")
    return requests, source.name


def _cases(options: VerifyOptions, requests: list[Request], model: Model) -> list[Case]:
    """Return the settings to decode under."""
    needs = needs_of(requests, model.tokenizer)
    if options.only is None:
        return make_cases(needs, options.num_settings, options.seed)
    return make_cases(needs, options.only, options.seed)[-1:]
