"""Chat templates: Jinja as transformers runs it, in a sandbox that changes nothing it is given."""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any, NoReturn

from batcher.foreign import calling

if TYPE_CHECKING:
    from jinja2 import Environment
    from jinja2.parser import Parser


class ChatTemplate:
    """What makes a text of messages.

    special_tokens: the texts that a template may name, such as bos_token.

    Raises:
        RaisedError: the template is broken.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        with calling("the chat template cannot be used:"):
            self._template = _environment().from_string(source)
        self._special_tokens = special_tokens

    def render(self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool) -> str:
        """Return the text of a chat; what the template raises passes through.

        add_generation_prompt: whether it ends with the beginning of an answer.
        """
        return self._template.render(
            **self._special_tokens,
            messages=messages,
            tools=None,
            documents=None,
            add_generation_prompt=add_generation_prompt,
        )


def _environment() -> "Environment":
    """Return what templates of checkpoints expect: `render_jinja_template` of transformers."""
    from jinja2.ext import Extension, loopcontrols  # noqa: PLC0415 - optional
    from jinja2.sandbox import ImmutableSandboxedEnvironment  # noqa: PLC0415 - as above

    class Generation(Extension):
        """The tag around what an assistant said, which only training needs: its body remains."""

        tags = {"generation"}  # noqa: RUF012 - as Jinja has it

        def parse(self, parser: "Parser") -> Any:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _to_json(
    value: Any,
    ensure_ascii: bool = False,  # noqa: FBT001, FBT002 - a template passes it as it likes
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,  # noqa: FBT001, FBT002 - as above
) -> str:
    """Return JSON as it is; Jinja's own filter makes it safe for HTML."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _raise_exception(message: str) -> NoReturn:
    """Let a template refuse messages."""
    from jinja2 import TemplateError  # noqa: PLC0415 - optional

    raise TemplateError(message)


def _strftime_now(pattern: str) -> str:
    """Return the date or the time; what a template makes of it changes from day to day."""
    return datetime.now().astimezone().strftime(pattern)
