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

from kvstow.plan.layout import Layout, PlacedGroup
from kvstow.plan.spec import LayerSpec
from kvstow.plan.view import Run
from kvstow.text import plural

WIDTH = 80
EDGE = "│"
PADDING = "·"


def slab_picture(layout: Layout, *, width: int = WIDTH) -> str:
    """One slab, and the rows that each group cuts it into.

    Where nothing passes between groups, or blocks are not rows, the whole arena.
    """
    if not _has_slabs(layout):
        return _arena_picture(layout, width)
    heads = _line_heads(
        [(rows.group.name, plural(rows.rows_per_slab, "row")) for rows in layout.groups]
    )
    ruler = Ruler(nbytes=layout.slab_bytes, width=width - len(heads[0]) - 1)
    lines = [
        head + (_pages_line if rows.rows_per_slab == 1 else _rows_line)(layout, g, ruler)
        for g, (head, rows) in enumerate(zip(heads, layout.groups, strict=True))
    ]
    what = "the groups take turns owning slabs" if len(lines) > 1 else "one row"
    return "\n".join([f"one slab, {layout.slab_bytes:,} bytes: {what}", *lines])


def rows_picture(layout: Layout, *, width: int = WIDTH) -> str:
    """One row of every group, its pages marked, all to one scale."""
    longest = max(layout.row_stride(g) for g in range(len(layout.groups)))
    heads = _line_heads(
        [(rows.group.name, plural(len(rows.group.layers), "page")) for rows in layout.groups]
    )
    ruler = Ruler(nbytes=longest, width=width - len(heads[0]) - 1)
    lines = [head + _pages_line(layout, g, ruler) for g, head in enumerate(heads)]
    return "\n".join([f"one row of each group, the longest {longest:,} bytes", *lines])


def short_name(layer: LayerSpec) -> str:
    """`L3` for the third layer's caches, whatever they are called; else the name's end."""
    parts = layer.name.split(".")
    number = next((part for part in parts if part.isdecimal()), None)
    return parts[-1][:8] if number is None else f"L{number}"


def are_rows(layout: Layout) -> bool:
    """Whether every block of every group is one piece."""
    return all(len(footprint.strips) == 1 for footprint in layout.footprints)


# ── lines ─────────────────────────────────────────────────────────────────────────────


def _has_slabs(layout: Layout) -> bool:
    return are_rows(layout) and len(layout.sharing) == 1


def _line_heads(cells: list[tuple[str, str]]) -> list[str]:
    """What stands before each line: a group's name and a count, in columns."""
    cells = [(name if len(name) <= 24 else f"{name[:23]}…", number) for name, number in cells]
    left, right = (max(len(cell[i]) for cell in cells) for i in (0, 1))
    return [f" {name:<{left}}  {number:>{right}}  " for name, number in cells]


def _rows_line(layout: Layout, group: int, ruler: "Ruler") -> str:
    """The rows of one slab."""
    rows = layout.groups[group]
    stride, nbytes = layout.row_stride(group), layout.row_bytes(group)
    names = tuple(dict.fromkeys(short_name(layer) for layer in rows.group.layers))
    starts = [row * stride for row in range(rows.rows_per_slab)]
    marks = [
        Mark(start, str(row), f"row {row}", () if row else names)
        for row, start in enumerate(starts)
    ]
    padding = [Run(start + nbytes, stride - nbytes) for start in starts]
    return ruler.drawn(marks, end=stride * rows.rows_per_slab, padding=padding)


def _pages_line(layout: Layout, group: int, ruler: "Ruler") -> str:
    """The pages of one row; where heads are outermost in it, the heads."""
    rows = layout.groups[group]
    base = layout.footprints[group].strips[0].offset
    has_heads = any(layer.heads.size > 1 for layer in rows.group.layers)
    marks = (_head_marks if layout.order == "BHLNC" and has_heads else _page_marks)(rows, base)
    stride, nbytes = layout.row_stride(group), layout.row_bytes(group)
    return ruler.drawn(marks, end=stride, padding=[Run(nbytes, stride - nbytes)])


def _page_marks(rows: PlacedGroup, base: int) -> "list[Mark]":
    return [
        Mark(page[0].offset - base, short_name(layer), short_name(layer))
        for layer, page in zip(rows.group.layers, rows.placements, strict=True)
    ]


