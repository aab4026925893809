"""Which requests are in the engine, what of each has not ended, and the results that are due."""

from batcher.request import Request, Result
from batcher.sequence import Sequence


class Roster:
    """The requests that have not ended, by id; of each, the sequences that have not.

    num_requests: how many have ever been entered.
    """

    __slots__ = ("_candidates", "_open", "_results", "num_requests")

    def __init__(self) -> None:
        self.num_requests = 0
        self._open: dict[str, list[Sequence]] = {}
        self._candidates: dict[str, list[Result]] = {}  # of requests that want their best samples
        self._results: list[Result] = []

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._open

    def __bool__(self) -> bool:
        return bool(self._open)

    def enter(self, request: Request, request_id: str, sequences: list[Sequence]) -> None:
        """Take in a request with what waits for a slot on its behalf."""
        self._open[request_id] = sequences
        if len(sequences) > request.n:
            self._candidates[request_id] = []
        self.num_requests += 1

    def sequences(self, request_id: str) -> list[Sequence]:
        """Return what has not ended of a request, without companions."""
        return self._open[request_id].copy()

    def give(self, sequence: Sequence, result: Result) -> None:
        """Take in a result, which may have to compete with those of the other samples."""
        candidates = self._candidates.get(sequence.id)
        (self._results if candidates is None else candidates).append(result)

    def strike(self, sequence: Sequence) -> list[Result]:
        """Forget a sequence that has ended, and its request with the last of them.

        Returns the results of those samples that are not among the best; they are not handed out.
        """
        rest = self._open[sequence.id]
        rest.remove(sequence)
        if not rest:
            del self._open[sequence.id]
            candidates = self._candidates.pop(sequence.id, None)
            if candidates is not None:
                candidates.sort(key=_rank)
                self._results += candidates[: sequence.request.n]
                return candidates[sequence.request.n :]
        return []

    def take_results(self) -> list[Result]:
        """Return the results since the last call."""
        results, self._results = self._results, []
        return results


def _rank(result: Result) -> tuple[bool, float, int]:
    """Return what sorts samples: the likeliest first, those that failed or were aborted last."""
    is_whole = result.finish_reason in {"stop", "length"}
    return not is_whole, -(result.cumulative_logprob or 0.0), result.index
