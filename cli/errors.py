"""Errors of the command line that every command may end with."""


def reason_of(error: Exception) -> str:
    """Return what went wrong with a file, without Python's decoration."""
    return getattr(error, "strerror", None) or str(error)


class WriteError(Exception):
    """Writing stopped in the middle, at a full disk for example."""

    def __init__(self, name: str, error: OSError) -> None:
        self.name, self.reason = name, reason_of(error)
        super().__init__(f"cannot write {name}: {self.reason}")
