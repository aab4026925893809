"""What goes wrong with a request over HTTP, in OpenAI's shape: a message, its place and a code."""

from collections.abc import Mapping, Sequence

import msgspec
from msgspec import Struct

from batcher.errors import RUN_ERROR_CODES
from batcher.requests.diagnostics import Problem
from batcher.requests.result_rows import SERVER_ERROR, status_of
from batcher.result import ErrorInfo

UNAUTHORIZED, FORBIDDEN, NOT_FOUND, TOO_LARGE = 401, 403, 404, 413
TOO_MANY, UNAVAILABLE = 429, 503
BAD_REQUEST, TIMEOUT, HEADERS_TOO_LARGE = 400, 408, 431
RETRY_AFTER = "1"  # seconds: by then a step or many have been made

# The name under which clients of OpenAI look for one of our codes.
_OPENAI_CODES = {"prompt-too-long": "context_length_exceeded"}


# Of these the text is that of a model, which knows all requests of the batch.
_MAY_TELL_OF_OTHERS = {"model-error", "call-timeout"}


class ErrorBody(Struct, frozen=True):
    """What is wrong; param: the field it is about, type: whose fault it is."""

    message: str
    type: str
    param: str | None
    code: str | None


class ApiError(Exception):
    """An answer to a request that is no completion; status: that of the answer."""

    def __init__(
        self,
        status: int,
        code: str,
        message: str,
        param: str | None = None,
        headers: Mapping[str, str] = {},
    ) -> None:
        super().__init__(message)
        self.status, self.headers = status, headers
        kind = "server_error" if status >= SERVER_ERROR else "invalid_request_error"
        if status == TOO_MANY:
            kind = "rate_limit_error"
        self.body = ErrorBody(message, kind, param, _OPENAI_CODES.get(code, code))

    @property
    def json(self) -> bytes:
        """The body of the answer."""
        return msgspec.json.encode({"error": self.body})


def of_problems(problems: Sequence[Problem], place: str = "") -> ApiError:
    """Return the answer to a body that is not valid: the first of its problems.

    place: which of several prompts is wrong.
    """
    first = problems[0]
    param = None if first.field is None else first.field.removeprefix("body.")
    said = first.message + (f" ({first.hint})" if first.hint else "")
    return ApiError(BAD_REQUEST, first.code, place + said.replace("`body.", "`"), param)


def of_result(error: ErrorInfo) -> ApiError:
    """Return the answer to a request that has failed; none tells of another request."""
    message = error.message
    if error.code in _MAY_TELL_OF_OTHERS:
        message = RUN_ERROR_CODES[error.code]
    return ApiError(status_of(error.code), error.code, message)


def engine_failed() -> ApiError:
    """Return the answer of a server whose engine can go on no more."""
    return ApiError(UNAVAILABLE, "engine-failed", "the engine of this server has failed")
