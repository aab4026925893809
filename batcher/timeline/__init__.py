"""What happened in a run, from its events alone: one fold of them, and the timeline it gives."""

from batcher.timeline.timeline import EVERYTHING, Selection, Timeline

__all__ = ["EVERYTHING", "Selection", "Timeline"]
