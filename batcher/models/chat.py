"""Chat templates: what makes a prompt of messages, as in transformers `apply_chat_template`."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from batcher.foreign import attribute_of
from batcher.models.base import Model

ChatTemplate = Callable[[list[dict[str, str]]], Any]

ROLES = ("system", "developer", "user", "assistant", "tool")


def chat_template_of(model: Model) -> ChatTemplate | None:
    """Return what makes prompts of chats with `model`; None if neither it nor its tokenizer can.

    That is `apply_chat_template(messages, tokenize=True, add_generation_prompt=True)`, which
    returns token ids (perhaps as `input_ids` of a mapping) or text.  A tokenizer of ours, whose
    template has no tokens but those of its text, is asked for that: a long text becomes an array.
    """
    for holder in (getattr(model, "inner", model), model.tokenizer):
        template = attribute_of(holder, "apply_chat_template", None)
        if callable(template):
            is_plain = hasattr(holder, "encode_array")
            return partial(template, tokenize=not is_plain, add_generation_prompt=True)
    return None


def render_chat(messages: Sequence[Mapping[str, str]], *, add_generation_prompt: bool) -> str:
    """Return a chat as the simulated model reads it: a line for each message, `role: content`.

    add_generation_prompt: whether `assistant:` follows, for the model to go on from.

    Raises:
        ValueError: a role that is none of ROLES.
    """
    lines = []
    for message in messages:
        role = message["role"]
        if role not in ROLES:
            raise ValueError(f"unknown role {role!r}; known are {', '.join(ROLES)}")
        name = f" {message['name']}" if "name" in message else ""
        lines.append(f"{role}{name}: {message['content']}\n")
    if add_generation_prompt:
        lines.append("assistant:")
    return "".join(lines)
