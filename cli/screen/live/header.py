"""What stands above the slots: requests, tokens, memory, the queue and what nobody should miss."""

from batcher.trace.run import label_of

from ..cells import cell_width, counted, cut_middle
from .facts import GAP, Fact, clock, counts, kept, next_up, progress, rates, short
from .scene import Scene
from .state import Note
from .theme import LABEL, Line, bar, level, levels, line_width

MAX_BAR, MIN_BAR, MIN_TREND = 60, 8, 8
ROOMY = 60
"""From so many cells on there is a trend, whatever goes for it."""
MIN_TITLE, MAX_NAME = 6, 20
MAX_QUEUE = 20
"""The most cells of the trend of the queue."""


def header(scene: Scene, width: int, max_lines: int) -> list[Line]:
    """Return what there is to say in at most `max_lines` of `width`; at least one line.

    The fewer lines there are, the more of the first ones goes.
    """
    if max_lines == 1:
        found = _what_became(scene)
        rate = rates(scene.run, scene.plan, scene.gauges, scene.moment)[0]
        return [_facts(kept([*found, rate._replace(rank=3)], width)) or [(" ", "")]]
    lines = [
        _counts(scene, width),
        _rates(scene, width),
        _queue(scene, width),
        _progress(scene, width),
        _memory(scene, width),
    ]
    wanted = [line for line in lines if line is not None][:max_lines]
    order = (lines[0], lines[3], lines[1], lines[4], lines[2])  # as they stand
    return [line for line in order if line is not None and line in wanted]


def _what_became(scene: Scene) -> list[Fact]:
    separator = scene.glyphs.separator
    return counts(scene.run, scene.plan, scene.gauges, scene.moment, separator)


def _counts(scene: Scene, width: int) -> Line:
    """Return whose run it is, what has become of the requests, and on the right the time."""
    seconds = scene.moment.seconds
    time = "" if seconds is None else clock(seconds)
    found = kept(_what_became(scene), width - len(GAP) - len(time))
    line = _facts(found)
    room = width - line_width(line) - len(time) - 2 * len(GAP)
    title = scene.name(scene.plan.title)
    if room >= min(MIN_TITLE, cell_width(title)):
        line = [(cut_middle(title, room, scene.glyphs.cut), "title"), (GAP, ""), *line]
    return _apart(line, [(time, LABEL)], width)


def _progress(scene: Scene, width: int) -> Line | None:
    """Return how much is done by tokens, and how long the rest will take."""
    found = progress(scene.run, scene.plan, scene.gauges, scene.moment)
    if found is None:
        return None
    share = f"{int(found.share * 100)}%"
    parts = [(f"{share:>4}", "figure")]
    eta = "" if found.eta is None else f"{GAP}eta {clock(found.eta)}"
    if len(eta) + len(share) + MIN_BAR <= width:
        parts.append((eta, LABEL))
    num_tokens = scene.moment.num_tokens
    tokens = f"{GAP}{short(num_tokens)} token{'' if num_tokens == 1 else 's'}"
    room = width - line_width(parts)
    if room - len(tokens) >= MAX_BAR // 2:
        parts.append((tokens, LABEL))
        room -= len(tokens)
    return [*bar(found.share, room - 1, scene.glyphs, "progress"), (" ", ""), *parts]


