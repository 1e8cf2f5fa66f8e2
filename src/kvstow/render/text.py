"""Rows, slabs and arenas as lines of text, to scale.

    one slab, 393,216 bytes: the groups take turns owning slabs
     full       2 rows  │ row 0: L0 L3 L6             │ row 1                      │
     window128   1 row  │ L1      │ L2      │ L4      │ L5     │ L7      │ L8      │

A group with one row per slab shows its pages. Where there is no room for every mark, every
second, fifth or tenth is drawn, each where it belongs. Dots are padding.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count, pairwise

from kvstow.plan.layout import Layout
from kvstow.render.bars import Bar, group_bars, has_slabs, page_bars, picture_title
from kvstow.text import plural

WIDTH = 80
EDGE = "│"
PADDING = "·"


def slab_picture(layout: Layout, *, width: int = WIDTH) -> str:
    """One slab, and the rows that each group cuts it into.

    Where nothing passes between groups, or blocks are not rows, the whole arena.
    """
    if not has_slabs(layout):
        counts = [plural(layout.num_blocks(g), "block") for g in range(len(layout.groups))]
        bars = [group_bars(layout, g) for g in range(len(layout.groups))]
        return _picture(layout, picture_title(layout), counts, bars, layout.nbytes, width)
    counts = [plural(rows.rows_per_slab, "row") for rows in layout.groups]
    bars = [
        (page_bars if rows.rows_per_slab == 1 else group_bars)(layout, g)
        for g, rows in enumerate(layout.groups)
    ]
    return _picture(layout, picture_title(layout), counts, bars, layout.slab_bytes, width)


def rows_picture(layout: Layout, *, width: int = WIDTH) -> str:
    """One row of every group, its pages marked, all to one scale."""
    longest = max(layout.row_stride(g) for g in range(len(layout.groups)))
    title = f"one row of each group, the longest {longest:,} bytes"
    counts = [plural(len(rows.group.layers), "page") for rows in layout.groups]
    bars = [page_bars(layout, g) for g in range(len(layout.groups))]
    return _picture(layout, title, counts, bars, longest, width)


def _picture(
    layout: Layout,
    title: str,
    counts: Sequence[str],
    bars: Sequence[Sequence[Bar]],
    nbytes: int,
    width: int,
) -> str:
    """A line for every group: its name, a count, its bars."""
    names = [rows.group.name for rows in layout.groups]
    names = [name if len(name) <= 24 else f"{name[:23]}…" for name in names]
    left, right = max(map(len, names)), max(map(len, counts))
    ruler = Ruler(nbytes=nbytes, width=width - left - right - 6)
    lines = [
        f" {name:<{left}}  {number:>{right}}  {ruler.drawn(line)}"
        for name, number, line in zip(names, counts, bars, strict=True)
    ]
    return "\n".join([title, *lines])


def _label(bar: Bar, room: int) -> str:
    """The full name and as many parts as fit."""
    for num_parts in range(len(bar.parts), 0, -1):
        more = " …" if num_parts < len(bar.parts) else ""
        text = f" {bar.names[0]}: {' '.join(bar.parts[:num_parts])}{more}"
        if len(text) <= room:
            return text
    return f" {bar.names[0]}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Ruler:
    """`[0, nbytes)` drawn `width` columns wide; the edge at its end takes one more."""

    nbytes: int
    width: int

    def column(self, offset: int) -> int:
        """The column nearest to a byte."""
        return (2 * offset * self.width + self.nbytes) // (2 * self.nbytes)

    def drawn(self, bars: Sequence[Bar]) -> str:
        """The bars that have names: all of them, or every second, every fifth … for lack of room.

        Bars ascend. Padding is drawn where it is half a column long at least.
        """
        line, end = [" "] * (self.width + 1), bars[-1].run.end
        for bar in bars:
            if bar.is_padding:
                hi = self.column(bar.run.end)
                lo = hi - self.column(bar.run.nbytes)
                line[lo:hi] = PADDING * (hi - lo)
        chosen = self._chosen([bar for bar in bars if bar.names], end)
        is_wide = all(room > len(bar.names[0]) for bar, room in chosen)
        for bar, room in chosen:
            at = self.column(bar.run.offset)
            name = _label(bar, room) if is_wide else bar.names[-1]
            text = EDGE + (name if len(name) <= room else "")
            line[at : at + len(text)] = text
        line[self.column(end)] = EDGE
        return "".join(line).rstrip()

    def _chosen(self, bars: Sequence[Bar], end: int) -> list[tuple[Bar, int]]:
        """Every k-th bar and its columns of room, for the smallest k with room for the brief
        names of all but the last."""
        for step in _steps():
            some = bars[::step]
            columns = [*(self.column(bar.run.offset) for bar in some), self.column(end)]
            rooms = [b - a - 1 for a, b in pairwise(columns)]
            chosen = list(zip(some, rooms, strict=True))
            if all(len(bar.names[-1]) <= room for bar, room in chosen[:-1]):
                return chosen
        raise AssertionError("steps never end")


def _steps() -> Iterator[int]:
    """1, 2, 5, 10, 20, 50, …"""
    return (digit * 10**power for power in count() for digit in (1, 2, 5))
