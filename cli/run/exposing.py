"""Where Prometheus finds the numbers of a run: at a port, and in a file for the node exporter.

Rule: threads of their own answer and write, and the run waits for none of them before its end.
"""

from contextlib import suppress
from importlib.util import find_spec
from threading import Event, Thread
from typing import TYPE_CHECKING, Any, Self

from batcher.errors import BatchdecodeError

from ..errors import WriteError, reason_of
from .out_file import OutFile
from .output import OutputError

if TYPE_CHECKING:
    from batcher.metrics.prometheus import RunCollector, WorkersCollector

METRICS_PATH = "/metrics"
WRITE_SECONDS = 5.0  # between two versions of the file


def _answer(answer: Any, asked: dict[str, Any], begin: Any) -> Any:
    """Return the answer of the library at its one address, and elsewhere where that is."""
    if asked["PATH_INFO"] != METRICS_PATH:
        begin("404 Not Found", [("Content-Type", "text/plain; charset=utf-8")])
        return [f"nothing here; the metrics are at {METRICS_PATH}\n".encode()]
    # As OpenMetrics, which Prometheus likes best, the library tells vllm_x for vllm:x.
    return answer(asked | {"HTTP_ACCEPT": ""}, begin)


class Exposition:
    """Tells Prometheus what the collector has that it is given: nothing yet, while a model loads.

    where: (address, port); port 0 is one that is free.  file: replaced as a whole.
    url: where Prometheus is answered; None if it is not.

    Raises:
        BatchdecodeError: prometheus_client is missing, or the address cannot be had.
        OutputError, WriteError: the file cannot be written.
    """

    def __init__(self, where: tuple[str, int] | None, file: OutFile | None) -> None:
        if find_spec("prometheus_client") is None:
            raise BatchdecodeError(
                "--metrics-port and --metrics-file need prometheus-client: "
                "install it with `pip install 'batchdecode[metrics]'`"
            )
        from prometheus_client import (  # noqa: PLC0415 - an extra
            CollectorRegistry,
            make_wsgi_app,
            start_http_server,
        )

        self._registry = CollectorRegistry()
        self._file = file
        self._is_over = Event()
        self._writer = Thread(target=self._keep_writing, name="metrics-file", daemon=True)
        self._server, self.url = None, None
        if file is not None:
            if not file.is_plain:
                raise OutputError(f"cannot write {file.name}: it is no file that could be replaced")
            self._write()
            self._writer.start()
        if where is not None:
            address, port = where
            try:
                self._server, _ = start_http_server(port, address, self._registry)
            except OSError as error:
                raise BatchdecodeError(
                    f"--metrics-port: cannot listen at {address}, port {port}: {reason_of(error)}"
                ) from error
            answer = make_wsgi_app(self._registry)
            self._server.set_app(lambda asked, begin: _answer(answer, asked, begin))
            host = f"[{address}]" if ":" in address else address
            self.url = f"http://{host}:{self._server.server_port}{METRICS_PATH}"

    def tell(self, collector: "RunCollector | WorkersCollector") -> None:
        """Tell from now on what `collector` does."""
        self._registry.register(collector)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Write the file a last time, and answer no more.

        Raises:
            WriteError: the file cannot be written any more.
        """
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
        if self._file is not None:
            self._is_over.set()
            self._writer.join()
            self._write()

    def _keep_writing(self) -> None:
        while not self._is_over.wait(WRITE_SECONDS):
            with suppress(OutputError, WriteError):  # the last time it would be told
                self._write()

    def _write(self) -> None:
        from prometheus_client import generate_latest  # noqa: PLC0415 - as above

        if self._file is not None:
            with self._file.replace() as sink:
                sink.write(generate_latest(self._registry))