def _rates(scene: Scene, width: int) -> Line:
    """Return how fast it goes, and how busy the slots were of late."""
    found = rates(scene.run, scene.plan, scene.gauges, scene.moment)
    reserved = len(GAP) + len("busy ") + MIN_TREND + len(" 100%") if width >= ROOMY else 0
    line = _facts(kept(found, width - reserved))
    room = width - line_width(line) - len(GAP) - len("busy ") - len(" 100%")
    if room < MIN_TREND or not scene.busy:
        return line
    trend = list(scene.busy)[-min(room, MAX_BAR // 2) :]
    share = f" {int(sum(trend) / max(len(trend), 1) * 100)}%"
    cells = [(level(of, scene.glyphs), "busy" if of > 0.95 else "bubble") for of in trend]  # noqa: PLR2004 - as good as full
    return _apart(line, [("busy ", LABEL), *cells, (share, "figure")], width)


def _memory(scene: Scene, width: int) -> Line | None:
    """Return what the KV blocks are used for."""
    use = scene.gauges.block_use
    if use is None:
        return None
    run = scene.run
    hits = []
    if run.num_found:
        hits.append(Fact(3, "figure", f"hits {run.num_found * 100 // run.num_asked}%"))
    cached = [] if use.cached is None else [Fact(3, "cached", f"{use.cached:,} cached")]
    if use.free is None:
        used = Fact(4, "used", f"{counted(use.used, 'block')} used")
        facts = [used, *cached, Fact(1, LABEL, "no limit")]
        return [("KV ", LABEL), *_facts(kept(facts + hits, width - len("KV ")))]
    num_held = use.used + (use.cached or 0)
    total = num_held + use.free
    facts = [
        Fact(4, "used", f"{use.used:,} used"),
        *cached,
        Fact(2, "free", f"{use.free:,} free"),
        Fact(1, LABEL, f"of {counted(total, 'block')}"),
    ]
    found = kept(facts + hits, width - MIN_BAR - len("KV ") - len(GAP))
    line = _facts(found)
    room = max(min(width - line_width(line) - len("KV ") - len(GAP), MAX_BAR), 1)
    first, second = (round(n * room / max(total, 1)) for n in (use.used, num_held))
    widths = (first, second - first, room - second)
    blocks = zip(scene.glyphs.bars, widths, ("used", "cached", "free"), strict=True)
    bar_of_blocks = [(glyph * cells, style) for glyph, cells, style in blocks]
    return [("KV ", LABEL), *bar_of_blocks, (GAP, ""), *line]


def _queue(scene: Scene, width: int) -> Line | None:
    """Return how long the queue was, who is next and why it waits, and what nobody should miss."""
    text = scene.name(next_up(scene.run, scene.gauges))
    trend = list(scene.queued)[-min(width // MIN_TREND, MAX_QUEUE) :]
    line: Line = [("queue ", LABEL), (levels(trend, scene.glyphs), "queue")]
    line.append((f" {scene.gauges.num_queued:,}", "figure"))
    if line_width(line) > width:
        return None
    if text:
        style = "blocked" if scene.run.fold.blocked is not None else ""
        room = width - line_width(line) - len(GAP) - len("next ")
        if room < MIN_TITLE:
            return line
        name = cut_middle(text, room, scene.glyphs.cut)
        line += [(GAP, ""), ("next ", LABEL), (name, style)]
    news = [note_text(scene, note) for note in scene.notes]
    for end in scene.ends:
        label = scene.name(label_of(end.id, end.index, end.role))
        name = cut_middle(label, MAX_NAME, scene.glyphs.cut)
        news.append((f"{scene.glyphs.ended} {name} {end.reason} {end.tokens}", "stop"))
    for part in news:
        if line_width(line) + len(GAP) + cell_width(part[0]) > width:
            break
        line += [(GAP, ""), part]
    return line


def note_text(scene: Scene, note: Note) -> tuple[str, str]:
    """Return a note in a few words."""
    mark = scene.glyphs.marks[note.kind]
    name = cut_middle(scene.name(note.label), MAX_NAME, scene.glyphs.cut)
    return f"{mark} {name} {scene.name(note.what)}", note.kind


def _facts(found: list[Fact]) -> Line:
    line: Line = []
    for fact in found:
        line += [(GAP, ""), (fact.text, fact.style)] if line else [(fact.text, fact.style)]
    return line


def _apart(left: Line, right: Line, width: int) -> Line:
    """Return both, at the ends of `width`; the left one alone where there is no room."""
    spare = width - line_width(left) - line_width(right)
    return [*left, (" " * spare, ""), *right] if spare > 0 else left
