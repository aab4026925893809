"""The model, the engine and the request parser that the options of a run describe."""

import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING

import msgspec

from batcher.engine.engine import Engine
from batcher.errors import BatchdecodeError
from batcher.models.base import Model, bytes_of
from batcher.models.simulated import SimulatedModel
from batcher.remote.model import RemoteModel, is_server
from batcher.requests.lines import BadLine, ParsedLine, RequestParser
from batcher.requests.validation import ModelCapabilities
from batcher.scheduling.clock import Clock
from batcher.timing.step_time import StepTime

from ..models import capabilities_of, load, open_server
from ..options import SchedulingOptions
from .input import Waiting
from .run_options import RunOptions

if TYPE_CHECKING:
    from batcher.remote.engine import RemoteEngine

    from ..commands.serve import ServeOptions


class EngineSetup:
    """A model and its engine.

    options: fitted to the model.  capabilities: for the check of requests.
    is_shown: whether to draw a progress bar while the model is loaded.

    Raises:
        BatchdecodeError: the model does not exist, or does not support these options.
    """

    def __init__(
        self, options: RunOptions, waiting: Waiting = nullcontext, *, is_shown: bool = False
    ) -> None:
        self._waiting = waiting
        self.options = options
        with waiting():
            self.model: Model | RemoteModel
            self.engine: Engine | RemoteEngine
            if is_server(options.model):
                self.model, self.engine = open_server(options, waiting)
            else:
                self.model = self._load_model(options, is_shown=is_shown)
                scheduling = options.scheduling.fitted(self.model)
                self.options = replace(options, scheduling=scheduling)
                clock, step_time = scheduling.clock(self._sleep), scheduling.step_time()
                self.engine = make_engine(
                    self.options,
                    scheduling,
                    self.model,
                    clock,
                    step_time,
                    is_streamed=options.stream,
                )
            self.capabilities = capabilities_of(self.engine, options)
            self.engine.capabilities = self.capabilities  # with the defaults of the run

    def parser(self, tell: Callable[[str], None]) -> RequestParser:
        options, capabilities = self.options, self.capabilities
        is_hinted = capabilities.chat_template is not None and not (options.chat or options.quiet)
        if not is_hinted or isinstance(self.model, SimulatedModel):
            return RequestParser(capabilities)
        return ChatHintingParser(capabilities, tell)

    def _load_model(self, options: RunOptions, *, is_shown: bool) -> Model:
        for option in ("max_rate", "max_wait", "extra_body"):
            if getattr(options, option) is not None:
                raise BatchdecodeError(
                    f"--{option.replace('_', '-')} works only with a server, and "
                    f"{options.model} is not one"
                )
        limit = options.call_timeout
        if limit is not None:
            call_settings = {**options.llm_settings, "call_timeout": limit}
            options = replace(options, llm_settings=call_settings)
        model = load(options, is_shown=is_shown)
        calls = getattr(model, "calls", None)  # of an LLMModel
        if calls is not None:
            calls.waiting = self._waiting  # so that a signal can interrupt them
        if limit is not None and (calls is None or calls.settings.call_timeout != limit):
            raise BatchdecodeError(
                "--call-timeout works only with an LLM object without call settings of its own, "
                f"and {model.name} is not one"
            )
        return model

    def _sleep(self, seconds: float) -> None:
        with self._waiting():
            time.sleep(seconds)

    def bytes_of(self, token: int) -> bytes:
        model = self.model
        if isinstance(model, RemoteModel):
            return b""
        return bytes_of(token, model.tokenizer.token_bytes)


def make_engine(
    options: "RunOptions | ServeOptions",
    scheduling: SchedulingOptions,
    model: Model,
    clock: Clock | None,
    step_time: StepTime | None = None,
    *,
    is_streamed: bool,
) -> Engine:
    """Return the engine of the options; scheduling: fitted to the model.

    Raises:
        BatchdecodeError: the options contradict each other, or need more memory than there is.
    """
    if scheduling.check and isinstance(model, SimulatedModel):
        model.is_attentive = True
    try:
        return Engine(
            model,
            options.batch,
            settings=scheduling.settings(),
            step_time=step_time,
            clock=clock,
            is_streaming=is_streamed,
            is_checked=bool(scheduling.check),
            grammar_timeout=options.grammar_timeout,
            strict_constraints=options.strict_constraints,
            speculation=scheduling.speculation,
        )
    except MemoryError as error:
        raise BatchdecodeError(f"not enough memory for the KV blocks: {error}") from error


_fields_of = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_WARNING = "warning: this model has a chat template: --chat puts each prompt into it\n"


class ChatHintingParser(RequestParser):
    """A parser for a model with a chat template, which warns of the first text that skips it.

    `messages` use the template, token ids need none, and an API row chooses for itself.
    """

    def __init__(self, capabilities: ModelCapabilities, tell: Callable[[str], None]) -> None:
        super().__init__(capabilities)
        self._tell, self._has_told = tell, False

    def parse(self, line: bytes, line_number: int) -> ParsedLine | BadLine:
        parsed = super().parse(line, line_number)
        if not self._has_told and isinstance(parsed, ParsedLine) and parsed.form == "result":
            is_text = isinstance(parsed.request.prompt, str)
            if is_text and "messages" not in _fields_of(line):
                self._has_told = True
                self._tell(_WARNING)
        return parsed
