"""How long a step takes, as a function of what it computes.

Rule: time is counted in whole ticks of a femtosecond, so that the sum over many steps in closed
form is exactly the sum of them one by one.
"""

from typing import Any, Protocol

TICKS_PER_SECOND = 10**15


class StepTime(Protocol):
    """The duration of a step, in ticks.

    num_tokens: all tokens the step computes.  num_sequences: the rows it computes.
    kv_read: the tokens before it that each decoding row reads, summed up; a decoding row computes
    one token after the first that it generated.
    prefill_work: the sum of P * (2 * context + P) over the rows that compute P tokens of a prompt
    after `context` others; 0 in a step that only decodes.
    """

    @property
    def name(self) -> str:
        """What it is called: "constant", the name of a profile, ..."""

    @property
    def settings(self) -> dict[str, Any]:
        """What beside the name reproduces it, ready for JSON."""

    def ticks(self, num_tokens: int, num_sequences: int, kv_read: int, prefill_work: int) -> int:
        """Return how long a step takes: at least one tick."""

    def ticks_of_decodes(self, num_sequences: int, kv_read: int, num_steps: int) -> int:
        """Return the sum over `num_steps` steps in which so many rows decode, and nothing else.

        kv_read: that of the first of them; each step adds num_sequences to it.
        """

    def num_decodes_until(self, num_sequences: int, kv_read: int, ticks: int) -> int:
        """Return the least number of such steps that take `ticks` (at least one tick) together."""
