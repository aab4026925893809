"""Models of your own: run one with `batchdecode run requests.jsonl --model my_model:parrot`.

A `model_next` gets the token ids of every running sequence, prompt and output so far, and returns
the next token of each.  Without a tokenizer of its own, tokens are the bytes of UTF-8.
"""


def parrot(batch_prefixes: list[list[int]]) -> list[int]:
    """Repeat the last eight bytes for ever."""
    return [prefix[-8] if len(prefix) >= 8 else ord(".") for prefix in batch_prefixes]


class Reciter:
    """Goes on with a text it knows by heart, from where the last three bytes stand in it."""

    vocab_size = 256
    eos_token_id = ord(".")
    text = b"The cat sat on the mat, and the rat ran past the cat and hid in a hat."

    def __init__(self) -> None:
        self.following = {self.text[i : i + 3]: self.text[i + 3] for i in range(len(self.text) - 3)}

    def __call__(self, batch_prefixes: list[list[int]]) -> list[int]:
        """Return the byte that follows each sequence's last three; EOS if it is not in the text."""
        return [self.following.get(bytes(prefix[-3:]), ord(".")) for prefix in batch_prefixes]


def moody(batch_prefixes: list[list[int]]) -> list[int]:
    """Fail once a sequence is long, to show what a failing model does to a run."""
    if max(len(prefix) for prefix in batch_prefixes) > 60:
        raise RuntimeError("I am tired")
    return parrot(batch_prefixes)
