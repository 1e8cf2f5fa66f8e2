"""Pictures are to scale: every edge stands at the column nearest to a real boundary."""

import re
from fractions import Fraction
from math import floor
from textwrap import indent

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstow.plan.group import grouped
from kvstow.plan.layout import Layout
from kvstow.plan.pack import Site, packed, separate, union
from kvstow.plan.retention import Full, Window
from kvstow.plan.spec import LayerSpec
from kvstow.plan.view import Run
from kvstow.render import text
from kvstow.render.text import Bar, Ruler, are_rows, layer_label, rows_picture, slab_picture
from planning import attention, layouts, recurrent


def example() -> tuple[LayerSpec, ...]:
    """Nine layers of 64 KiB pages: every third keeps all tokens, the others 128."""
    return tuple(
        attention(
            f"layers.{i}", heads=8, dim=128, tokens=16, retention=Window(128) if i % 3 else Full()
        )
        for i in range(9)
    )


def boundaries(layout: Layout, group: int) -> set[int]:
    """Bytes at which something of a group begins, in block 0 or in the rows of slab 0."""
    rows = layout.groups[group]
    found: set[int] = set()
    for layer, place in zip(rows.group.layers, rows.placements, strict=True):
        found |= {place[0].offset + h * place[0].head_stride for h in range(layer.heads.size)}
    first = min(found)
    stride = rows.placements[0][0].block_stride
    return found | {first + r * stride for r in range(rows.rows_per_slab + 1)}


def nearest(offset: int, nbytes: int, width: int) -> int:
    return floor(Fraction(offset * width, nbytes) + Fraction(1, 2))


def edges(lines: list[str], width: int) -> tuple[int, list[list[int]]]:
    """Columns of the ruler, and per line the columns of its edges."""
    start = min(line.index("│") for line in lines)
    return width - 1 - start, [
        [at - start for at, letter in enumerate(line) if letter == "│"] for line in lines
    ]


@given(layouts(), st.integers(60, 120))
def test_a_slab_picture_has_one_line_per_group_and_is_as_wide_as_asked(layout, width):
    title, *lines = slab_picture(layout, width=width).splitlines()
    assert len(lines) == len(layout.groups)
    for line, rows in zip(lines, layout.groups, strict=True):
        assert line.split()[0] == rows.group.name
    assert max(map(len, lines)) == width
    assert len(title) <= width


@given(layouts(), st.integers(60, 120))
def test_every_edge_of_a_slab_stands_at_the_column_nearest_to_a_boundary(layout, width):
    if not are_rows(layout) or len(layout.sharing) > 1:
        return
    _, *lines = slab_picture(layout, width=width).splitlines()
    columns, drawn = edges(lines, width)
    for g, line in enumerate(drawn):
        places = {nearest(b, layout.slab_bytes, columns) for b in boundaries(layout, g)}
        assert set(line) <= places | {columns}
        assert line[0] == 0
        assert line[-1] == columns


@given(layouts(), st.integers(60, 120))
def test_rows_are_drawn_to_one_scale_up_to_their_stride(layout, width):
    if not are_rows(layout):
        return
    _, *lines = rows_picture(layout, width=width).splitlines()
    strides = [rows.placements[0][0].block_stride for rows in layout.groups]
    columns, drawn = edges(lines, width)
    for g, line in enumerate(drawn):
        rows = layout.groups[g]
        base = min(page[0].offset for page in rows.placements)
        places = {nearest(b - base, max(strides), columns) for b in boundaries(layout, g)}
        assert set(line) <= places
        assert line[-1] == nearest(strides[g], max(strides), columns)


