"""A layout as one picture that needs nothing else: SVG, to scale, in light and in dark.

slab        one line per group, cut into its rows     (the arena, where there are no slabs)
row         one block of the first group, cut into its pages: one copy
per layer   the same block where every layer is a tensor of its own: many copies
"""

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from kvstow.plan.layout import Layout, page_runs
from kvstow.plan.retention import in_words
from kvstow.plan.view import Run
from kvstow.render.text import are_rows, short_name
from kvstow.text import plural

WIDTH = 960
MARGIN = 8
BAR_HEIGHT = 30
LINE_HEIGHT = 54
COLOURS = (
    ("#9cc7ee", "#23598c"),
    ("#f6c98a", "#8a5a12"),
    ("#a9d8b0", "#2c6b3f"),
    ("#e5b3d6", "#7d3a6b"),
    ("#cfc6f0", "#55489b"),
    ("#f2b5a7", "#8f4030"),
    ("#a6dcdc", "#1f6a6c"),
    ("#dcd98e", "#6a651c"),
)
"""One pair per group: on light, on dark. The pages have the same."""

LETTER = 7.2
"""Pixels of one letter of a name, roughly."""

GAPS = 0.35
"""The part of a line that is left empty between bars that are not together."""

_DOCUMENT = """\
<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" \
height="{height}" role="img" aria-labelledby="what">
<title id="what">{title}</title>
<style>
text {{ font: 13px system-ui, "Segoe UI", Roboto, "DejaVu Sans", sans-serif; fill: #1d2126; }}
.head {{ font-size: 15px; font-weight: 600; }} .soft {{ fill: #555c66; }}
.end {{ text-anchor: end; }} .mid {{ text-anchor: middle; font-size: 12px; }}
rect {{ stroke: #fff; stroke-width: 1; }} .odd {{ fill-opacity: 0.7; }}
.pad {{ fill: url(#hatch); }} #hatch line {{ stroke: #8b8f96; stroke-width: 1.5; }}
{light}
@media (prefers-color-scheme: dark) {{
text {{ fill: #e9e7e2; }} .soft {{ fill: #a9afb8; }} rect {{ stroke: #14161a; }}
{dark}
}}
</style>
<defs><pattern id="hatch" width="6" height="6" patternUnits="userSpaceOnUse" \
patternTransform="rotate(45)"><line x1="0" y1="0" x2="0" y2="6"/></pattern></defs>
{body}</svg>
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """Some bytes of a line: where they lie, how they look, and what they are."""

    run: Run
    style: str
    names: tuple[str, ...]
    title: str


@dataclass(frozen=True, slots=True, kw_only=True)
class BarLine:
    """Bars of `[0, nbytes)`, and words above them at the left and at the right."""

    name: str
    detail: str
    nbytes: int
    bars: Sequence[Bar]


def layout_svg(layout: Layout, *, width: int = WIDTH) -> str:
    """The picture as a document of its own; it follows the reader's colour scheme."""
    heading = _heading(layout)
    lines = [_group_line(layout, g) for g in range(len(layout.groups))]
    if are_rows(layout):
        lines += [_row_line(layout), _per_layer_line(layout)]
    body = [_text(MARGIN, 20, heading, "head")]
    for i, line in enumerate(lines):
        body += _drawn(line, 32 + i * LINE_HEIGHT, width)
    return _DOCUMENT.format(
        width=width,
        height=32 + len(lines) * LINE_HEIGHT + 4,
        title=escape(heading),
        light=_fills(0),
        dark=_fills(1),
        body="\n".join([*body, ""]),
    )


def _fills(scheme: int) -> str:
    return " ".join(f".g{i} {{ fill: {pair[scheme]}; }}" for i, pair in enumerate(COLOURS))


def _has_slabs(layout: Layout) -> bool:
    return are_rows(layout) and len(layout.sharing) == 1


def _heading(layout: Layout) -> str:
    if _has_slabs(layout):
        turns = ": the groups take turns owning it" if len(layout.groups) > 1 else ""
        return f"{layout.model}: one slab of {layout.slab_bytes:,} bytes{turns}"
    where = "every group has its own part" if are_rows(layout) else "a block is in several places"
    return f"{layout.model}: the arena of {layout.nbytes:,} bytes, where {where}"


# ── lines ─────────────────────────────────────────────────────────────────────────────


def _group_line(layout: Layout, g: int) -> BarLine:
    """The rows of one slab, or the group's parts of the arena."""
    group = layout.groups[g].group
    has_slabs = _has_slabs(layout)
    number = layout.groups[g].rows_per_slab if has_slabs else layout.num_blocks(g)
    return BarLine(
        name=f"{group.name}: keeps {in_words(group.retention)}",
        detail=f"{plural(number, 'row' if has_slabs else 'block')} of {group.block_tokens:,} "
        "tokens",
        nbytes=layout.slab_bytes if has_slabs else layout.nbytes,
        bars=_rows(layout, g) if has_slabs else _parts(layout, g),
    )


