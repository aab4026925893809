"""A run as one HTML file, which needs no network: what it holds, packed, and what shows it."""

START = b"<!doctype html>\n<!-- written by batchdecode -->\n"  # how each of these files begins


def is_page_start(content: bytes) -> bool:
    """Return whether a file that begins with `content` is one of these."""
    return content.startswith(START)
