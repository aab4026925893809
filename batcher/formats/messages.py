"""Chats as lines state them: messages, and the prompt that a model's template makes of them."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from msgspec import Struct

from batcher.errors import FieldProblem, Path, describe
from batcher.formats.suggestions import unknown_names
from batcher.validation import show
from batcher.validation.values import quote, wrong

Message = dict[str, str]
ChatTemplate = Callable[[list[Message]], Any]
"""What makes the prompt of a chat: text, token ids, or a mapping that has them as `input_ids`."""

MESSAGE_FIELDS = ("role", "content", "name")
UNUSED_FIELDS = ("refusal", "tool_calls", "function_call", "audio", "annotations")
PART_FIELDS = ("type", "text")

_NO_TEMPLATE = "`messages` needs a model with a chat template; this one has none"
_WHAT_NOW = "give the prompt itself, or give the model or its tokenizer `apply_chat_template`"


class RenderedPrompt(Struct, frozen=True):
    """The prompt of a chat: text or token ids."""

    prompt: Any


def read_messages(
    messages: Any, path: Path, template: ChatTemplate | None
) -> RenderedPrompt | list[FieldProblem]:
    """Return the prompt that `template` makes of `messages`, or what is wrong with them."""
    problems = list(_check_messages(messages, path))
    if problems:
        return problems
    if template is None:
        return [FieldProblem("unsupported-model", path, _NO_TEMPLATE, _WHAT_NOW)]
    try:
        rendered = template([_flat(message) for message in messages])
        if isinstance(rendered, Mapping):
            rendered = rendered["input_ids"]
        if not isinstance(rendered, str) and not _is_list_of_ids(rendered):
            rendered = [int(token_id) for token_id in rendered]
    except Exception as error:  # noqa: BLE001 - whatever the template's own code raises
        message = f"the chat template fails on `messages`: {describe(error)}"
        return [FieldProblem("invalid-value", path, message)]
    return RenderedPrompt(rendered)


def _is_list_of_ids(rendered: object) -> bool:
    return isinstance(rendered, list) and set(map(type, rendered)) <= {int}


def _flat(message: Mapping[str, Any]) -> Message:
    """Return a valid message whose content is text: parts become lines, as in vLLM."""
    flat = {name: message[name] for name in MESSAGE_FIELDS if message.get(name) is not None}
    if isinstance(flat["content"], list):
        flat["content"] = "\n".join(part["text"] for part in flat["content"])
    return flat


def _check_messages(messages: Any, path: Path) -> Iterator[FieldProblem]:
    """Yield what is wrong with messages, whatever they are."""
    if not isinstance(messages, list):
        yield wrong("invalid-type", path, "a list of messages", messages)
    elif not messages:
        yield FieldProblem("invalid-value", path, f"{quote(path)} is empty: nobody says anything")
    else:
        for index, message in enumerate(messages):
            yield from _check_message(message, (*path, index))


def _check_message(message: Any, path: Path) -> Iterator[FieldProblem]:
    if not isinstance(message, dict):
        yield wrong("invalid-type", path, "a message, an object", message)
        return
    yield from unknown_names(message, path, (*MESSAGE_FIELDS, *UNUSED_FIELDS))
    for name in (name for name in UNUSED_FIELDS if message.get(name)):
        problem = f"{quote((*path, name))} is not supported"
        yield FieldProblem("unsupported-option", (*path, name), problem, "leave it out")
    for name in MESSAGE_FIELDS[:2]:
        if message.get(name) is None:
            yield FieldProblem("missing-field", path, f"{quote(path)} has no `{name}`")
    role, author = message.get("role"), message.get("name")
    if role is not None and not (isinstance(role, str) and role):
        yield wrong("invalid-type", (*path, "role"), "the name of a role", role)
    if author is not None and not isinstance(author, str):
        yield wrong("invalid-type", (*path, "name"), "a string", author)
    content = message.get("content")
    if isinstance(content, list):
        for index, part in enumerate(content):
            yield from _check_part(part, (*path, "content", index))
    elif content is not None and not isinstance(content, str):
        yield wrong("invalid-type", (*path, "content"), "a string or a list of parts", content)


def _check_part(part: Any, path: Path) -> Iterator[FieldProblem]:
    if not isinstance(part, dict):
        yield wrong("invalid-type", path, "a part, an object", part)
        return
    kind = part.get("type")
    if kind != "text":
        message = f'{quote((*path, "type"))} is {show(kind)}; only "text" is supported'
        yield FieldProblem("unsupported-option", (*path, "type"), message)
        return
    yield from unknown_names(part, path, PART_FIELDS)
    if not isinstance(part.get("text"), str):
        yield wrong("invalid-type", (*path, "text"), "a string", part.get("text"))
