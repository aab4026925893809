"""What rows that are processed together have in common."""

from msgspec import Struct

from batcher.request import REQUEST_FIELDS, SAMPLING_FIELDS, PromptInput, Request

# The numbers that choose tokens; those that need no logits only say how one is drawn.
_NUMBERS = {
    name: REQUEST_FIELDS[name]
    for name in SAMPLING_FIELDS
    if REQUEST_FIELDS[name].range is not None and name != "seed"
}


class SamplingParams(Request, frozen=True, kw_only=True, eq=True, cache_hash=True):
    """A request reduced to what chooses its tokens; rows with equal ones form a group.

    What has no effect stands at its default, so that rows of requests that differ in nothing else
    are equal.  Whether a row has a negative prompt's row beside it is told by cfg_scale alone.
    logit_bias: (token id, what is added), ids ascending; allowed_token_ids are, too.
    """

    prompt: PromptInput = ""
    logit_bias: tuple[tuple[int, float], ...] = ()  # type: ignore[assignment]  # to be hashed
    allowed_token_ids: tuple[int, ...] | None = None  # type: ignore[assignment]  # to be hashed
    bad_words: tuple[str, ...] = ()  # type: ignore[assignment]  # to be hashed
    num_logprobs: int | None = None  # None: none at all; 0: of the chosen token only
    has_processed_logprobs: bool = False
    needs_cumulative: bool = False  # whether the sum of the raw log-probabilities is kept

    __eq__ = Struct.__eq__
    __hash__ = Struct.__hash__

    @property
    def is_greedy(self) -> bool:
        """Whether the most likely token is chosen, after what may change which that is."""
        return self.temperature == 0

    @property
    def has_penalties(self) -> bool:
        """Whether tokens count that the row has already."""
        penalties = (self.repetition_penalty, self.frequency_penalty, self.presence_penalty)
        return penalties != (1, 0, 0)

    @property
    def needs_raw(self) -> bool:
        """Whether log-probabilities of the model's own logits are wanted."""
        has_raw = self.num_logprobs is not None and not self.has_processed_logprobs
        return has_raw or self.needs_cumulative


def needs_cumulative(request: Request) -> bool:
    """Return whether the log-probability of the whole output is told, or ranks it."""
    return request.logprobs is not None or (request.best_of or 1) > 1


def sampling_params(request: Request) -> SamplingParams:
    """Return the settings of a valid `request`."""
    values = {name: getattr(request, name) for name in _NUMBERS}
    fields = {
        name: value
        for name, value in values.items()
        if _NUMBERS[name].asks(value) and (request.temperature > 0 or _NUMBERS[name].needs_logits)
    }
    if request.allowed_token_ids is not None:
        fields["allowed_token_ids"] = tuple(sorted(set(request.allowed_token_ids)))
    if request.logprobs is not None:
        fields["has_processed_logprobs"] = request.logprobs_mode == "processed"
    bias = sorted((int(token_id), value) for token_id, value in (request.logit_bias or {}).items())
    return SamplingParams(
        logit_bias=tuple(bias),
        bad_words=tuple(request.bad_words or ()),
        num_logprobs=request.logprobs,
        needs_cumulative=needs_cumulative(request),
        **fields,
    )
