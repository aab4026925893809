"""The texts of a file as tokens: a plain text, or what lines of JSON hold."""

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from batcher.errors import BatchdecodeError
from batcher.models.base import Tokenizer
from batcher.request import MAX_INT
from batcher.tokens import Tokens, packed
from batcher.transformer.files import about

MAX_BYTES = 2**24
MAX_TOKENS = 2**23
_PART = 2**16  # characters that are encoded together, as far as lines go
_FIELDS = "tokens, text or prompt"
_TokenId = Annotated[int, Meta(ge=0, le=MAX_INT)]


class _Line(Struct):
    """What a line may hold: a result, a request, or a text; the first that it has counts."""

    tokens: list[_TokenId] | None = None
    text: str | None = None
    prompt: str | list[_TokenId] | None = None

    @property
    def content(self) -> list[int] | str | None:
        """The tokens, or the text to make them of; None if there is neither."""
        given = (self.tokens, self.text, self.prompt)
        return next((content for content in given if content is not None), None)


def read_texts(path: str, tokenizer: Tokenizer, vocab_size: int | None) -> list[Tokens]:
    """Return the tokens of the texts in a file that have any.

    A file called .jsonl has one in each line that is not blank: the `tokens` of an object, its
    `text` or its `prompt`.  Any other file is one text.

    Raises:
        BatchdecodeError: there is no such file, no token in it, or too many; it is too large, not
        UTF-8, or a line holds nothing of this kind.
    """
    texts, num_tokens = list[Tokens](), 0
    tokens: Tokens
    with about(path):
        for content, number in _contents(_read(Path(path)), is_json=path.endswith(".jsonl")):
            if isinstance(content, str):
                tokens = _encoded(content, tokenizer, vocab_size)
            else:
                tokens = content
            largest = max(tokens, default=0)
            if vocab_size is not None and largest >= vocab_size:
                raise BatchdecodeError(
                    f"line {number}: token {largest} is none of the model, which has {vocab_size}"
                )
            num_tokens += len(tokens)
            if num_tokens > MAX_TOKENS:
                raise BatchdecodeError(f"more than {MAX_TOKENS:,} tokens to look drafts up in")
            texts += [tokens] if tokens else []
        if not texts:
            raise BatchdecodeError("there is no text in it to look drafts up in")
    return texts


def _read(path: Path) -> str:
    """Return the text of a file, or raise an error for `about`."""
    if not path.is_file():
        raise BatchdecodeError("there is no such file")
    with path.open("rb") as file:
        content = file.read(MAX_BYTES + 1)
    if len(content) > MAX_BYTES:
        raise BatchdecodeError(f"more than {MAX_BYTES:,} bytes to look drafts up in")
    return content.decode()


def _contents(text: str, *, is_json: bool) -> Iterator[tuple[list[int] | str, int]]:
    """Yield the texts, or the tokens of them, and the lines that they begin in.

    Raises:
        BatchdecodeError: a line of JSON holds none.
    """
    if not is_json:
        yield text, 1
        return
    decoder = msgspec.json.Decoder(_Line)
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        try:
            content = decoder.decode(line).content
        except msgspec.MsgspecError as error:
            raise BatchdecodeError(f"line {number}: {error}") from None
        if content is None:
            raise BatchdecodeError(f"line {number}: there is no {_FIELDS} in it")
        yield content, number


def _encoded(text: str, tokenizer: Tokenizer, vocab_size: int | None) -> Tokens:
    """Return the tokens of `text`, of which lines that are far apart are encoded apart."""
    return packed(map(tokenizer.encode, _parts(text)), vocab_size)


def _parts(text: str) -> Iterator[str]:
    begin = 0
    while begin < len(text):
        end = begin + _PART
        if end < len(text):
            end = text.rfind("\n", begin, end) + 1 or end
        yield text[begin:end]
        begin = end
