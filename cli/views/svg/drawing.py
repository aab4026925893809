"""An SVG as it grows, and the style of all that is drawn in it.

Rule: what is drawn has a class and never a colour of its own, so that one style sheet suits light
and dark pages; readers that know no `prefers-color-scheme` show the light one, on its own ground.
"""

from dataclasses import dataclass
from xml.etree import ElementTree as ET

from ...screen.terminal import cell_width

SMALL, NORMAL = 11, 13
"""Sizes of text, in pixels."""
CELL_WIDTH = 6.8
"""Of a small text, a bit more than most monospaced fonts take; in pixels."""

_LIGHT = {
    "ground": "fill:#ffffff",
    "text": "fill:#1f2328",
    "quiet": "fill:#59636e",
    "grid": "stroke:#d1d9e0",
    "link": "fill:#d1d9e0",
    "decode": "fill:#9ec9f5",
    "prefill": "fill:#f0b429",
    "stripe": "stroke:#8a5a00",
    "failed": "fill:#f8c9c5;stroke:#c62828",
    "cross": "stroke:#b3151c",
    "torn": "stroke:#8e24aa",
    "ring": "stroke:#1f2328",
    "restart": "stroke:#b3151c",
    "begin": "stroke:#1b6ac9",
    "queue": "fill:#c0a5e4",
    "blocks": "fill:#8fc7a5",
}
_DARK = {
    "ground": "fill:#0d1117",
    "text": "fill:#f0f6fc",
    "quiet": "fill:#9198a1",
    "grid": "stroke:#2f3742",
    "link": "fill:#2f3742",
    "decode": "fill:#1f5a9e",
    "prefill": "fill:#8f6410",
    "stripe": "stroke:#f0b429",
    "failed": "fill:#5c1a1b;stroke:#ff7b72",
    "cross": "stroke:#ff7b72",
    "torn": "stroke:#e58fff",
    "ring": "stroke:#f0f6fc",
    "restart": "stroke:#ff7b72",
    "begin": "stroke:#79b8ff",
    "queue": "fill:#6e4fa3",
    "blocks": "fill:#2f7d4f",
}
_ALWAYS = {
    "text": f"font:{SMALL}px sans-serif",
    "quiet": f"font:{SMALL}px sans-serif",
    "title": f"font-size:{NORMAL}px;font-weight:bold",
    "label": f"font:{SMALL}px monospace",
    "right": "text-anchor:end",
    "middle": "text-anchor:middle",
    "striped": "fill:url(#prefill)",
    "stripe": "stroke-width:2",
    "failed": "stroke-dasharray:3 2",
    "cross": "fill:none;stroke-width:2",
    "torn": "fill:none;stroke-width:2",
    "ring": "fill:none;stroke-width:1.5",
    "restart": "stroke-dasharray:4 3",
    "begin": "stroke-width:1.5",
    "other": "opacity:.3",
}
ROOT_CLASS = "batchdecode-gantt"
Number = float | str


@dataclass(frozen=True)
class Row:
    """Where a row is: its upper edge and its height, in pixels."""

    top: float
    height: float

    @property
    def bottom(self) -> float:
        """Its lower edge."""
        return self.top + self.height

    @property
    def base_line(self) -> float:
        """Where a small text in its middle stands."""
        return self.top + self.height / 2 + 4


class Drawing:
    """An SVG of a certain width in pixels, which is as high as what is drawn needs."""

    def __init__(self, width: int) -> None:
        self.width = width
        self._root = ET.Element("svg", xmlns="http://www.w3.org/2000/svg")
        self._root.set("class", ROOT_CLASS)
        self._parents = [self._root]

    def add(self, tag: str, style: str = "", text: str = "", /, **numbers: Number) -> None:
        """Draw an element of the classes `style`; numbers: its attributes, those of places in px.

        An underscore in a name is a hyphen.
        """
        element = ET.SubElement(self._parents[-1], tag)
        if style:
            element.set("class", style)
        for name, number in numbers.items():
            element.set(name.replace("_", "-"), number if isinstance(number, str) else px(number))
        element.text = text or None

    def open(self, tag: str, style: str = "", /, **numbers: Number) -> None:
        """Draw an element that holds all that is drawn up to `close`."""
        self.add(tag, style, **numbers)
        self._parents.append(self._parents[-1][-1])

    def close(self) -> None:
        """End the element that was opened last."""
        self._parents.pop()

    def text(self, style: str, x: float, y: float, text: str) -> None:
        """Write `text` with its base line at `y`."""
        self.add("text", style, text, x=x, y=y)

    def encode(self, height: float, title: str) -> bytes:
        """Return the file; title: what those hear who do not see it."""
        root = self._root
        for name, value in {
            "role": "img",
            "aria-label": title,
            "width": px(self.width),
            "height": px(height),
            "viewBox": f"0 0 {px(self.width)} {px(height)}",
        }.items():
            root.set(name, value)
        ET.indent(root, "")  # an element a line
        return f"{ET.tostring(root, encoding='unicode')}\n".encode()


def begin_drawing(width: int) -> Drawing:
    """Return a drawing that has its style and its ground, and nothing on it."""
    drawing = Drawing(width)
    drawing.add("style", "", _style_sheet())
    drawing.open(
        "pattern",
        id="prefill",
        width=5,
        height=5,
        patternUnits="userSpaceOnUse",
        patternTransform="rotate(45)",
    )
    drawing.add("rect", "prefill", width=5, height=5)
    drawing.add("path", "stripe", d="M0 0V5")
    drawing.close()
    drawing.add("rect", "ground", width="100%", height="100%")
    return drawing


def _style_sheet() -> str:
    """Return the style of all classes, within this picture: its file may become part of a page."""
    dark = "".join(f"\n  .{ROOT_CLASS} .{name}{{{look}}}" for name, look in _DARK.items())
    both = [(name, look) for looks in (_LIGHT, _ALWAYS) for name, look in looks.items()]
    light = "\n".join(f".{ROOT_CLASS} .{name}{{{look}}}" for name, look in both)
    return f"\n{light}\n@media (prefers-color-scheme:dark){{{dark}\n}}\n"


def px(number: float) -> str:
    """Return a number of pixels, to a tenth."""
    return f"{number:.1f}".removesuffix(".0")


def text_width(text: str) -> float:
    """Return how many pixels a small text takes, at most, in usual fonts."""
    return cell_width(text) * CELL_WIDTH
