"""Blocks for sequences whose prompts come computed, with their keys and values."""

from batcher.scheduling.counted_blocks import CountedBlocks
from batcher.scheduling.sequence import S


class ReservedBlocks(CountedBlocks[S]):
    """Blocks that sequences have before they are admitted, and what came from elsewhere."""

    def reserve(self, sequence: S) -> bool:
        """Set aside what a sequence will ever hold; return whether there was room for it."""
        if not self.has_room(self.num_blocks(sequence.most_tokens)):
            return False
        self.extend(sequence, sequence.most_tokens)
        return True

    def admit(
        self,
        sequence: S,
        stop: int,
        max_tokens: int,
        *,
        is_alone: bool,  # noqa: ARG002 - others leave room for those that run
    ) -> int:
        """Let a sequence go on behind what came: see KVCache; there is room for it."""
        num_there = sequence.num_prompt_tokens
        sequence.num_cached_tokens = num_there
        sequence.num_computed_tokens = max(min(stop, num_there + max_tokens), num_there)
        return 0
