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

from kvstow.plan.layout import Layout, Placement, page_runs
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
    rows = layout.groups
    if has_slabs(layout):
        what = "the groups take turns owning slabs" if len(rows) > 1 else "one row"
        title = f"one slab, {layout.slab_bytes:,} bytes: {what}"
        counts = [plural(each.rows_per_slab, "row") for each in rows]
        bars = [
            (_page_bars if each.rows_per_slab == 1 else _row_bars)(layout, g)
            for g, each in enumerate(rows)
        ]
        return _picture(layout, title, counts, bars, layout.slab_bytes, width)
    what = "every group has its own part" if are_rows(layout) else "a block is in several places"
    title = f"the arena, {layout.nbytes:,} bytes: {what}"
    counts = [plural(layout.num_blocks(g), "block") for g in range(len(rows))]
    bars = [_part_bars(layout, g) for g in range(len(rows))]
    return _picture(layout, title, counts, bars, layout.nbytes, width)


def rows_picture(layout: Layout, *, width: int = WIDTH) -> str:
    """One row of every group, its pages marked, all to one scale."""
    longest = max(layout.row_stride(g) for g in range(len(layout.groups)))
    title = f"one row of each group, the longest {longest:,} bytes"
    counts = [plural(len(rows.group.layers), "page") for rows in layout.groups]
    bars = [_page_bars(layout, g) for g in range(len(layout.groups))]
    return _picture(layout, title, counts, bars, longest, width)


def are_rows(layout: Layout) -> bool:
    """Whether every block of every group is one piece."""
    return all(len(footprint.strips) == 1 for footprint in layout.footprints)


def has_slabs(layout: Layout) -> bool:
    """Whether one slab tells all: blocks are rows, and every slab may be any group's."""
    return are_rows(layout) and len(layout.sharing) == 1


# ── bars: what a line shows ───────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class Bar:
    """Some bytes of a line, and what they are."""

    run: Run
    names: tuple[str, ...] = ()
    """In full and in brief; none where a name would be one too many."""
    parts: tuple[str, ...] = ()
    """What it consists of, named behind its full name as far as there is room."""
    is_padding: bool = False


def layer_label(layer: LayerSpec) -> str:
    """`L3` for the third layer's caches, whatever they are called; else the name's end."""
    parts = layer.name.split(".")
    number = next((part for part in parts if part.isdecimal()), None)
    return parts[-1][:8] if number is None else f"L{number}"


def _page_bars(layout: Layout, g: int) -> list[Bar]:
    """The pages of one row; where heads are outermost in it, the heads, each of all layers."""
    base = layout.footprints[g].strips[0].offset
    bars, names, end = list[Bar](), set[str](), 0
    for run, name in sorted(_heads(layout, g) or _pages(layout, g)):
        at = run.offset - base
        bars += _padding(end, at)
        bars.append(Bar(Run(at, run.nbytes), () if name in names else (name,)))
        names.add(name)
        end = at + run.nbytes
    return bars + _padding(end, layout.row_stride(g))


def _pages(layout: Layout, g: int) -> list[tuple[Run, str]]:
    rows = layout.groups[g]
    return [
        (run, layer_label(layer))
        for layer, page in zip(rows.group.layers, rows.placements, strict=True)
        for run in page_runs(layer, page)
    ]


def _heads(layout: Layout, g: int) -> list[tuple[Run, str]]:
    """Layers of equally many heads lie together."""
    rows, first = layout.groups[g], dict[int, Placement]()
    for layer, page in zip(rows.group.layers, rows.placements, strict=True):
        first.setdefault(layer.heads.size, page[0])
    if layout.order != "BHLNC" or max(first) == 1:
        return []
    return [
        (Run(page.offset + h * page.head_stride, page.head_stride), f"H{h}")
        for size, page in first.items()
        for h in range(size)
    ]


def _row_bars(layout: Layout, g: int) -> list[Bar]:
    """The rows of one slab."""
    nbytes, stride = layout.row_bytes(g), layout.row_stride(g)
    bars: list[Bar] = []
    for row in range(layout.groups[g].rows_per_slab):
        start = row * stride
        parts = () if row else _layer_names(layout, g)
        bars.append(Bar(Run(start, nbytes), (f"row {row}", str(row)), parts))
        bars += _padding(start + nbytes, start + stride)
    return bars


def _part_bars(layout: Layout, g: int) -> list[Bar]:
    """A group's parts of the arena: one where blocks are rows, else one per layer or head."""
    rows = layout.groups[g]
    strips = sorted(layout.footprints[g].strips, key=lambda strip: strip.offset)
    runs = [Run(strip.offset, strip.stride * strip.count) for strip in strips]
    if len(runs) == 1:
        return [Bar(runs[0], ("rows",), _layer_names(layout, g))]
    names = {
        page[0].offset: (layer_label(layer),)
        for layer, page in zip(rows.group.layers, rows.placements, strict=True)
    }
    return [Bar(run, names.get(run.offset, ())) for run in runs]


def _layer_names(layout: Layout, g: int) -> tuple[str, ...]:
    return tuple(dict.fromkeys(map(layer_label, layout.groups[g].group.layers)))


def _padding(start: int, end: int) -> list[Bar]:
    return [Bar(Run(start, end - start), is_padding=True)] if start < end else []


# ── lines ─────────────────────────────────────────────────────────────────────────────


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
        named = self._choose([bar for bar in bars if bar.names], end)
        is_wide = all(room > len(bar.names[0]) for bar, room in named)
        for bar, room in named:
            at = self.column(bar.run.offset)
            name = _label(bar, room) if is_wide else bar.names[-1]
            text = EDGE + (name if len(name) <= room else "")
            line[at : at + len(text)] = text
        line[self.column(end)] = EDGE
        return "".join(line).rstrip()

    def _choose(self, bars: Sequence[Bar], end: int) -> list[tuple[Bar, int]]:
        """Every k-th bar and its columns of room, for the smallest k with room for the brief
        names of all but the last."""
        for step in _steps():
            some = bars[::step]
            columns = [*(self.column(bar.run.offset) for bar in some), self.column(end)]
            rooms = [b - a - 1 for a, b in pairwise(columns)]
            named = list(zip(some, rooms, strict=True))
            if all(len(bar.names[-1]) <= room for bar, room in named[:-1]):
                return named
        raise AssertionError("steps never end")


def _steps() -> Iterator[int]:
    """1, 2, 5, 10, 20, 50, …"""
    return (digit * 10**power for power in count() for digit in (1, 2, 5))
