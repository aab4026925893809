"""Which sequence held which slot when, and who waited for what, rebuilt from events alone."""

from batcher.timeline.timeline import EVERYTHING, Selection, Timeline

__all__ = ["EVERYTHING", "Selection", "Timeline"]
