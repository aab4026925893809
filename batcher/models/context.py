"""How many tokens a row of a model may have, and which requests that leaves no room for.

Rule: a prompt and its output together have at most max_context tokens.
"""

import sys
from collections.abc import Mapping, Sequence

from msgspec import Struct

from batcher.errors import Failure
from batcher.foreign import attribute_of
from batcher.models.base import Model, number_of
from batcher.request import MAX_ANSWER, TO_THE_END

UNLIMITED = sys.maxsize
DROP_OLDEST = "drop-oldest"


class Context(Struct, frozen=True):
    """What the rows of a model may be.

    max_context: how many tokens they may have, prompt and output; UNLIMITED without a limit.
    least_prompt: how many tokens a prompt needs to be computed, 0 or 1.
    drops_oldest: whether a conversation that would be longer loses its oldest turns.
    """

    max_context: int = UNLIMITED
    least_prompt: int = 0
    drops_oldest: bool = False

    def holds(self, num_prompt_tokens: int, max_tokens: int) -> bool:
        """Return whether there is room for all that such a request may generate."""
        return self.least_prompt <= num_prompt_tokens <= self.max_context - max_tokens

    def output_limit(self, max_tokens: int, num_prompt_tokens: int) -> int:
        """Return how many tokens a request of so many may generate; of TO_THE_END 1 at least."""
        if max_tokens != TO_THE_END:
            return max_tokens
        if self.max_context == UNLIMITED:
            return MAX_ANSWER
        return max(self.max_context - num_prompt_tokens, 1)

    def num_reserved(self, max_tokens: int) -> int:
        """Return for how many tokens of output a conversation drops turns."""
        return max_tokens if max_tokens != TO_THE_END else self.max_context // 4

    def why_never(
        self, prompts: Mapping[str, int], max_tokens: int, *, is_computed: bool
    ) -> Failure | None:
        """Return why a request can never run, if so.

        prompts: name -> tokens, of all that each of its outputs goes on from.
        is_computed: whether the prompts are, even if max_tokens is 0.
        """
        for name, num_tokens in prompts.items():
            if is_computed and num_tokens < self.least_prompt:
                message = f"the {name} is empty, and this model needs a token to begin with"
                return Failure("empty-prompt", message)
            length = f"the {name} has {num_tokens:,} tokens"
            if num_tokens > self.max_context:
                message = f"{length}, more than the context of {self.max_context:,}"
                return Failure("prompt-too-long", message)
            if max_tokens and num_tokens == self.max_context:
                message = f"{length}, and the context of {self.max_context:,} no room for more"
                return Failure("prompt-too-long", message)
        return None

    def num_dropped(self, turns: Sequence[tuple[int, int]], num_more: int) -> int:
        """Return how many of the oldest `turns` are dropped so that `num_more` tokens have room.

        turns: how many tokens each has, and how many of them stay in any case.
        """
        num_tokens = num_more + sum(num_turn for num_turn, _ in turns)
        for number, (num_turn, num_lasting) in enumerate(turns):
            if num_tokens <= self.max_context:
                return number
            num_tokens -= num_turn - num_lasting
        return len(turns)


ANY_LENGTH = Context()


def context_of(model: Model) -> Context:
    """Return what the rows of `model` may be, as far as it tells; else ANY_LENGTH itself."""
    told = getattr(model, "inner", model)
    context = Context(
        number_of(model, "max_context") or UNLIMITED,
        int(attribute_of(told, "needs_prompt", None) is True),
        attribute_of(told, "session_overflow", None) == DROP_OLDEST,
    )
    return ANY_LENGTH if context == ANY_LENGTH else context
