"""How calls of an LLM are made, and what a failed attempt says of another: if to try, and when."""

from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from math import isfinite
from random import Random
from typing import Annotated, Any

from msgspec import Meta, Struct, ValidationError, convert
from msgspec.structs import asdict

from batcher.errors import BatchdecodeError, describe
from batcher.foreign import Raised, RaisedError, raised

MAX_BACKOFF = 30.0  # seconds
_JITTER = Random()  # noqa: S311 - not secret; an LLM may have seeded the global one
PROGRAMMING_ERRORS = (
    AssertionError,
    AttributeError,
    ImportError,
    NameError,
    NotImplementedError,
    SyntaxError,
    SystemExit,
    TypeError,
)
REFUSALS = {*range(400, 500)} - {408, 425, 429}  # HTTP statuses that stay when asked again
SECONDS_OF = {"retry-after-ms": 0.001, "retry-after": 1.0}  # in the order in which they count


class CallSettings(Struct, frozen=True, forbid_unknown_fields=True):
    """How often, how long and how many at once; all times in seconds."""

    max_concurrency: Annotated[int, Meta(ge=1, le=4096)] = 32
    timeout: Annotated[float, Meta(gt=0, le=86400)] = 60.0  # of each attempt
    call_timeout: Annotated[float, Meta(gt=0, le=86400)] = 120.0  # of all, with the pauses
    max_attempts: Annotated[int, Meta(ge=1, le=100)] = 4
    backoff: Annotated[float, Meta(ge=0, le=MAX_BACKOFF)] = 0.5  # before the second attempt


def checked_settings(settings: CallSettings | None) -> CallSettings:
    """Return `settings`, by default the usual ones.

    Raises:
        BatchdecodeError: one is out of its range.
    """
    if settings is None:
        return CallSettings()
    try:  # an object that is one already would not be looked at
        return convert(
            asdict(settings) if isinstance(settings, CallSettings) else settings, CallSettings
        )
    except ValidationError as error:
        raise BatchdecodeError(f"call settings: {error}") from None


class CallFailure(Exception):  # noqa: N818 - it is handed out more often than raised
    """Why a call has no answer.

    code: one of RUN_ERROR_CODES.  retry_after: the seconds that a server wants to be left alone.
    raised: what the called code raised, if that is why.
    """

    def __init__(
        self,
        message: str,
        *,
        is_worth_retry: bool,
        code: str = "model-error",
        retry_after: float | None = None,
        raised: Raised | None = None,
    ) -> None:
        super().__init__(message)
        self.is_worth_retry, self.code = is_worth_retry, code
        self.retry_after, self.raised = retry_after, raised

    def fatal(self, what: str) -> BatchdecodeError:
        """Return this as an error that ends all; `what` was called."""
        if self.raised is None:
            return BatchdecodeError(f"{what} {self}")
        place = "" if self.raised.place is None else f" ({self.raised.place})"
        return RaisedError(f"{what} {self}{place}", self.raised)


def pause_after(
    num_attempts: int, asked: float | None, backoff: float, longest: float = MAX_BACKOFF
) -> float:
    """Return the seconds before the next attempt.

    They are `asked` for by the server, or `backoff` and twice as many each time, at most `longest`.
    Up to `backoff` more are added by chance: calls that failed together do not return together.
    """
    if asked is None:
        asked = min(backoff * 2 ** (num_attempts - 1), longest)
    return asked + _JITTER.uniform(0, backoff)


def failure_of(error: BaseException) -> CallFailure:
    """Return what it means that the called code raised `error`."""
    is_hopeless = isinstance(error, PROGRAMMING_ERRORS) or _is_refusal(error)
    return CallFailure(
        f"raised {describe(error)}",
        is_worth_retry=not is_hopeless,
        retry_after=_retry_after(error),
        raised=raised(error),
    )


def _is_refusal(error: BaseException) -> bool:
    """Return whether it carries an HTTP status that says that the request itself is wrong."""
    names = ("status_code", "status", "code")  # of requests and httpx; of aiohttp; of urllib
    try:
        found = [getattr(carrier, name, None) for carrier in _carriers(error) for name in names]
        return any(isinstance(status, int) and status in REFUSALS for status in found)
    except BaseException:  # noqa: BLE001 - even these are somebody else's code
        return False


def _retry_after(error: BaseException) -> float | None:
    try:
        for carrier in _carriers(error):
            headers = getattr(carrier, "headers", None)
            seconds = None if headers is None else retry_after_of(headers)
            if seconds is not None:
                return seconds
    except BaseException:  # noqa: BLE001 - as above
        return None
    return None


def retry_after_of(headers: Any) -> float | None:
    """Return the seconds that headers of an answer ask to wait; None if they say none."""
    given = {str(name).lower(): value for name, value in headers.items()}
    for name, unit in SECONDS_OF.items():
        seconds = None if name not in given else _read_seconds(given[name], unit)
        if seconds is not None:
            return seconds
    return None


def _carriers(error: BaseException) -> list[Any]:
    """Return what may have the status and the headers of a response.

    That is the error itself for urllib and aiohttp, its `response` for requests, httpx and openai.
    """
    return [error, getattr(error, "response", None)]


def _read_seconds(value: Any, unit: float) -> float | None:
    text = value.decode("latin-1") if isinstance(value, bytes) else str(value)
    try:
        seconds = float(text) * unit
    except ValueError:
        try:
            date = parsedate_to_datetime(text)
        except ValueError:
            return None
        date = date if date.tzinfo is not None else date.replace(tzinfo=UTC)
        seconds = (date - datetime.now(UTC)).total_seconds()
    return max(seconds, 0.0) if isfinite(seconds) else None
