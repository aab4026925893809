"""What happened in a run, from its events alone: one fold of them, and the timeline it gives."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from batcher.timeline.timeline import EVERYTHING, Selection, Timeline

__all__ = ["EVERYTHING", "Selection", "Timeline"]


def __getattr__(name: str) -> Any:
    """Return what is asked for: a run needs the fold alone, and starts sooner."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from batcher.timeline import timeline  # noqa: PLC0415 - see above

    return getattr(timeline, name)
