"""Which requests are in the engine, what of each has not ended, and the results that are due."""

from collections.abc import Collection

from batcher.request import Request
from batcher.result import Result
from batcher.sequence import Sequence


class Roster:
    """The requests that have not ended, by id.

    num_requests: how many have ever been entered.
    """

    __slots__ = ("_candidates", "_num_open", "_results", "num_requests")

    def __init__(self) -> None:
        self.num_requests = 0
        self._num_open: dict[str, int] = {}  # how many sequences have not, companions not counted
        self._candidates: dict[str, list[Result]] = {}  # of requests that want their best samples
        self._results: list[Result] = []

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._num_open

    def __bool__(self) -> bool:
        return bool(self._num_open)

    def enter(self, request: Request, request_id: str, num_sequences: int) -> None:
        """Take in a request for which so many sequences wait for a slot."""
        self._num_open[request_id] = num_sequences
        if (request.best_of or 1) > 1:
            self._candidates[request_id] = []
        self.num_requests += 1

    def give(self, sequence: Sequence, result: Result) -> None:
        """Take in a result, which may have to compete with those of the other samples."""
        self._candidates.get(sequence.id, self._results).append(result)

    def strike(self, sequence: Sequence) -> Collection[Result]:
        """Count a sequence that has ended, and forget its request with the last of them.

        Returns the results of those samples that are not among the best; they are not handed out.
        """
        request_id = sequence.id
        num_open = self._num_open[request_id]
        if num_open > 1:
            self._num_open[request_id] = num_open - 1
            return ()
        del self._num_open[request_id]
        if not self._candidates:
            return ()
        candidates = sorted(self._candidates.pop(request_id, ()), key=_rank)
        self._results += candidates[: sequence.request.n]
        return candidates[sequence.request.n :]

    def take_results(self) -> list[Result]:
        """Return the results since the last call."""
        results, self._results = self._results, []
        return results


def _rank(result: Result) -> tuple[bool, float, int]:
    """Return what sorts samples: the likeliest first, those that failed or were aborted last."""
    is_whole = result.finish_reason in {"stop", "length"}
    return not is_whole, -(result.cumulative_logprob or 0.0), result.index
