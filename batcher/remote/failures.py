"""Failures of a server: why an answer is missing or cut off, and whether to retry."""

import json
import re
from collections.abc import Iterator
from typing import Any

from batcher.errors import Failure
from batcher.events import RetryReason

MAX_SHOWN = 500  # characters of what a server says
OVERLOADED = {429, 503, 529}
REPEATABLE = OVERLOADED | {408, 409, 425, 500, 502, 504, *range(520, 528)}  # Cloudflare's last
UNAUTHORIZED, FORBIDDEN = 401, 403

_TOO_LONG = ("context_length", "context length", "exceed_context_size", "maximum context")
_FILTERED = ("content_filter", "content_policy", "moderation", "flagged")
_NEVER = ("insufficient_quota",)  # a 429 that waiting does not mend
_WORDS = (
    "message",
    "msg",
    "error",
    "errors",
    "detail",
    "status_msg",
    "base_resp",
    "metadata",
    "raw",
)
_STATUS = re.compile("[45][0-9][0-9]")
_TITLE = re.compile("<title[^<>]*>([^<]*)", re.IGNORECASE)  # of a page
_TAG = re.compile("<[^<>]*>")


class ServerFailure(Exception):  # noqa: N818 - it is passed on more often than raised
    """Why an attempt has no answer.

    code: one of RUN_ERROR_CODES or FIT_ERROR_CODES.  is_worth_retry: whether the same request may
    be answered later.  retry_after: the seconds that the server asks to wait.
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
        """Return this as the failure of a request."""
        attempts = f" (attempt {num_attempts})" if num_attempts > 1 else ""
        return Failure(self.code, f"{self}{attempts}", self.status)


def refusal(status: int, body: bytes, retry_after: float | None) -> ServerFailure:
    """Return the failure that an HTTP status other than 200 means."""
    said = error_text(body)
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


def error_within(told: Any, *, is_passing: bool) -> ServerFailure:
    """Return the failure that an error within an answer of status 200 means.

    is_passing: whether another attempt may help, if the error holds no status that says so.
    """
    error = told.get("error") if isinstance(told, dict) else None
    holders = [holder for holder in (error, told) if isinstance(holder, dict)]
    found = (str(holder.get(name)) for holder in holders for name in ("code", "status"))
    usual = 500 if is_passing else 400
    status = next((int(text) for text in found if _STATUS.fullmatch(text)), usual)
    body = json.dumps(told).encode()
    meant, said = refusal(status, body, None), error_text(body)
    return ServerFailure(
        meant.reason,
        f"the server sent an error: {said}",
        code=meant.code,
        is_worth_retry=meant.is_worth_retry and "invalid_request" not in said,
    )


def error_text(body: bytes) -> str:
    """Return what the body of an error says, on one line and not too long."""
    text = body.decode("utf-8", "replace")
    try:
        parts = list(_texts_in(json.loads(text)))
    except (ValueError, RecursionError):
        is_page = text.lstrip().startswith("<")
        parts = (_TITLE.findall(text) or [_TAG.sub(" ", text)]) if is_page else []
    said = " ".join(" ".join(dict.fromkeys(parts) or [text]).split())
    return said if len(said) <= MAX_SHOWN else f"{said[:MAX_SHOWN]}…"


def _texts_in(told: Any) -> Iterator[str]:
    """Yield the texts of an error, whoever wrote it: OpenAI, vLLM, FastAPI, OpenRouter, Gemini."""
    if isinstance(told, str):
        yield told
    elif isinstance(told, list):
        for each in told:
            yield from _texts_in(each)
    elif isinstance(told, dict):
        place = told.get("loc")
        if isinstance(place, list):
            yield f"{'.'.join(map(str, place))}: {told.get('msg')}"
        else:
            for name in _WORDS:
                yield from _texts_in(told.get(name))
        yield from (
            f"({told[name]})" for name in ("code", "type") if isinstance(told.get(name), str)
        )
