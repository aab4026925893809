"""The rows of one request's beams: where each of them is, and which have been computed."""

from collections.abc import Callable

import numpy as np

from batcher.decoding.beams import BeamSearch, BeamStep
from batcher.engine.decoded import Generated
from batcher.engine.sequence import Sequence
from batcher.errors import Failure
from batcher.models.base import FloatArray
from batcher.result import NUM_DIGITS, FinishReason


class BeamRows:
    """The beam search of a request, and its rows; beam i is the i-th sequence, its slot slots[i].

    Until the first step only the first row is computed: all beams begin with the same prompt.
    """

    def __init__(self, first: Sequence) -> None:
        request = first.request
        self.sequences = [*first.group]
        self.slots = [sequence.slot for sequence in self.sequences]
        self._num_results, self._num_computed = request.n, 1
        self._search = BeamSearch(
            num_beams=request.num_beams,
            num_results=request.n,
            length_penalty=request.length_penalty,
            early_stopping=request.early_stopping,
            max_tokens=request.max_tokens,
            num_eos=0 if request.ignore_eos else 1,
        )

    @property
    def failure(self) -> Failure | None:
        """Why the search had to give up, if it had."""
        if not self._search.has_failed:
            return None
        return Failure("constraint-error", "no token is left that any beam may go on with")

    def tokens(self) -> list[list[int]]:
        """Return the tokens of every row that has been computed, in the order of `sequences`."""
        return self._search.running_tokens()

    def tokens_in(self, slot: int) -> list[int]:
        """Return the tokens of the row in `slot`, none if it has not been computed."""
        return dict(zip(self.slots, self.tokens(), strict=False)).get(slot, [])

    def move(self) -> None:
        """Look for the rows in the slots that the sequences have by now."""
        self.slots = [sequence.slot for sequence in self.sequences]

    def advance(
        self, scores: dict[int, FloatArray], ends: Callable[[int, int], bool]
    ) -> BeamStep | None:
        """Return how every beam goes on, None if the search is done.

        scores: slot -> [vocab] log-probabilities.  ends: of (slot, token), whether that ends it.
        """
        log_probs = np.stack([scores[slot] for slot in self.slots[: self._num_computed]])
        self._num_computed = len(self.slots)
        return self._search.advance(log_probs, lambda beam, token: ends(self.slots[beam], token))

    def results(self, reason: FinishReason) -> list[Generated]:
        """Return as many outputs as were asked for, best first.

        reason: why the search has ended.
        """
        is_done = reason in {"stop", "length"}
        cut = "length" if is_done else reason
        found = [
            Generated(
                beam.tokens,
                "stop" if beam.has_ended else cut,
                score=None if reason == "error" else round(beam.score, NUM_DIGITS),
            )
            for beam in self._search.results()
        ]
        message = f"beam search found {len(found)} outputs, not {self._num_results}"
        failure = Failure("too-few-outputs", message) if is_done else None
        missing = Generated([], cut, failure=failure)
        return found + [missing] * (self._num_results - len(found))
