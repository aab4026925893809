"""What is decoded, and by what: an input, a model, and the engine for both."""

import time
from contextlib import nullcontext
from typing import TYPE_CHECKING

from batcher.engine import Engine
from batcher.errors import BatchdecodeError
from batcher.formats.requests import BadLine, RequestParser
from batcher.models.base import Model
from batcher.models.loading import load_model
from batcher.models.simulated import SimulatedModel

from ..commands.run import RunOptions
from .answers import Answers, InputOrder
from .intake import Waiting, open_input
from .loop import Loop
from .problems import ProblemReport, say
from .sources import open_source

if TYPE_CHECKING:
    from .earlier_results import EarlierResults


class RunSetup:
    """What is decoded, and by what.

    Raises:
        BatchdecodeError: there is no such input, or no such model, or it cannot have such a batch.
    """

    def __init__(self, options: RunOptions, waiting: Waiting = nullcontext) -> None:
        self.options = options
        self._waiting = waiting
        self.requests = open_input(options.input, waiting)
        with waiting():
            self.model = self._load_model()
            self.engine = self._make_engine()
        self.report = ProblemReport(self.requests.name, options.color)

    def _load_model(self) -> Model:
        """Return the model that the options name, and let its calls be broken off by a signal.

        Raises:
            BatchdecodeError: there is none, or it makes no calls for --call-timeout to limit.
        """
        options = self.options
        call_settings, limit = options.llm_settings, options.call_timeout
        if limit is not None:
            call_settings = {**call_settings, "call_timeout": limit}
        model = load_model(options.model, options.model_settings, options.seed, call_settings)
        calls = getattr(model, "calls", None)  # which an LLMModel has alone
        if calls is not None:
            calls.waiting = self._waiting
        if limit is not None and (calls is None or calls.settings.call_timeout != limit):
            raise BatchdecodeError(
                f"--call-timeout is for an object with next_token_logits; {model.name} is none, "
                "or has settings of its own for its calls"
            )
        return model

    def _make_engine(self) -> Engine:
        """Return the engine that the options describe.

        Raises:
            BatchdecodeError: they contradict each other, name what there is not, or ask for more
            memory than there is.
        """
        options, scheduling = self.options, self.options.scheduling
        if scheduling.check and isinstance(self.model, SimulatedModel):
            self.model.is_attentive = True
        try:
            return Engine(
                self.model,
                options.batch,
                settings=scheduling.settings(),
                step_time=scheduling.step_time(),
                clock=scheduling.clock(self._sleep),
                is_streaming=options.stream,
                is_checked=bool(scheduling.check),
                grammar_timeout=options.grammar_timeout,
            )
        except MemoryError as error:
            raise BatchdecodeError(f"there is no memory for so many blocks: {error}") from error

    def _sleep(self, seconds: float) -> None:
        with self._waiting():
            time.sleep(seconds)

    def loop(self, known: "EarlierResults | None" = None) -> Loop:
        """Return the loop over the requests; a file has been read through once by then.

        Raises:
            InvalidInput: the file has bad lines, and they are not to be skipped.
            InputError: the file cannot be read.
        """
        options = self.options
        keep_going = options.keep_going or options.max_errors is not None
        try:
            source = open_source(
                self.requests,
                RequestParser(self.engine.capabilities),
                self.report,
                keep_going=keep_going,
                follow=options.follow,
                waiting=self._waiting,
            )
        finally:
            say(self.requests.take_notes() + self.report.closing())
        is_reported = keep_going and source.total is not None
        order = InputOrder(known.num_complete if known else 0) if options.keep_order else None
        return Loop(
            self.engine,
            source,
            Answers(self.model, known, order, is_plain=options.scheduling.is_plain),
            keep_going=keep_going,
            max_errors=options.max_errors,
            on_bad_line=_ignore if is_reported else self.report.add,
        )


def _ignore(bad: BadLine) -> None:
    """Do nothing: the line has been reported."""
