"""Text in terminal cells: how wide it is, made safe to print, cut to a width."""


def printable(text: str, *, ascii_only: bool = False) -> str:
    r"""Return `text` with `\x1b` and the like for all that moves the cursor or reorders a line."""
    if text.isprintable() and (text.isascii() or not ascii_only):
        return text
    return "".join(
        char
        if char.isprintable() and (char.isascii() or not ascii_only)
        else char.encode("unicode_escape").decode("ascii")
        for char in text
    )


def printable_lines(text: str) -> str:
    """Return `text`, one line or more, with every line made printable."""
    return "\n".join(map(printable, text.split("\n")))


def cell_width(text: str) -> int:
    """Return how many cells `text` takes; wide characters take two."""
    if text.isascii():
        return len(text)
    from rich.cells import cell_len  # noqa: PLC0415 - start-up time, and most text is ASCII

    return cell_len(text)


def cut_middle(text: str, width: int, mark: str) -> str:
    """Return at most `width` >= 1 cells of `text`: both its ends, with `mark` between them."""
    if cell_width(text) <= width:
        return text
    head_width = width // 2
    tail_width = width - 1 - head_width
    head, tail = text[:head_width], text[len(text) - tail_width :]
    while cell_width(head) > head_width:
        head = head[:-1]
    while cell_width(tail) > tail_width:
        tail = tail[1:]
    return head + mark + tail


def pad(text: str, width: int) -> str:
    """Return `text` filled up with spaces to `width` cells."""
    return text + " " * (width - cell_width(text))
