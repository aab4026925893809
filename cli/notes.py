"""What is said of options that may not be meant as they are written: memory and latency limits."""

from collections.abc import Iterable, Sequence

from batcher.metrics.slo import doubtful_limits
from batcher.settings import SchedulingSettings
from batcher.timing.profiles import kv_room_of

from .options import WALL
from .run.problems import say
from .screen.terminal import printable


def say_of_memory(engines: Iterable[tuple[str, SchedulingSettings]]) -> None:
    """Say once where memory has no limit, though the GPU of a profile has one.

    engines: a profile and its settings.
    """
    notes = (_note(*engine) for engine in engines)
    for note in dict.fromkeys(filter(None, notes)):
        say(f"{printable(note)}\n")


def _note(profile: str, settings: SchedulingSettings) -> str | None:
    """Return what is to be said of the memory of a profile, None if nothing is."""
    room = None if profile == WALL else kv_room_of(profile)
    if room is None:
        return None
    if room.num_tokens == 0:
        return f"the weights do not fit into the GPU of {profile}"
    if settings.kv_blocks is not None:
        return None
    count = f"{room.num_tokens:,} tokens"
    known = count if room.is_reported else f"about {count} by its data sheet"
    num_blocks = room.num_blocks(settings.block_size)
    option = f": --kv-blocks {num_blocks}" if num_blocks else ""
    return f"KV is unlimited; the GPU of {profile} has room for {known}{option}"


def say_of_slo(texts: Sequence[str]) -> None:
    """Say which limits are that many seconds, in a run whose steps take as long as real ones."""
    for remark in doubtful_limits(texts):
        say(f"--slo: {remark}\n")