@given(layouts(), st.integers(60, 120))
def test_a_page_that_is_named_stands_where_its_layer_is(layout, width):
    if not are_rows(layout) or layout.order == "BHLNC":
        return
    _, *lines = rows_picture(layout, width=width).splitlines()
    longest = max(rows.placements[0][0].block_stride for rows in layout.groups)
    start = min(line.index("│") for line in lines)
    for line, rows in zip(lines, layout.groups, strict=True):
        base = min(page[0].offset for page in rows.placements)
        for found in re.finditer(r"│ ?(L\d+)", line):
            places = {
                nearest(page[0].offset - base, longest, width - 1 - start)
                for layer, page in zip(rows.group.layers, rows.placements, strict=True)
                if layer_label(layer) == found[1]
            }
            assert found.start() - start in places


def test_the_picture_in_the_modules_docstring_is_the_one_that_is_drawn():
    picture = slab_picture(packed(grouped(example()), num_slabs=9))
    assert text.__doc__ is not None
    assert indent(picture, "    ") in text.__doc__


def test_padding_is_drawn_as_long_as_it_is():
    layers = (
        attention("layers.0", heads=8, dim=128, tokens=16),
        attention("layers.1", heads=8, dim=96, tokens=16, retention=Window(8)),
    )
    _, full, window = slab_picture(union(grouped(layers), num_slabs=3)).splitlines()
    columns = len(full) - 1 - full.index("│")
    assert full.count("·") == 0
    assert window.count("·") == round(columns / 4)  # 96 of 128 are used
    assert window.endswith("·│")


def test_a_layer_compact_order_shows_one_place_per_layer():
    picture = slab_picture(packed(grouped(example()[:1]), num_slabs=3, site=Site(order="LBHNC")))
    assert picture.splitlines()[1].count("│") == 2
    several = separate(grouped(example()), num_slabs=3, site=Site(order="LBHNC"))
    title, full, window = slab_picture(several).splitlines()
    assert "a block is in several places" in title
    assert re.findall(r"L\d+", full) == ["L0", "L3", "L6"]
    assert full.index("│") < window.index("│")


def test_heads_are_marked_where_they_are_outermost_in_the_row():
    layout = packed(grouped(example()[:1]), num_slabs=3, site=Site(order="BHLNC"))
    line = slab_picture(layout).splitlines()[1]
    assert re.findall(r"H\d+", line) == [f"H{head}" for head in range(8)]


def test_groups_that_share_nothing_lie_one_after_the_other():
    layout = separate(grouped(example()), num_slabs=9)
    _, full, window = slab_picture(layout).splitlines()
    assert full.rindex("│") == window.index("│")


@pytest.mark.parametrize(
    ("name", "short"),
    [
        ("model.layers.12.self_attn", "L12"),
        ("model.layers.3.attn.indexer", "L3"),
        ("ALL_LAYERS", "ALL_LAYE"),
        ("encoder", "encoder"),
    ],
)
def test_a_layer_is_called_by_its_number_where_it_has_one(name, short):
    assert layer_label(attention(name)) == short


def test_very_long_names_leave_room_for_the_picture():
    layers = [attention("x" * 300), recurrent("9" * 100)]
    for pack in (packed, union, separate):
        layout = pack(grouped(layers), num_slabs=2)
        for picture in (slab_picture(layout), rows_picture(layout)):
            assert max(map(len, picture.splitlines())) <= 80


def bars(names, *, parts=()):
    """Bars of equal length on 100 bytes."""
    each = 100 // len(names)
    return [Bar(Run(i * each, each), name, parts) for i, name in enumerate(names)]


def test_a_ruler_names_as_many_bars_as_fit_at_even_steps():
    ruler = Ruler(nbytes=100, width=20)
    assert ruler.drawn(bars([(f"item {i}", str(i)) for i in range(10)])) == "│0│1│2│3│4│5│6│7│8│9│"
    assert ruler.drawn(bars([(f"item {i}", str(i)) for i in range(20)])) == "│0   │5   │10  │15  │"
    assert ruler.drawn(bars([("item 0", "0")])) == "│ item 0            │"
    assert ruler.drawn(bars([("row 0", "0")], parts=("a", "b"))) == "│ row 0: a b        │"
    assert ruler.drawn(bars([("row", "0")], parts=("abcdef",) * 3)) == "│ row: abcdef …     │"
