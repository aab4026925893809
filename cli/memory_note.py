"""What is said where memory is taken to be without limit, though the GPU of a profile has some."""

from collections.abc import Iterable

from batcher.settings import SchedulingSettings
from batcher.timing.loading import kv_room_of

from .options import WALL
from .running.problems import say
from .screen.cells import printable


def say_of_memory(engines: Iterable[tuple[str, SchedulingSettings, int]]) -> None:
    """Say so, each thing once, of profiles, their settings, and how many ranks share experts."""
    notes = (_note(*engine) for engine in engines)
    for note in dict.fromkeys(filter(None, notes)):
        say(f"{printable(note)}\n")


def _note(profile: str, settings: SchedulingSettings, num_ranks: int) -> str | None:
    """Return what is to be said of the memory of a profile, None if nothing is."""
    room = None if profile == WALL else kv_room_of(profile, num_ranks)
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
