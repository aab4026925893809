"""Why a server gave no answer, or not all of it, and whether another attempt is worth its time."""

import json
from collections.abc import Iterator
from typing import Any

from batcher.errors import Failure
from batcher.events import RetryReason

MAX_SHOWN = 500  # characters of what a server says
OVERLOADED = {429, 503, 529}
REPEATABLE = OVERLOADED | {408, 409, 425, 500, 502, 504}
UNAUTHORIZED, FORBIDDEN = 401, 403

_TOO_LONG = ("context_length", "context length", "exceed_context_size", "maximum context")
_FILTERED = ("content_filter", "content_policy", "moderation", "flagged")
_NEVER = ("insufficient_quota",)  # a 429 that waiting does not mend


class ServerFailure(Exception):  # noqa: N818 - it is handed on more often than raised
    """Why an attempt has no answer.

    code: one of RUN_ERROR_CODES or FIT_ERROR_CODES.  is_worth_retry: whether the same request may
    be answered later.  retry_after: the seconds that the server wants to be left alone.
    status: of the answer, if it is an error by that.  is_overlong: whether retry_after is more than
    `max_wait` allows.
    """

    def __init__(
        self,
        reason: RetryReason,
        message: str,
        *,
        code: str = "server-error",
        is_worth_retry: bool = True,
        retry_after: float | None = None,
        status: int | None = None,
    ) -> None:
        super().__init__(message)
        self.reason: RetryReason = reason
        self.code, self.is_worth_retry = code, is_worth_retry
        self.retry_after, self.status = retry_after, status
        self.is_overlong = False

    @property
    def is_final(self) -> bool:
        """Whether no request will be answered: the key is wrong."""
        return self.status == UNAUTHORIZED

    @property
    def is_forbidden(self) -> bool:
        """Whether the key may be wrong, or only this request is refused."""
        return self.status == FORBIDDEN and self.code == "server-error"

    def as_failure(self, num_attempts: int) -> Failure:
        """Return this as that of a request."""
        attempts = f" (attempt {num_attempts})" if num_attempts > 1 else ""
        return Failure(self.code, f"{self}{attempts}", self.status)


def refusal(status: int, body: bytes, retry_after: float | None) -> ServerFailure:
    """Return what an answer with an HTTP status other than 200 means."""
    said = told_in(body)
    words = said.lower()
    code = "server-error"
    if any(mark in words for mark in _TOO_LONG):
        code = "prompt-too-long"
    elif status not in REPEATABLE and any(mark in words for mark in _FILTERED):
        code = "content-filter"
    is_hopeless = any(mark in words for mark in _NEVER)
    return ServerFailure(
        "overload" if status in OVERLOADED else "answer",
        f"HTTP {status}: {said}" if said else f"HTTP {status}",
        code=code,
        is_worth_retry=status in REPEATABLE and code == "server-error" and not is_hopeless,
        retry_after=retry_after,
        status=status,
    )


def told_in(body: bytes) -> str:
    """Return what the body of an error says, on one line and not too long."""
    text = body.decode("utf-8", "replace")
    try:
        parts = list(_texts_in(json.loads(text)))
    except (ValueError, RecursionError):
        parts = [text]
    said = " ".join(" ".join(dict.fromkeys(parts)).split())
    return said if len(said) <= MAX_SHOWN else f"{said[:MAX_SHOWN]}…"


def _texts_in(told: Any) -> Iterator[str]:
    """Yield the texts of an error, in the forms of OpenAI, vLLM, FastAPI and llama.cpp."""
    error = told.get("error", told) if isinstance(told, dict) else told
    if not isinstance(error, dict):
        yield error if isinstance(error, str) else json.dumps(error)
        return
    for name in ("message", "detail", "code", "type"):
        if isinstance(error.get(name), str):
            yield error[name] if name in {"message", "detail"} else f"({error[name]})"
