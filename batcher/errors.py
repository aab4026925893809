"""All errors of the project: a family that users can cause, and a class for our own bugs."""

from msgspec import Struct
from msgspec.structs import replace

REQUEST_ERROR_CODES = {
    "invalid-json": "the line is not one JSON object",
    "invalid-text": "bytes that are not UTF-8, or a lone surrogate, which is not a character",
    "unknown-field": "a field that requests do not have",
    "duplicate-field": "the same field twice in one object",
    "conflicting-fields": "a field and its synonym together, or fields that contradict each other",
    "missing-field": "a required field is missing",
    "invalid-type": "a value of the wrong type",
    "invalid-value": "a value of the right type that is not allowed",
    "unknown-token": "a token id outside the model's vocabulary",
    "invalid-grammar": "a constraint that cannot be compiled",
    "too-few-slots": "a request that needs more slots at once than the batch has",
    "unsupported-model": "a field that this model, or this installation, cannot serve",
    "unsupported-option": "an option of OpenAI or vLLM that is not supported",
    "too-many-parts": "a line of more than 131,072 strings, lists and objects",
    "duplicate-id": "an id that an earlier request has",
}
INPUT_ERROR_CODES = {
    "line-too-long": "a line of more than 64 MiB",
    "arrival-order": "on a pipe, a request that arrives before the one before it",
}
FIT_ERROR_CODES = {
    "empty-prompt": "a prompt without tokens, for a model that needs one",
    "prompt-too-long": "a prompt that fills the model's context",
}
RUN_ERROR_CODES = {
    "model-error": "the model raised, or returned no usable token or logits for the row",
    "call-timeout": "the LLM has not answered within --call-timeout",
    "too-few-outputs": "beam search found fewer outputs than requested",
    "constraint-error": "the output broke its constraint, or no token could continue it",
    "server-error": "a server refused the request, or its answer is incomplete",
    "content-filter": "a server's content filter refused the request or cut its answer",
    "refusal": "a server's model refused to answer",
    "kv-too-small": "the request may need more blocks than there are",
    "worker-died": "each worker that decoded the request alone died",
    "session-failed": "the previous request of its session failed or was aborted",
}
CLIENT_FAULTS = {"too-few-outputs", "constraint-error", "content-filter", "refusal", "kv-too-small"}
"""Those of RUN_ERROR_CODES that will happen again to the same request: its status is 400."""
ERROR_CODES = REQUEST_ERROR_CODES | INPUT_ERROR_CODES | FIT_ERROR_CODES | RUN_ERROR_CODES


class BatchdecodeError(Exception):
    """A mistake outside the project's code; the message says how to fix it."""


class ModelError(BatchdecodeError):
    """A model raised, or did not return one token id per row."""


class LostModelError(BatchdecodeError):
    """A model that will not answer any more: the run cannot continue."""


Path = tuple[str | int, ...]
"""A place in a request: ("stop_sequence", 2, 0) is stop_sequence[2][0]; () is the request."""


class FieldProblem(Struct, frozen=True):
    """One mistake in one field; is_key: whether the last name on `path` is wrong, not its value."""

    code: str
    path: Path
    message: str
    hint: str | None = None
    is_key: bool = False

    @property
    def field(self) -> str | None:
        """The path as text, `stop_sequence[2][0]`; None for the whole request."""
        text = "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in self.path)
        return text.removeprefix(".") or None


class GrammarError(BatchdecodeError):
    """A constraint that cannot be compiled; path: as in a FieldProblem."""

    def __init__(self, path: Path, message: str) -> None:
        self.path = path
        super().__init__(message)


class EncodingError(BatchdecodeError):
    """A text that the tokenizer cannot encode; code: one of REQUEST_ERROR_CODES."""

    def __init__(self, code: str, message: str) -> None:
        self.code = code
        super().__init__(message)


def not_encoded(path: Path, error: EncodingError) -> FieldProblem:
    problem = FieldProblem(error.code, path, "")
    return replace(problem, message=f"`{problem.field}` cannot be encoded: {error}")


class Failure(Struct, frozen=True):
    """Why a row has no token; code: of RUN_ERROR_CODES or FIT_ERROR_CODES; status: an HTTP one."""

    code: str
    message: str
    status: int | None = None


class RequestError(BatchdecodeError):
    """The request with this id is not valid; `problems` lists its mistakes."""

    def __init__(self, request_id: str, problems: list[FieldProblem]) -> None:
        self.request_id, self.problems = request_id, problems
        said = [f"{p.message} ({p.hint})" if p.hint else p.message for p in problems]
        super().__init__(f"request {request_id!r}: {'; '.join(said)}")


def id_in_use(request_id: str) -> RequestError:
    message = f"a request with id {request_id!r} has not ended yet"
    return RequestError(request_id, [FieldProblem("duplicate-id", ("id",), message)])


def writable(text: str) -> str:
    """Return `text` with a question mark for each lone surrogate."""
    return text.encode(errors="replace").decode()


def describe(error: BaseException) -> str:
    """Return the type and text of an exception from user code."""
    kind = type(error).__name__
    try:
        text = str(error)
    except Exception:  # noqa: BLE001 - the exception's own code
        return kind
    return writable(f"{kind}: {text}")


class InvariantError(Exception):
    """A bug in batchdecode itself."""
