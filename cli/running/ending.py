"""How a run ends early: what was written, how to go on, and an end that waits for nobody."""

import os
import signal
from contextlib import suppress

from ..errors import WriteError
from ..options import RunOptions
from ..screen.cells import counted, printable_lines
from ..screen.view import View
from .lock import OutputLock
from .loop import Loop
from .problems import say
from .recorder import Recorder
from .resume import Resumption
from .signals import StopSignals


class Ending:
    """Says what there is to say when a run ends before all is done.

    command: what continues this run.
    """

    def __init__(
        self,
        options: RunOptions,
        loop: Loop,
        recorder: Recorder,
        view: View,
        lock: OutputLock,
        resumption: Resumption,
        command: str,
    ) -> None:
        self._options, self._loop, self._recorder, self._view = options, loop, recorder, view
        self._lock, self._resumption, self._command = lock, resumption, command

    def tell(self, remark: str, what_now: str | None = None) -> None:
        """Say why the run ends, where its results are if there are any, and how to go on.

        what_now: by default the command that continues it.
        """
        results = self._recorder.results
        where = self._lock.whereabouts()
        if results.num_written or results.num_token_events:
            went = counted(results.num_written, "result")
            if self._options.stream:
                went += f" and {counted(results.num_token_events, 'token event')}"
            remark += f"; {went} went to {where}"
        say(printable_lines(f"{remark}\n"))
        if self._resumption.is_possible and where == self._options.output:
            say(printable_lines(f"{what_now or f'continue with: {self._command}'}\n"))

    def say_waiting(self, received: signal.Signals) -> None:
        """Say what a signal waits for: a step of a model that cannot be broken off."""
        self._view.step_aside()
        step = self._loop.engine.num_steps
        say(
            f"{received.name}: waiting for the model to end step {step}, which nothing limits; "
            "a second signal ends the run at once\n"
        )

    def end_now(self, stop: StopSignals, received: signal.Signals) -> None:
        """Put in order what can be, and leave; the main thread does not answer any more."""
        stop.received = stop.received or received  # its handler may not have been run
        try:
            with suppress(WriteError, OSError):
                self._recorder.finish_early()
                self._recorder.close()
            self._view.close()
            self.tell(f"stopped by {stop.name}")
        finally:
            os._exit(stop.exit_status)
