"""The tokenizer of models that bring none: bytes."""

from array import array
from collections.abc import Sequence


class ByteTokenizer:
    """Ids 0 to 255 are the bytes of UTF-8; larger ids show as U+FFFD."""

    def __init__(self) -> None:
        self.token_bytes: Sequence[bytes] = [bytes([byte]) for byte in range(256)]

    def encode(self, text: str) -> list[int]:
        """Return the bytes of `text`."""
        return list(text.encode())

    def encode_array(self, text: str) -> "array[int]":
        """Return the same as an array."""
        return array("B", text.encode())
