"""What `compare` and `plan` share: from requests to a workload, an answer, and how they stop."""

import sys
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

from batcher.engine import Engine
from batcher.errors import BatchdecodeError
from batcher.formats.requests import ParsedLine, RequestParser
from batcher.models.base import Model
from batcher.models.loading import load_model
from batcher.request import Request
from batcher.settings import GRAMMAR_TIMEOUT
from batcher.simulation.workload import Workload, workload_of
from batcher.whatif.deployments import Deployment
from batcher.whatif.lengths import decoded_outputs, num_unknown

from ..memory_note import memory_notes
from ..running.intake import open_input
from ..running.problems import InvalidInput, ProblemReport, say
from ..running.reading import RequestReader
from ..running.signals import Interrupted, StopSignals, die_of_closed_pipe
from ..running.stdout import user_code_prints_to_stderr
from ..screen.cells import counted, printable
from ..screen.terminal import ColorChoice


def until_stopped(command: Callable[[], int]) -> int:
    """Return the exit status of `command`, or that of a signal, which ends it at once."""
    with user_code_prints_to_stderr(), StopSignals() as stop:
        try:
            with stop.waiting():
                return command()
        except (Interrupted, KeyboardInterrupt):
            return stop.exit_status
        except BrokenPipeError:
            die_of_closed_pipe()


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestOptions:
    """Where the requests come from, and the model that reads them."""

    input: str | None = None
    model: str = "simulated"
    seed: int | None = None
    model_settings: dict[str, Any] = field(default_factory=dict)
    llm_settings: dict[str, Any] = field(default_factory=dict)
    grammar_timeout: float = GRAMMAR_TIMEOUT  # seconds of processor time
    color: ColorChoice = "auto"


def read_workload(options: RequestOptions, *, quiet: bool) -> Workload:
    """Return the workload of the requests; what only the model knows of it is found by decoding.

    Raises:
        BatchdecodeError: the input has bad lines, which have been reported, or cannot be read, or
            its requests cannot be simulated.
    """
    model = load_model(options.model, options.model_settings, options.seed, options.llm_settings)
    requests = _read_requests(options, model)
    num_decoded = num_unknown(requests)
    if not num_decoded:
        return workload_of(requests, model)
    if not quiet:
        say(
            f"{counted(num_decoded, 'request')} of {len(requests):,} may end before max_tokens: "
            "all are decoded once to learn when\n"
        )
    return workload_of(requests, model, decoded_outputs(requests, model))


def _read_requests(options: RequestOptions, model: Model) -> list[Request]:
    """Return all requests of the input."""
    found: list[Request] = []
    num_lines = 0
    with open_input(options.input, nullcontext) as source:
        report = ProblemReport(source.name, options.color)
        engine = Engine(model, 256, grammar_timeout=options.grammar_timeout)
        reader = RequestReader(source.lines(), RequestParser(engine.capabilities))
        while (line := reader.read()) is not None:
            num_lines += 1
            if isinstance(line, ParsedLine):
                found.append(line.request)
            else:
                report.add(line)
        say(source.take_notes() + report.closing())
        if report.num_lines:
            raise InvalidInput(report, num_lines, "nothing was simulated.")
        if not found:
            raise BatchdecodeError(f"{source.name} has no requests")
    return found


def say_of_memory(deployments: Iterable[Deployment]) -> None:
    """Say for which profiles memory is taken to be without limit, though their GPU has some."""
    for note in memory_notes((each.profile, each.scheduling) for each in deployments):
        say(f"{printable(note)}\n")


def write_text(text: str) -> None:
    """Write an answer to stdout, whole.

    Raises:
        WriteError, BrokenPipeError: the output takes no more.
    """
    from ..running.output import stdout_sink  # noqa: PLC0415 - only once there is an answer

    sink = stdout_sink()
    sink.write(
        text.encode(sys.__stdout__.encoding if sys.__stdout__ else "utf-8", "backslashreplace")
    )
    sink.close()
