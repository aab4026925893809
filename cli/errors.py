"""Errors of the command line that every command may end with.

Rule: what a person can put right raises BatchdecodeError, or a kind of it such as InputError or
OutputError, and its message ends the command.  What writes raises WriteError where its file or
stdout takes no more, and BrokenPipeError where the reader has gone.
"""


def reason_of(error: Exception) -> str:
    """Return what went wrong with a file, without Python's decoration."""
    return getattr(error, "strerror", None) or str(error)


class WriteError(Exception):
    """Writing stopped in the middle, at a full disk for example."""

    def __init__(self, name: str, error: OSError) -> None:
        self.name, self.reason = name, reason_of(error)
        super().__init__(f"cannot write {name}: {self.reason}")
