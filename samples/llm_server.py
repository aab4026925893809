"""A language model behind HTTP, to try `samples/http_llm.py` with; the standard library is enough.

    python samples/llm_server.py --latency 0.02 --fail-rate 0.1 &
    batchdecode run samples/llm_requests.jsonl --model samples.http_llm:client

`GET /stop_token` answers {"stop_token": 256}; `POST /logits` with {"tokens": [...]} answers
{"logits": [...]}, 257 of them.  Tokens 0 to 255 are bytes, 256 ends a text.
"""

import argparse
import json
import math
import random
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from contextlib import suppress
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

STOP_TOKEN = 256
VOCAB_SIZE = 257
MAX_CONTEXT = 12  # tokens
TEXTS = """\
The lighthouse stood at the end of the pier, and its lamp turned slowly all night.
The keeper of the lighthouse kept a cat, and the cat kept the keeper warm.
At night the ships went past the pier, and the keeper wrote down their names.
The cat slept near the stove, and the stove slept when the wood was gone.
When the fog came in, the keeper rang the bell until the morning.
In the morning the boats came back, and the cat went down to the pier.
The fishermen gave the cat a fish, and the cat gave them no thanks at all.
One night the lamp went out, and the keeper rang the bell until the ships had passed.
The ships went past the lighthouse, and nobody wrote down who had rung the bell.
Once the sea was so still that the lamp shone twice, above the water and in it.
The keeper read old letters at night, and the cat slept on the ones he had read.
All the names of the ships are in a book, and the book is near the stove.
""".splitlines()


class NgramModel:
    """What follows the last bytes in TEXTS, with shorter contexts filling in for longer ones."""

    def __init__(self) -> None:
        self.followers: dict[tuple[int, ...], Counter[int]] = defaultdict(Counter)
        for text in TEXTS:
            tokens = [*text.encode(), STOP_TOKEN]
            for end, token in enumerate(tokens):
                for start in range(max(0, end - MAX_CONTEXT), end + 1):
                    self.followers[tuple(tokens[start:end])][token] += 1

    def logits(self, tokens: Sequence[int]) -> list[float]:
        """Return the logarithms of the probabilities [vocab] after `tokens`.

        They are smoothed as Witten and Bell (1991) do it.
        """
        chances = [1 / VOCAB_SIZE] * VOCAB_SIZE
        for length in range(min(MAX_CONTEXT, len(tokens)) + 1):
            followers = self.followers.get(tuple(tokens[len(tokens) - length :]))
            if followers is None:
                break
            total = followers.total() + len(followers)
            chances = [
                (followers[token] + len(followers) * chance) / total
                for token, chance in enumerate(chances)
            ]
        return [math.log(chance) for chance in chances]


class Handler(BaseHTTPRequestHandler):
    """Answers one connection."""

    protocol_version = "HTTP/1.1"
    server: "LLMServer"

    def do_GET(self) -> None:
        """Answer which token ends a text."""
        if self.path == "/stop_token":
            self._answer(HTTPStatus.OK, {"stop_token": STOP_TOKEN})
        else:
            self._answer(HTTPStatus.NOT_FOUND, {"error": f"no {self.path} here"})

    def do_POST(self) -> None:
        """Answer the logits after the tokens that were sent."""
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self.path != "/logits":
            self._answer(HTTPStatus.NOT_FOUND, {"error": f"no {self.path} here"})
            return
        time.sleep(self.server.latency)
        if random.random() < self.server.fail_rate:  # noqa: S311 - nobody has to be fooled
            self._answer(HTTPStatus.SERVICE_UNAVAILABLE, {"error": "try again"})
            return
        try:
            logits = self.server.model.logits(json.loads(body)["tokens"])
        except (ValueError, TypeError, KeyError):
            self._answer(HTTPStatus.BAD_REQUEST, {"error": "expected {'tokens': [...]}"})
        else:
            self._answer(HTTPStatus.OK, {"logits": logits})

    def _answer(self, status: HTTPStatus, content: dict[str, object]) -> None:
        body = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Say nothing about requests."""


class LLMServer(ThreadingHTTPServer):
    """Answers every connection in a thread of its own.

    latency: seconds before each answer.  fail_rate: the share of calls that fail with status 503.
    """

    daemon_threads = True
    request_queue_size = 128  # connections may come all at once

    def __init__(self, port: int, latency: float = 0.0, fail_rate: float = 0.0) -> None:
        super().__init__(("127.0.0.1", port), Handler)
        self.model, self.latency, self.fail_rate = NgramModel(), latency, fail_rate


def main() -> None:
    """Serve until Ctrl-C."""
    parser = argparse.ArgumentParser(description="A small language model behind HTTP.")
    parser.add_argument("--port", type=int, default=8765)
    parser.add_argument("--latency", type=float, default=0.0, help="seconds before each answer")
    parser.add_argument("--fail-rate", type=float, default=0.0, help="share of calls that fail")
    options = parser.parse_args()
    with LLMServer(options.port, options.latency, options.fail_rate) as server:
        print(f"http://127.0.0.1:{server.server_port}", flush=True)  # noqa: T201 - where it is
        with suppress(KeyboardInterrupt):
            server.serve_forever()


if __name__ == "__main__":
    main()