def _rows(layout: Layout, g: int) -> list[Bar]:
    name, nbytes, stride = layout.groups[g].group.name, layout.row_bytes(g), layout.row_stride(g)
    bars: list[Bar] = []
    for row in range(layout.groups[g].rows_per_slab):
        start = row * stride
        bars.append(
            Bar(
                run=Run(start, nbytes),
                style=_style(g, row),
                names=(f"row {row}", str(row)),
                title=f"{name}, row {row}: {nbytes:,} bytes at {start:,}",
            )
        )
        if stride > nbytes:
            bars.append(_padding(Run(start + nbytes, stride - nbytes)))
    return bars


def _parts(layout: Layout, g: int) -> list[Bar]:
    strips = sorted(layout.footprints[g].strips, key=lambda strip: strip.offset)
    return [
        Bar(
            run=Run(strip.offset, strip.stride * strip.count),
            style=_style(g, i),
            names=(),
            title=f"{layout.groups[g].group.name}, part {i + 1} of {len(strips)}: "
            f"{strip.stride * strip.count:,} bytes at {strip.offset:,}",
        )
        for i, strip in enumerate(strips)
    ]


def _row_line(layout: Layout) -> BarLine:
    """One block of the first group: its pages in one piece."""
    stride = layout.row_stride(0)
    bars, end = list[Bar](), 0
    for page in _pages(layout):
        if page.run.offset > end:
            bars.append(_padding(Run(end, page.run.offset - end)))
        bars.append(page)
        end = page.run.end
    if stride > end:
        bars.append(_padding(Run(end, stride - end)))
    return BarLine(
        name=f"one block of {layout.groups[0].group.name}, widened: the pages of "
        f"{plural(len(layout.groups[0].group.layers), 'layer')}",
        detail=f"one copy of {layout.row_bytes(0):,} bytes",
        nbytes=stride,
        bars=bars,
    )


def _per_layer_line(layout: Layout) -> BarLine:
    """The same pages, apart."""
    group = layout.groups[0].group
    pages = _pages(layout)
    room = sum(page.run.nbytes for page in pages)
    gap = int(room * GAPS) // max(1, len(pages) - 1)
    bars, end = list[Bar](), 0
    for page in pages:
        bars.append(
            Bar(run=Run(end, page.run.nbytes), style=page.style, names=(), title=page.title)
        )
        end += page.run.nbytes + gap
    return BarLine(
        name="the same block with one tensor per layer",
        detail=f"{plural(group.num_tensors, 'copy')} from as many places",
        nbytes=max(1, end - gap),
        bars=bars,
    )


def _pages(layout: Layout) -> list[Bar]:
    """The pages of the first group's row, from its start, ascending."""
    rows, base = layout.groups[0], layout.footprints[0].strips[0].offset
    found = [
        (run, layer)
        for layer, place in zip(rows.group.layers, rows.placements, strict=True)
        for run in page_runs(layer, place)
    ]
    found.sort(key=lambda pair: pair[0])
    return [
        Bar(
            run=Run(run.offset - base, run.nbytes),
            style=_style(0, i),
            names=(short_name(layer),),
            title=f"{layer.name}: {run.nbytes:,} bytes at {run.offset - base:,} of the row",
        )
        for i, (run, layer) in enumerate(found)
    ]


def _padding(run: Run) -> Bar:
    return Bar(run=run, style="pad", names=(), title=f"padding: {run.nbytes:,} bytes")


def _style(g: int, position: int) -> str:
    return f"g{g % len(COLOURS)}" + (" odd" if position % 2 else "")


# ── marks ─────────────────────────────────────────────────────────────────────────────


def _drawn(line: BarLine, top: int, width: int) -> list[str]:
    """The line's words and bars; names only where most of them have room."""
    scale = (width - 2 * MARGIN) / line.nbytes
    marks = [
        _text(MARGIN, top + 13, line.name, ""),
        _text(width - MARGIN, top + 13, line.detail, "soft end"),
    ]
    fits = [_fitting(bar, scale) for bar in line.bars if bar.names]
    is_named = 2 * sum(name is not None for name in fits) >= len(fits)
    for bar in line.bars:
        x, wide = MARGIN + bar.run.offset * scale, bar.run.nbytes * scale
        marks.append(
            f'<rect class="{bar.style}" x="{x:.2f}" y="{top + 18}" width="{max(wide, 0.3):.2f}" '
            f'height="{BAR_HEIGHT}"{_thin(wide)}><title>{escape(bar.title)}</title></rect>'
        )
        name = _fitting(bar, scale)
        if name and is_named:
            marks.append(_text(x + wide / 2, top + 18 + BAR_HEIGHT / 2 + 4, name, "mid"))
    return marks


def _fitting(bar: Bar, scale: float) -> str | None:
    room = bar.run.nbytes * scale
    return next((name for name in bar.names if len(name) * LETTER + 4 < room), None)


def _thin(wide: float) -> str:
    """A bar of a few pixels is all fill: an edge would hide it."""
    return "" if wide >= 4 else ' stroke="none" style="stroke:none"'


def _text(x: float, y: float, words: str, style: str) -> str:
    return f'<text class="{style}" x="{x:.2f}" y="{y:.0f}">{escape(words)}</text>'
