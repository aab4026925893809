"""The entry under the name that scripts installed before have: `batchdecode.main`."""

from .main import main

__all__ = ["main"]
