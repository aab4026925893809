"""Parts of answers while they are generated: the chunks of OpenAI's streams.

Rule: joined, the chunks of a choice say what its place in the whole answer would have said.
"""

from typing import Literal

from msgspec import UNSET, Struct, UnsetType

from batcher.events import TokenEvent
from batcher.requests.openai import Form
from batcher.requests.result_rows import (
    ChatLogprobs,
    ChoiceLogprobs,
    RowUsage,
    answer_id_of,
    chat_logprobs,
    choice_logprobs,
    usage_of,
)
from batcher.result import FinishReason, Result, StopReason, TokenLogprob


class ChunkChoice(Struct, frozen=True, gc=False):
    """What has come of one output of a completion; token_ids: only if they are asked for."""

    index: int
    text: str
    finish_reason: FinishReason | None
    stop_reason: StopReason
    logprobs: ChoiceLogprobs | None
    token_ids: list[int] | UnsetType = UNSET


class Delta(Struct, frozen=True, gc=False, omit_defaults=True):
    """What has come of what the assistant says; the first one of an output has its role."""

    role: Literal["assistant"] | None = None
    content: str | None = None


class ChatChunkChoice(Struct, frozen=True, gc=False):
    """What has come of one output of a chat; token_ids: only if they are asked for."""

    index: int
    delta: Delta
    finish_reason: FinishReason | None
    stop_reason: StopReason
    logprobs: ChatLogprobs | None
    token_ids: list[int] | UnsetType = UNSET


class AnswerChunk(Struct, frozen=True, gc=False):
    """One part of an answer; the last one has no choices and the usage, if that is asked for.

    Then the others have a usage of null, as OpenAI's do; otherwise none.
    """

    id: str
    object: Literal["text_completion", "chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChunkChoice] | list[ChatChunkChoice]
    usage: RowUsage | UnsetType | None = UNSET


class _Output(Struct):
    """How much of one output has been told."""

    num_chars: int = 0
    num_tokens: int = 0
    has_role: bool = False


class ChunkWriter:
    """Makes the chunks of one answer of what the engine tells of its request.

    What is told of an output before its result is a beginning of what the result says.
    """

    def __init__(
        self,
        request_id: str,
        model: str,
        form: Form,
        created: int,
        *,
        has_token_ids: bool = False,
        has_usage: bool = False,
    ) -> None:
        self._id, self._model, self._created = answer_id_of(request_id, form), model, created
        self._is_chat, self._has_token_ids = form == "chat", has_token_ids
        self._no_usage: UnsetType | None = None if has_usage else UNSET
        self._outputs: dict[int, _Output] = {}

    def of_tokens(self, event: TokenEvent, place: int) -> AnswerChunk:
        return self._chunk(
            place, event.text, event.tokens or [], None, None, logprobs=event.logprobs
        )

    def of_result(self, result: Result, place: int) -> AnswerChunk:
        """Return the last chunk of an output: all that was not told, and how it ended.

        place: its place in the answer, which is its index unless the outputs compete.
        """
        output = self._outputs.get(place, _Output())
        logprobs = result.logprobs
        return self._chunk(
            place,
            result.text[output.num_chars :],
            result.token_ids[output.num_tokens :],
            result.finish_reason,
            result.stop_reason,
            logprobs=None if logprobs is None else logprobs[output.num_tokens :],
        )

    def of_usage(self, results: list[Result]) -> AnswerChunk:
        return self._around([], usage_of(results))

    def _chunk(
        self,
        index: int,
        text: str,
        tokens: list[int],
        finish_reason: FinishReason | None,
        stop_reason: StopReason,
        *,
        logprobs: list[TokenLogprob] | None,
    ) -> AnswerChunk:
        output = self._outputs.setdefault(index, _Output())
        start, output.num_chars = output.num_chars, output.num_chars + len(text)
        output.num_tokens += len(tokens)
        token_ids = tokens if self._has_token_ids else UNSET
        if self._is_chat:
            role: Literal["assistant"] | None = None if output.has_role else "assistant"
            output.has_role = True
            delta = Delta(role, text or (None if role is None else ""))
            told = chat_logprobs(logprobs) if logprobs else None
            chat = ChatChunkChoice(index, delta, finish_reason, stop_reason, told, token_ids)
            return self._around([chat], self._no_usage)
        of_text = choice_logprobs(logprobs, [start] * len(logprobs)) if logprobs else None
        choice = ChunkChoice(index, text, finish_reason, stop_reason, of_text, token_ids)
        return self._around([choice], self._no_usage)

    def _around(
        self,
        choices: list[ChunkChoice] | list[ChatChunkChoice],
        usage: RowUsage | UnsetType | None,
    ) -> AnswerChunk:
        kind: Literal["text_completion", "chat.completion.chunk"] = "text_completion"
        if self._is_chat:
            kind = "chat.completion.chunk"
        return AnswerChunk(self._id, kind, self._created, self._model, choices, usage)