def _head_marks(rows: PlacedGroup, base: int) -> "list[Mark]":
    """Where each head begins: layers of equally many heads lie together."""
    first: dict[int, tuple[LayerSpec, int, int]] = {}
    for layer, page in zip(rows.group.layers, rows.placements, strict=True):
        first.setdefault(layer.heads.size, (layer, page[0].offset - base, page[0].head_stride))
    marks = [
        Mark(offset + head * stride, f"H{head}", f"H{head}")
        for layer, offset, stride in first.values()
        for head in range(layer.heads.size)
    ]
    return sorted(marks, key=lambda mark: mark.offset)


def _arena_picture(layout: Layout, width: int) -> str:
    """Each group's parts of the arena: one where blocks are rows, one per layer or head
    where they are not."""
    heads = _line_heads(
        [
            (rows.group.name, plural(layout.num_blocks(g), "block"))
            for g, rows in enumerate(layout.groups)
        ]
    )
    ruler = Ruler(nbytes=layout.nbytes, width=width - len(heads[0]) - 1)
    lines = [head + _strips_line(layout, g, ruler) for g, head in enumerate(heads)]
    what = "every group has its own part" if are_rows(layout) else "a block is in several places"
    return "\n".join([f"the arena, {layout.nbytes:,} bytes: {what}", *lines])


def _strips_line(layout: Layout, group: int, ruler: "Ruler") -> str:
    strips = sorted(layout.footprints[group].strips, key=lambda strip: strip.offset)
    rows = layout.groups[group]
    if len(strips) == 1:
        names = tuple(dict.fromkeys(short_name(layer) for layer in rows.group.layers))
        marks = [Mark(strips[0].offset, "rows", "rows", names)]
    else:
        marks = _page_marks(rows, 0)
    last = strips[-1]
    return ruler.drawn(
        sorted(marks, key=lambda mark: mark.offset), end=last.offset + last.stride * last.count
    )


# ── marks on a line, each where its byte is ───────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class Mark:
    """Something starts at `offset`. Where all marks have room for it, its full name is
    written, then what it consists of as far as that fits; its brief name otherwise."""

    offset: int
    brief: str
    full: str
    parts: tuple[str, ...] = ()

    def label(self, room: int) -> str:
        """The full name and as many parts as fit."""
        for num_parts in range(len(self.parts), 0, -1):
            more = " …" if num_parts < len(self.parts) else ""
            text = f" {self.full}: {' '.join(self.parts[:num_parts])}{more}"
            if len(text) <= room:
                return text
        return f" {self.full}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Ruler:
    """`[0, nbytes)` drawn `width` columns wide; the edge at its end takes one more."""

    nbytes: int
    width: int

    def column(self, offset: int) -> int:
        """The column nearest to a byte."""
        return (2 * offset * self.width + self.nbytes) // (2 * self.nbytes)

    def drawn(self, marks: Sequence[Mark], *, end: int, padding: Sequence[Run] = ()) -> str:
        """The marks up to `end`: all of them, or every second, every fifth … for lack of room.

        Marks ascend. Padding is drawn where it is half a column long at least.
        """
        line = [" "] * (self.width + 1)
        for run in padding:
            hi = self.column(run.end)
            lo = hi - self.column(run.nbytes)
            line[lo:hi] = PADDING * (hi - lo)
        chosen = self._chosen(marks, end)
        is_wide = all(room > len(mark.full) for mark, room in chosen)
        for mark, room in chosen:
            at = self.column(mark.offset)
            name = mark.label(room) if is_wide else mark.brief
            text = EDGE + (name if len(name) <= room else "")
            line[at : at + len(text)] = text
        line[self.column(end)] = EDGE
        return "".join(line).rstrip()

    def _chosen(self, marks: Sequence[Mark], end: int) -> list[tuple[Mark, int]]:
        """Every k-th mark and its columns of room, for the smallest k with room for the
        brief names of all but the last."""
        for step in _steps():
            some = marks[::step]
            columns = [*(self.column(mark.offset) for mark in some), self.column(end)]
            rooms = [b - a - 1 for a, b in pairwise(columns)]
            chosen = list(zip(some, rooms, strict=True))
            if all(len(mark.brief) <= room for mark, room in chosen[:-1]):
                return chosen
        raise AssertionError("steps never end")


def _steps() -> Iterator[int]:
    """1, 2, 5, 10, 20, 50, …"""
    return (digit * 10**power for power in count() for digit in (1, 2, 5))
