"""A layout as one picture that needs nothing else: SVG, to scale, in light and in dark.

slab        one line per group, cut into its rows     (the arena, where there are no slabs)
row         one block of the first group, cut into its pages: one copy
per layer   the same block where every layer is a tensor of its own: many copies
"""

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from itertools import accumulate, cycle

from kvstow.plan.layout import Layout
from kvstow.plan.retention import in_words
from kvstow.plan.view import Run
from kvstow.render.bars import Bar, are_rows, group_bars, has_slabs, page_bars, picture_title
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

THIN = ' stroke="none" style="stroke:none"'
"""A bar of a few pixels is all fill: an edge would hide it."""

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
class BarLine:
    """Bars of `[0, nbytes)` of one group, and words above them at the left and at the right."""

    g: int
    name: str
    detail: str
    nbytes: int
    bars: Sequence[Bar]


def layout_svg(layout: Layout, *, width: int = WIDTH) -> str:
    """The picture as a document of its own; it follows the reader's colour scheme."""
    heading = f"{layout.model}: {picture_title(layout)}"
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


# ── lines ─────────────────────────────────────────────────────────────────────────────


def _group_line(layout: Layout, g: int) -> BarLine:
    """The rows of one slab, or the group's parts of the arena."""
    group, number = layout.groups[g].group, plural(layout.num_blocks(g), "block")
    if has_slabs(layout):
        number = plural(layout.groups[g].rows_per_slab, "row")
    return BarLine(
        g=g,
        name=f"{group.name}: keeps {in_words(group.retention)}",
        detail=f"{number} of {group.block_tokens:,} tokens",
        nbytes=layout.slab_bytes if has_slabs(layout) else layout.nbytes,
        bars=group_bars(layout, g),
    )


def _row_line(layout: Layout) -> BarLine:
    """One block of the first group: its pages in one piece."""
    group = layout.groups[0].group
    return BarLine(
        g=0,
        name=f"one block of {group.name}, widened: the pages of "
        f"{plural(len(group.layers), 'layer')}",
        detail=f"one copy of {layout.row_bytes(0):,} bytes",
        nbytes=layout.row_stride(0),
        bars=page_bars(layout, 0),
    )


def _per_layer_line(layout: Layout) -> BarLine:
    """The same pages, apart."""
    layers = layout.groups[0].group.layers
    gap = int(GAPS * sum(layer.page_bytes for layer in layers)) // max(1, len(layers) - 1)
    starts = accumulate((layer.page_bytes + gap for layer in layers), initial=0)
    bars = [
        Bar(Run(start, layer.page_bytes), f"{layer.name}: {layer.page_bytes:,} bytes")
        for layer, start in zip(layers, starts, strict=False)
    ]
    return BarLine(
        g=0,
        name="the same block with one tensor per layer",
        detail=f"{plural(layout.groups[0].group.num_tensors, 'copy')} from as many places",
        nbytes=bars[-1].run.end,
        bars=bars,
    )


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
    fills = cycle((f"g{line.g % len(COLOURS)}", f"g{line.g % len(COLOURS)} odd"))
    for bar in line.bars:
        x, wide = MARGIN + bar.run.offset * scale, bar.run.nbytes * scale
        style, thin = "pad" if bar.is_padding else next(fills), "" if wide >= 4 else THIN
        marks.append(
            f'<rect class="{style}" x="{x:.2f}" y="{top + 18}" width="{max(wide, 0.3):.2f}" '
            f'height="{BAR_HEIGHT}"{thin}><title>{escape(bar.title)}</title></rect>'
        )
        name = _fitting(bar, scale)
        if name and is_named:
            marks.append(_text(x + wide / 2, top + 18 + BAR_HEIGHT / 2 + 4, name, "mid"))
    return marks


def _fitting(bar: Bar, scale: float) -> str | None:
    room = bar.run.nbytes * scale
    return next((name for name in bar.names if len(name) * LETTER + 4 < room), None)


def _text(x: float, y: float, words: str, style: str) -> str:
    return f'<text class="{style}" x="{x:.2f}" y="{y:.0f}">{escape(words)}</text>'
