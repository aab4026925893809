"""Errors of the command line that every command may end with."""


class WriteError(Exception):
    """Writing stopped in the middle, at a full disk for example."""

    def __init__(self, name: str, error: OSError) -> None:
        self.name, self.reason = name, error.strerror or str(error)
        super().__init__(f"cannot write {name}: {self.reason}")
