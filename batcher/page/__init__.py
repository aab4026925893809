"""A run as one HTML file that needs no network."""

START = b"<!doctype html>\n<!-- written by batchdecode -->\n"


def is_page_start(content: bytes) -> bool:
    """Return whether `content` is the start of a page."""
    return content.startswith(START)
