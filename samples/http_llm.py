"""An LLM behind HTTP: `batchdecode run samples/llm_requests.jsonl --model samples.http_llm:client`.

The server is that of LLM_URL, by default http://127.0.0.1:8765, where `samples/llm_server.py`
serves.  batchdecode calls it for all running sequences at once, and again if it fails.
"""

import json
import os
import urllib.request
from typing import Any


class ByteTokenizer:
    """Tokens 0 to 255 are bytes, 256 ends a text."""

    token_bytes = (*(bytes([byte]) for byte in range(256)), b"")

    def encode(self, text: str) -> list[int]:
        """Return the bytes of `text`."""
        return list(text.encode())


class HTTPModel:
    """What batchdecode needs of a language model: two methods, and a tokenizer for text."""

    tokenizer = ByteTokenizer()

    def __init__(self, url: str) -> None:
        self.url = url
        self.opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # no proxy

    def next_token_logits(self, prev_token_ids: list[int]) -> list[float]:
        """Return the logits of the token after `prev_token_ids`."""
        logits: list[float] = self._ask("/logits", {"tokens": prev_token_ids})["logits"]
        return logits

    def get_stop_token_id(self) -> int:
        """Return the token that ends a text."""
        token_id: int = self._ask("/stop_token")["stop_token"]
        return token_id

    def _ask(self, path: str, content: dict[str, Any] | None = None) -> Any:
        body = None if content is None else json.dumps(content).encode()
        request = urllib.request.Request(self.url + path, body)  # noqa: S310 - of the user's choice
        with self.opener.open(request, timeout=60) as response:
            return json.load(response)


client = HTTPModel(os.environ.get("LLM_URL", "http://127.0.0.1:8765"))
