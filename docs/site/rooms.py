"""Draw the rooms of the source and the arrows between them: docs/pictures/rooms.svg, from the imports.

    python -m docs.site.rooms

A room is drawn above all rooms that it imports from.  An arrow that follows from two others is left out.
"""

from __future__ import annotations

from functools import cache
from html import escape
from itertools import pairwise
from pathlib import Path

from tests.imports import GROUPS, ROOMS, all_imports, is_late, room_of

PICTURE = Path(__file__).resolve().parents[1] / "pictures" / "rooms.svg"
_WIDTH, _THIN, _HEIGHT, _GAP, _BETWEEN, _WIDE = 108, 4, 30, 20, 46, 760
_PLAIN = ("errors", "extras", "torch_compat")
"""Modules that every room may use; their arrows would say nothing."""
_STYLE = """
text { font: 13px system-ui, sans-serif; text-anchor: middle; fill: #1c2330 }
rect { fill: #eef1f8; stroke: #7a86a8 } .core { fill: #ffe7c7; stroke: #c98a2b }
path { fill: none; stroke: #7a86a8 } marker path { fill: #7a86a8; stroke: none }
@media (prefers-color-scheme: dark) {
text { fill: #e6e9f0 } rect { fill: #2a3040; stroke: #8f9bbd } .core { fill: #5a4320; stroke: #d9a04a }
path { stroke: #8f9bbd } marker path { fill: #8f9bbd } }
"""


def _shown(room: str) -> str:
    first, _, rest = room.partition(".")
    return rest.partition(".")[0] if first in GROUPS else first


@cache
def arrows() -> dict[str, set[str]]:
    """Return which rooms each room imports from; passes, runtime and cli count as one room each."""
    found: dict[str, set[str]] = {}
    for each in all_imports():
        user, used = room_of(each.importer), room_of(each.target)
        if user >= 0 and used >= 0 and not is_late(each):
            above, below = (_shown(ROOMS[n]) for n in (user, used))
            if above not in _PLAIN:
                found.setdefault(above, set())
                if below != above and below not in _PLAIN:
                    found[above].add(below)
    return found


@cache
def _depth(room: str) -> int:
    return 1 + max((_depth(r) for r in arrows()[room]), default=-1)


@cache
def _reached(room: str) -> frozenset[str]:
    return frozenset().union(arrows()[room], *(_reached(r) for r in arrows()[room]))


def _ways() -> list[list[str]]:
    """Return each arrow as its places, one for each level; a place between two rooms is `user>used@level`."""
    of = arrows()
    return [
        [room, *(f"{room}>{r}@{n}" for n in range(_depth(room) - 1, _depth(r), -1)), r]
        for room in sorted(of)
        for r in sorted(of[room])
        if not any(r in _reached(other) for other in of[room])
    ]


def _places(ways: list[list[str]]) -> dict[str, tuple[float, float]]:
    """Return the middle of each room's upper edge, and the points where arrows pass between rooms."""
    rows: dict[int, set[str]] = {}
    for way in ways:
        for n, name in enumerate(way):
            rows.setdefault(_depth(way[-1]) + len(way) - 1 - n, set()).add(name)
    order = {name: float(n) for row in rows.values() for n, name in enumerate(sorted(row))}
    beside: dict[str, list[str]] = {}
    for way in ways:
        for above, below in pairwise(way):
            beside.setdefault(above, []).append(below)
            beside.setdefault(below, []).append(above)
    places: dict[str, tuple[float, float]] = {}
    for _ in range(24):  # sort each row by the average place of its neighbours, until that settles
        for level in sorted(rows):

            def middle(name: str) -> float:
                return sum(order[other] for other in beside[name]) / len(beside[name])

            row = sorted(rows[level], key=lambda name: (middle(name), name))
            widths = [_THIN if "@" in name else _WIDTH for name in row]
            x = (_WIDE - sum(widths) - _GAP * (len(row) - 1)) / 2
            for name, width in zip(row, widths, strict=True):
                order[name] = x + width / 2
                places[name] = x + width / 2, 10 + (max(rows) - level) * (_HEIGHT + _BETWEEN)
                x += width + _GAP
    return places


def svg() -> str:
    """Return the picture of the rooms and their arrows."""
    ways = _ways()
    places = _places(ways)
    lines = []
    for way in ways:
        path = ""
        for above, below in pairwise(way):
            (x, y), (to_x, to_y) = places[above], places[below]
            y, to_y = y + _HEIGHT, to_y - 3 * (below == way[-1])
            bend = (to_y - y) / 2
            start = path or f"M{x:.0f} {y}"
            path = f"{start} C{x:.0f} {y + bend:.0f} {to_x:.0f} {to_y - bend:.0f} {to_x:.0f} {to_y}"
            path += f" v{_HEIGHT}" if below != way[-1] else ""
        lines.append(f'<path d="{path}" marker-end="url(#end)"/>')
    for room, (x, y) in sorted(places.items()):
        core = ' class="core"' if room in ("passes", "runtime", "backend", "plan") else ""
        if "@" not in room:
            lines.append(
                f'<rect{core} x="{x - _WIDTH / 2:.0f}" y="{y}" width="{_WIDTH}" height="{_HEIGHT}" '
                f'rx="5"/><text x="{x:.0f}" y="{y + 20}">{escape(room)}</text>'
            )
    height = max(y for _, y in places.values()) + _HEIGHT + 10
    marker = (
        '<marker id="end" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" '
        'orient="auto"><path d="M0 0 L8 4 L0 8 z"/></marker>'
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDE} {height}" role="img">\n'
        f"<style>{_STYLE}</style>\n<defs>{marker}</defs>\n" + "\n".join(lines) + "\n</svg>\n"
    )


if __name__ == "__main__":
    PICTURE.write_text(svg(), encoding="utf-8")
