"""What blocks of the KV cache are found by: the bytes of their tokens.

Rule: what is still to be drawn of a long prompt is drawn for the blocks that are asked for, and not
kept, so that a request which waits takes no more memory after somebody has looked for its prompt.
"""

from array import array
from collections.abc import Iterator

from batcher.prompts import Prompt
from batcher.tokens import MANY, Tokens, packed, typecode_of


def block_contents(
    prompt: Prompt, output: Tokens, start: int, stop: int, size: int, vocab_size: int | None
) -> Iterator[bytes]:
    """Yield the tokens start..stop of a prompt and what follows it, `size` by `size`.

    output: of what follows the prompt, the tokens that are among them.
    """
    num_prompt = prompt.num_tokens
    if stop <= num_prompt <= MANY:
        tokens, typecode = prompt.tokens, typecode_of(vocab_size)
        for at in range(start, stop, size):
            yield array(typecode, tokens[at : min(at + size, stop)]).tobytes()
        return
    first = max(start, num_prompt)  # the place of the first token of `output`
    at, width = start, size
    while at < stop:
        end = min(at + width, stop)
        parts = [prompt.read(at, end)] if at < num_prompt else []
        if end > num_prompt:
            parts.append(output[max(at - first, 0) : end - first])
        whole = packed(parts, vocab_size)
        content, num_bytes = whole.tobytes(), size * whole.itemsize
        for place in range(0, len(content), num_bytes):
            yield content[place : place + num_bytes]
        at = end
        if width < MANY:
            width *= 2  # most look at no more than the first
