"""What rows that are processed together have in common."""

from msgspec import Struct

from batcher.request import Request


class SamplingParams(Struct, frozen=True, cache_hash=True, kw_only=True):
    """The settings by which a row's tokens are chosen; rows with equal ones form a group.

    What has no effect stands at its default, so that rows of requests that differ in nothing else
    are equal.  Whether a row has a negative prompt's row beside it is told by cfg_scale alone.
    """

    temperature: float = 0.0  # 0 is greedy
    top_k: int = 0  # 0 is all
    top_p: float = 1.0
    min_p: float = 0.0
    typical_p: float = 1.0
    mirostat: int = 0  # 0 is off, else the version
    mirostat_tau: float = 0.0  # bits
    mirostat_eta: float = 0.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()  # (token id, what is added), ids ascending
    allowed_token_ids: tuple[int, ...] | None = None  # ascending
    bad_words: tuple[str, ...] = ()
    min_tokens: int = 0
    cfg_scale: float = 1.0
    num_logprobs: int | None = None  # None: none at all; 0: of the chosen token only
    has_processed_logprobs: bool = False
    needs_cumulative: bool = False  # whether the sum of the raw log-probabilities is kept

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
    fields: dict[str, object] = {}
    if request.temperature > 0:
        names: tuple[str, ...] = ("temperature", "top_k", "top_p", "min_p", "typical_p")
        if request.mirostat:
            names = ("temperature", "mirostat", "mirostat_tau", "mirostat_eta")
        fields |= {name: getattr(request, name) for name in names}
        if request.top_k < 0:  # as vLLM writes all
            fields.pop("top_k", None)
    if request.allowed_token_ids is not None:
        fields["allowed_token_ids"] = tuple(sorted(set(request.allowed_token_ids)))
    if request.logprobs is not None:
        fields["has_processed_logprobs"] = request.logprobs_mode == "processed"
    bias = sorted((int(token_id), value) for token_id, value in (request.logit_bias or {}).items())
    return SamplingParams(
        repetition_penalty=request.repetition_penalty,
        frequency_penalty=request.frequency_penalty,
        presence_penalty=request.presence_penalty,
        logit_bias=tuple(bias),
        bad_words=tuple(request.bad_words or ()),
        min_tokens=request.min_tokens,
        cfg_scale=request.cfg_scale,
        num_logprobs=request.logprobs,
        needs_cumulative=needs_cumulative(request),
        **fields,  # type: ignore[arg-type]  # the values are those of Request's fields
    )
