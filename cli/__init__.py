"""The command line of batchdecode: everything that touches a terminal, a signal or a file."""


def __getattr__(name: str) -> object:
    """Say what the library is called, which is installed as another package."""
    import batcher  # noqa: PLC0415 - for a mistake only

    where = f"batcher.{name}" if name in batcher.__all__ else "import batcher"
    raise AttributeError(
        f"module {__name__!r} has no attribute {name!r}: this is the command line; the library is "
        f"called batcher ({where})"
    )
