"""What pictures of a layout show: bars, each some bytes of a line that is drawn to scale.

`text` draws them in columns, `svg` in pixels.
"""

from dataclasses import dataclass

from kvstow.plan.layout import Layout, Placement, page_runs
from kvstow.plan.spec import LayerSpec
from kvstow.plan.view import Run


@dataclass(frozen=True, slots=True)
class Bar:
    """Some bytes, and what they are."""

    run: Run
    title: str
    names: tuple[str, ...] = ()
    """In full and in brief; none where a name would be one too many."""
    parts: tuple[str, ...] = ()
    """What it consists of, named behind its full name as far as there is room."""
    is_padding: bool = False


def short_name(layer: LayerSpec) -> str:
    """`L3` for the third layer's caches, whatever they are called; else the name's end."""
    parts = layer.name.split(".")
    number = next((part for part in parts if part.isdecimal()), None)
    return parts[-1][:8] if number is None else f"L{number}"


def are_rows(layout: Layout) -> bool:
    """Whether every block of every group is one piece."""
    return all(len(footprint.strips) == 1 for footprint in layout.footprints)


def has_slabs(layout: Layout) -> bool:
    """Whether one slab tells all: blocks are rows, and every slab may be any group's."""
    return are_rows(layout) and len(layout.sharing) == 1


def picture_title(layout: Layout) -> str:
    """What the lines of all groups are cut from: one slab, or the arena where there are none."""
    if has_slabs(layout):
        what = "the groups take turns owning slabs" if len(layout.groups) > 1 else "one row"
        return f"one slab, {layout.slab_bytes:,} bytes: {what}"
    what = "every group has its own part" if are_rows(layout) else "a block is in several places"
    return f"the arena, {layout.nbytes:,} bytes: {what}"


def group_bars(layout: Layout, g: int) -> list[Bar]:
    """The rows of one slab; without slabs, the group's parts of the arena."""
    return _row_bars(layout, g) if has_slabs(layout) else _part_bars(layout, g)


def page_bars(layout: Layout, g: int) -> list[Bar]:
    """The pages of one row; where heads are outermost in it, the heads, each of all layers."""
    base = layout.footprints[g].strips[0].offset
    bars, names, end = list[Bar](), set[str](), 0
    for run, name, title in sorted(_heads(layout, g) or _pages(layout, g)):
        at = run.offset - base
        bars += _padding(end, at)
        title = f"{title}: {run.nbytes:,} bytes at {at:,} of the row"
        bars.append(Bar(Run(at, run.nbytes), title, () if name in names else (name,)))
        names.add(name)
        end = at + run.nbytes
    return bars + _padding(end, layout.row_stride(g))


def _pages(layout: Layout, g: int) -> list[tuple[Run, str, str]]:
    rows = layout.groups[g]
    return [
        (run, short_name(layer), layer.name)
        for layer, page in zip(rows.group.layers, rows.placements, strict=True)
        for run in page_runs(layer, page)
    ]


def _heads(layout: Layout, g: int) -> list[tuple[Run, str, str]]:
    """Layers of equally many heads lie together."""
    rows, first = layout.groups[g], dict[int, Placement]()
    for layer, page in zip(rows.group.layers, rows.placements, strict=True):
        first.setdefault(layer.heads.size, page[0])
    if layout.order != "BHLNC" or max(first) == 1:
        return []
    return [
        (Run(page.offset + h * page.head_stride, page.head_stride), f"H{h}", f"head {h}")
        for size, page in first.items()
        for h in range(size)
    ]


def _row_bars(layout: Layout, g: int) -> list[Bar]:
    group, nbytes, stride = layout.groups[g].group, layout.row_bytes(g), layout.row_stride(g)
    bars: list[Bar] = []
    for row in range(layout.groups[g].rows_per_slab):
        start = row * stride
        title = f"{group.name}, row {row}: {nbytes:,} bytes at {start:,}"
        parts = () if row else _layer_names(group.layers)
        bars.append(Bar(Run(start, nbytes), title, (f"row {row}", str(row)), parts))
        bars += _padding(start + nbytes, start + stride)
    return bars


def _part_bars(layout: Layout, g: int) -> list[Bar]:
    """One part where blocks are rows, one per layer or head where they are not."""
    rows = layout.groups[g]
    strips = sorted(layout.footprints[g].strips, key=lambda strip: strip.offset)
    names = {
        page[0].offset: short_name(layer)
        for layer, page in zip(rows.group.layers, rows.placements, strict=True)
    }
    parts: tuple[str, ...] = ()
    if len(strips) == 1:
        names, parts = {strips[0].offset: "rows"}, _layer_names(rows.group.layers)
    bars: list[Bar] = []
    for i, strip in enumerate(strips):
        run = Run(strip.offset, strip.stride * strip.count)
        where = f"part {i + 1} of {len(strips)}: {run.nbytes:,} bytes at {run.offset:,}"
        name = (names[strip.offset],) if strip.offset in names else ()
        bars.append(Bar(run, f"{rows.group.name}, {where}", name, parts))
    return bars


def _layer_names(layers: tuple[LayerSpec, ...]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(short_name(layer) for layer in layers))


def _padding(start: int, end: int) -> list[Bar]:
    if start >= end:
        return []
    return [Bar(Run(start, end - start), f"padding: {end - start:,} bytes", is_padding=True)]
