"""The two phases of a sequence: its prompt on one engine, and all that comes after on another.

Rule: an engine knows a phase alone; the sequence learns from its phases what came of it.
"""

from typing import Any

from batcher.planning.simulated_sequence import SimulatedSequence

PROMPT_TOKENS = 1  # of the output: who computes the prompt gives the first


class Phase(SimulatedSequence, eq=False, gc=False, kw_only=True):
    """A part of a sequence, as an engine takes it.

    whole: the sequence.
    """

    whole: SimulatedSequence

    def tell(self) -> None:
        """Let the sequence know what came of it so far."""
        whole = self.whole
        whole.has_failed, whole.num_preemptions = self.has_failed, self.num_preemptions
        whole.admitted_ticks, whole.end_ticks = self.admitted_ticks, self.end_ticks
        whole.first_token_ticks = self.first_token_ticks
        whole.num_cached_at_first = self.num_cached_at_first


def whole_of(sequence: SimulatedSequence) -> SimulatedSequence:
    """Return what a phase is of; of a sequence that is no phase that itself."""
    return sequence.whole if isinstance(sequence, Phase) else sequence


class PromptPhase(Phase, eq=False, gc=False, kw_only=True):
    """The prompt and the first token."""

    @property
    def is_all(self) -> bool:
        """Whether nothing comes after it."""
        return self.whole.num_output_tokens <= PROMPT_TOKENS


class DecodePhase(Phase, eq=False, gc=False, kw_only=True):
    """All that comes after the first token.

    source: the replica that has the prompt.
    """

    source: int


def prompt_phase(whole: SimulatedSequence) -> PromptPhase:
    """Return the first phase of a sequence."""
    most = min(whole.max_tokens, PROMPT_TOKENS)
    return PromptPhase(whole=whole, **(_fields_of(whole) | {"max_tokens": most}))


def decode_phase(whole: SimulatedSequence, source: int, now: float) -> DecodePhase:
    """Return the second phase of a sequence, of which the first has ended at `now`."""
    changed = {
        "arrival_time": now,
        "num_tokens": whole.num_prompt_tokens + PROMPT_TOKENS,
        "has_siblings": False,
    }
    return DecodePhase(whole=whole, source=source, **(_fields_of(whole) | changed))


def _fields_of(whole: SimulatedSequence) -> dict[str, Any]:
    return {name: getattr(whole, name) for name in SimulatedSequence.__struct_fields__}
