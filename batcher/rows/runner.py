"""The batch and the model: which rows a step computes, with which tokens, and what comes back."""

from weakref import WeakValueDictionary

from batcher.errors import BatchdecodeError, ModelError
from batcher.models.base import Batch, Chunk, Model
from batcher.request import FinishReason
from batcher.rows.decoder import Decoded, Decoder
from batcher.rows.generated import Generated
from batcher.sequence import Sequence

# Who has a model, by the model's id, which is its own as long as the runner lives.
_RUNNERS: "WeakValueDictionary[int, ModelRunner]" = WeakValueDictionary()


class ModelRunner:
    """Has a model compute rows; takes the model from the runner that had it, as it has one cache.

    A leader and its companions start and stop together; none of them is known from an earlier run.
    """

    def __init__(self, model: Model, num_slots: int, *, is_streaming: bool) -> None:
        self.decoder = Decoder(model, num_slots, is_streaming=is_streaming)
        self._model = model
        self._is_robbed = False
        self._batch = Batch(num_slots)
        holder = getattr(model, "inner", model)  # a check around it is made anew
        previous = _RUNNERS.get(id(holder))
        if previous is not None:
            previous._is_robbed = True  # noqa: SLF001 - of the same class
        _RUNNERS[id(holder)] = self
        model.allocate(num_slots)

    def start(self, leader: Sequence) -> int:
        """Let the next step compute the prompts of `leader` and its companions.

        Beams wait for the first fork.  Returns how many tokens are the row's from the outset,
        because nothing else is allowed there.
        """
        forced = self.decoder.open(leader)
        if not forced:
            self._batch.join(Chunk(leader.slot, leader.prompt_tokens, 0))
        else:
            self._batch.join(Chunk(leader.slot, leader.prompt_tokens + forced, 0))
        for companion in leader.companions:
            if companion.role == "negative":
                self._batch.join(Chunk(companion.slot, companion.prompt_tokens + forced, 0))
        return len(forced)

    def step(self, step: int) -> Decoded:
        """Compute one token for every row; return what that means for them.

        step: its number.

        Raises:
            BatchdecodeError: another runner has taken the model.
        """
        if self._is_robbed:
            raise BatchdecodeError("another engine has taken the model, which has only one cache")
        batch, decoder = self._batch, self.decoder
        batch.logit_slots = decoder.logit_slots
        try:
            output = self._model.forward(batch)
        except ModelError as error:
            batch.chunks = []
            return decoder.fail(dict.fromkeys(batch.slots.tolist(), str(error)))
        if batch.chunks:
            batch.chunks = []
        batch.tokens = output.tokens
        return decoder.decode(output, step)

    def go_on_with(self, leader: Sequence, tokens: list[int], num_generated: int) -> None:
        """Let the next step compute all `tokens` a row was given at once.

        num_generated: how many it has by now, these included.
        """
        for row in (leader, *leader.companions):
            start = len(row.prompt_tokens) + num_generated - len(tokens)
            self._batch.chunks.append(Chunk(row.slot, tokens, start))

    def fork(self, source: int, target: int) -> None:
        """Let the row in `target` go on from what the model holds for the one in `source`."""
        self._model.fork(source, target)
        self._batch.enter(target)

    def stop(self, leader: Sequence, num_tokens: int, reason: FinishReason) -> list[Generated]:
        """Compute `leader` and its companions no longer; return its output, or those of its beams.

        num_tokens: how many of the row's tokens are its output; beams know that themselves.
        """
        slot = leader.slot
        if leader.role == "beam":
            outputs = self.decoder.close_beams(slot, reason)
        else:
            outputs = [self.decoder.close(slot, num_tokens, reason)]
        self._batch.leave(slot)
        self._model.release(slot)
        for companion in leader.companions:
            if self._batch.holds(companion.slot):  # not a beam before the first fork
                self._batch.leave(companion.slot)
                self._model.release(companion.slot)
        return outputs
